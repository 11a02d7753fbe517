"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from paceline.engine.output import Output
from paceline.serve import reports
from paceline.serve.errors import ApiError
from paceline.serve.exchange import answer, service_of, stream
from paceline.serve.fim import fill_in_middle
from paceline.serve.sampling import SamplingFields, speculation
from paceline.serve.service import Branch, Job, Prompt, Service
from paceline.serve.streaming import DONE, JSONBytes, data_event
from paceline.serve.structure import compile_structure

router = APIRouter()

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_MAX_PROMPTS = 256


class CompletionRequest(SamplingFields):
    """The body."""

    prompt: str | list[str] | list[int] | list[list[int]]
    suffix: str | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prediction: dict[str, Any] | None = None

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt.

        Raises:
            ApiError: 400, there is none, or there are too many.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(400, "the prompt is empty; give at least one token of text", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        if len(self.prompt) > _MAX_PROMPTS:
            raise ApiError(400, f"at most {_MAX_PROMPTS} prompts fit one request", param="prompt")
        return list(self.prompt)


@router.post("/v1/completions", summary="Continue a text")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """OpenAI's completions: several prompts, echo with log-probabilities of the prompt, and ``suffix``."""
    service = service_of(request)
    model = service.require_model(body.model)
    structure = body.structure()
    texts = body.prompts()
    num_choices = body.n or 1
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    # A request for no token at all is a request for the prompt's log-probabilities; it generates nothing.
    params = [
        body.params(max_tokens=max(1, max_tokens), logprobs=body.logprobs, choice=index) for index in range(num_choices)
    ]
    drafting = speculation(body.speculative, service.engine.speculation)
    ticket = service.admit(len(texts) * num_choices)
    try:
        if max_tokens == 0 and not body.echo:
            raise ApiError(400, "max_tokens 0 needs echo: nothing else would be in the answer", param="max_tokens")
        if structure is not None:
            await compile_structure(service.engine, structure, service.config.max_grammar_bytes)
            params = [replace(one, structured=structure.output) for one in params]
        fim = fill_in_middle(service.engine.tokenizer, param="suffix") if body.suffix else None
        if fim is not None:
            params = [replace(one, stop_token_ids=(*one.stop_token_ids, *fim.stop_token_ids)) for one in params]
        prompts = []
        for text in texts:
            if fim is not None:
                if not isinstance(text, str):
                    raise ApiError(400, "a suffix needs the prompt as text", param="suffix")
                text = fim.prompt(text, body.suffix or "")
            prompts.append(await service.text_prompt(text, body.session_key if len(texts) == 1 else None))
    except BaseException:
        ticket.close()
        raise
    branches = [
        Branch(prompt if index == 0 else replace(prompt, conversation=None), one)
        for prompt in prompts
        for index, one in enumerate(params)
    ]
    prediction = body.prediction.get("content") if body.prediction else None
    job = Job(
        branches,
        drafting,
        prediction if isinstance(prediction, str) else None,
    )
    writer = _Writer(service, job, prompts, texts, model, body, generates=max_tokens > 0)
    if body.stream:
        return stream(service, ticket, writer.chunks())
    return await answer(request, ticket, writer.whole())


class _Writer:
    """Writes a job as a ``text_completion``, or as its chunks."""

    def __init__(
        self,
        service: Service,
        job: Job,
        prompts: Sequence[Prompt],
        texts: Sequence[str | list[int]],
        model: str,
        body: CompletionRequest,
        *,
        generates: bool,
    ) -> None:
        self._service = service
        self._job = job
        self._prompts = prompts
        self._texts = texts
        self._body = body
        self._generates = generates
        self._num_choices = body.n or 1
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._logprobs = [reports.CompletionLogprobs(service.engine.tokenizer) for _ in job.branches]

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The stream, the closing mark included."""
        options = self._body.stream_options
        for index in range(len(self._job.branches) if self._body.echo else 0):
            text, logprobs = await self._echo(index)
            yield data_event({**self._head, "choices": [_choice(index, text, logprobs, None)]})
        if self._generates:
            async with aclosing(self._service.run(self._job)) as deltas:
                async for index, delta in deltas:
                    logprobs = None
                    if self._body.logprobs is not None:
                        logprobs = self._logprobs[index].entries(delta.logprobs)
                    chunk = {**self._head, "choices": [_choice(index, delta.text, logprobs, delta.output)]}
                    is_last = len(self._job.outputs) == len(self._job.branches)
                    if is_last and not (options is not None and options.include_usage):
                        chunk |= {"usage": self._usage(), **self._report()}
                    yield data_event(chunk)
        if options is not None and options.include_usage:
            yield data_event({**self._head, "choices": [], "usage": self._usage(), **self._report()})
        yield DONE

    async def whole(self) -> Response:
        """The answer in one piece."""
        echoes = [await self._echo(index) for index in range(len(self._job.branches) if self._body.echo else 0)]
        if self._generates:
            async with aclosing(self._service.run(self._job)) as deltas:
                async for _ in deltas:
                    pass
        choices = []
        for index in range(len(self._job.branches)):
            output = self._job.outputs.get(index)
            text, pieces = "", []
            if echoes:
                text, logprobs = echoes[index]
                pieces += [logprobs] if logprobs is not None else []
            if output is not None:
                text += output.text
                pieces += [self._logprobs[index].entries(output.logprobs)] if output.logprobs is not None else []
            joined = reports.join_logprobs(pieces) if self._body.logprobs is not None else None
            choices.append(_choice(index, text, joined, output, is_over=True))
        return JSONBytes({**self._head, "choices": choices, "usage": self._usage(), **self._report()})

    async def _echo(self, index: int) -> tuple[str, dict[str, Any] | None]:
        """The prompt's text, and its log-probabilities where they are asked for."""
        prompt, text = self._prompts[index // self._num_choices], self._texts[index // self._num_choices]
        engine = self._service.engine
        shown = text if isinstance(text, str) else engine.tokenizer.decode(text, skip_special_tokens=False)
        if self._body.logprobs is None:
            return shown, None
        scores = await engine.score(prompt.token_ids, self._body.logprobs)
        writer = self._logprobs[index]
        return shown, reports.join_logprobs([writer.first(prompt.token_ids[0]), writer.entries(scores)])

    def _usage(self) -> dict[str, Any]:
        outputs = [self._job.outputs[index] for index in sorted(self._job.outputs)]
        if outputs:
            return reports.openai_usage(outputs, num_prompts=len(self._prompts))
        num_prompt = sum(len(prompt.token_ids) for prompt in self._prompts)
        return {"prompt_tokens": num_prompt, "completion_tokens": 0, "total_tokens": num_prompt}

    def _report(self) -> dict[str, Any]:
        output = self._job.outputs.get(0)
        if output is None:
            return {}
        return {"timings": reports.timings(output), "metrics": reports.metrics(output, self._job.speculation)}


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, output: Output | None, *, is_over: bool = False
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
    if output is not None:
        choice |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
    elif is_over:
        choice["finish_reason"] = "length"
    return choice
