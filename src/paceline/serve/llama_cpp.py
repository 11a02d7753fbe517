"""llama-server's own routes that editors use: POST /infill, GET /props, GET /slots."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from paceline import __version__
from paceline.engine.output import Delta, Output
from paceline.request import SamplingParams, Speculation, StructuredOutput
from paceline.serve import reports
from paceline.serve.errors import ApiError
from paceline.serve.exchange import answer, service_of, stream
from paceline.serve.fim import fill_in_middle
from paceline.serve.sampling import SpeculativeOptions, WireModel, speculation, stop_strings
from paceline.serve.service import Branch, Generation, Job, Service
from paceline.serve.streaming import JSONBytes, data_event
from paceline.serve.structure import Structure, compile_structure, json_schema, one_structure

router = APIRouter()


class ExtraFile(BaseModel):
    """A piece of another file. Editors send more about it than matters here."""

    text: str
    filename: str = ""


class InfillRequest(WireModel):
    """The body. What steers llama.cpp's slots, samplers and time limits is let in and has no effect here."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] = Field(default_factory=list, max_length=1024)
    prompt: str = ""
    n_predict: Annotated[int, Field(ge=-1)] = -1
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-1, lt=2**64)] = -1
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    ignore_eos: bool = False
    stream: bool = False
    return_tokens: bool = False
    response_fields: list[str] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    speculative: bool | SpeculativeOptions | None = None
    model: str | None = None
    cache_prompt: Any = None
    id_slot: Any = None
    samplers: Any = None
    n_indent: Any = None
    t_max_prompt_ms: Any = None
    t_max_predict_ms: Any = None

    def params(self) -> SamplingParams:
        """The engine's parameters. ``n_predict`` 0, which only fills the cache, is one token that nobody sees.

        Raises:
            InvalidParameterError: a value the engine does not accept.
        """
        return SamplingParams(
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=None if self.seed == -1 else self.seed,
            repetition_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            max_tokens=None if self.n_predict == -1 else max(1, self.n_predict),
            stop=stop_strings(self.stop),
            ignore_eos=self.ignore_eos,
        )

    def structure(self) -> Structure | None:
        """What the answer must look like.

        Raises:
            ApiError: 400, there are two.
        """
        return one_structure(
            {
                "grammar": StructuredOutput.grammar(self.grammar) if self.grammar else None,
                "json_schema": json_schema("json_schema", self.json_schema),
            }
        )


@router.post("/infill", summary="Fill in code between two texts (llama.cpp)")
async def infill(body: InfillRequest, request: Request) -> Response:
    """What stands between ``input_prefix`` and ``input_suffix``, beginning with ``prompt``."""
    service = service_of(request)
    model = service.require_model(body.model)
    params, structure = body.params(), body.structure()
    drafting = speculation(body.speculative, service.engine.speculation)
    ticket = service.admit()
    try:
        fim = fill_in_middle(service.engine.tokenizer, param="input_suffix")
        if structure is not None:
            await compile_structure(service.engine, structure, service.config.max_grammar_bytes)
        extra = [(file.filename, file.text) for file in body.input_extra]
        text = fim.prompt(body.input_prefix, body.input_suffix, middle=body.prompt, extra=extra)
        params = replace(
            params,
            stop_token_ids=tuple(fim.stop_token_ids),
            structured=structure.output if structure is not None else None,
        )
        prompt = await service.text_prompt(text)
    except BaseException:
        ticket.close()
        raise
    writer = _Writer(service, Job([Branch(prompt, params)], drafting), text, model, body)
    if body.stream:
        return stream(service, ticket, writer.chunks())
    return await answer(request, ticket, writer.whole())


class _Writer:
    """Writes a job as llama-server's completion object, or as its chunks."""

    def __init__(self, service: Service, job: Job, text: str, model: str, body: InfillRequest) -> None:
        self._service = service
        self._job = job
        self._text = text
        self._model = model
        self._body = body

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The stream: text as it comes, then an object with everything else."""
        async with aclosing(self._service.run(self._job)) as deltas:
            async for _, delta in deltas:
                if delta.text and self._body.n_predict:
                    yield data_event(self._chunk(delta))
        yield data_event(self._result("", []))

    async def whole(self) -> Response:
        """The answer in one piece."""
        async with aclosing(self._service.run(self._job)) as deltas:
            async for _ in deltas:
                pass
        output = self._job.outputs[0]
        is_shown = self._body.n_predict != 0
        tokens = list(output.token_ids) if self._body.return_tokens and is_shown else []
        return JSONBytes(self._result(output.text if is_shown else "", tokens))

    def _chunk(self, delta: Delta) -> dict[str, Any]:
        return {"index": 0, "content": delta.text, "tokens": list(delta.token_ids), "stop": False}

    def _result(self, content: str, tokens: list[int]) -> dict[str, Any]:
        output, usage = self._job.outputs[0], self._job.outputs[0].usage
        max_model_len = self._service.engine.info.max_model_len
        result = {
            "index": 0,
            "content": content,
            "tokens": tokens,
            "stop": True,
            "model": self._model,
            "prompt": self._text,
            "generation_settings": {
                "n_ctx": max_model_len,
                **_settings(self._job.branches[0].params, self._job.speculation),
            },
            "tokens_predicted": usage.completion_tokens if self._body.n_predict else 0,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "has_new_line": "\n" in output.text,
            "truncated": usage.prompt_tokens + usage.completion_tokens >= max_model_len,
            **_stop(output),
            "timings": reports.timings(output),
            "metrics": reports.metrics(output, self._job.speculation),
        }
        if self._body.response_fields is None:
            return result
        return {path: value for path in self._body.response_fields if (value := _find(result, path)) is not None}


def _stop(output: Output) -> dict[str, Any]:
    """Why it ended, in llama-server's words."""
    if output.finish_reason == "length":
        return {"stop_type": "limit", "stopping_word": ""}
    is_word = isinstance(output.stop_reason, str)
    return {"stop_type": "word" if is_word else "eos", "stopping_word": output.stop_reason if is_word else ""}


def _find(result: dict[str, Any], path: str) -> Any:
    """The value at ``a/b``, or None."""
    value: Any = result
    for part in path.split("/"):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _settings(params: SamplingParams, drafting: Speculation) -> dict[str, Any]:
    """Sampling parameters under llama.cpp's names."""
    return {
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "max_tokens": -1 if params.max_tokens is None else params.max_tokens,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "speculative.n_max": 0 if drafting.mode == "off" else drafting.max_tokens,
    }


@router.get("/props", summary="The server's properties (llama.cpp)")
async def props(request: Request) -> Response:
    """What the server runs and how it samples by default, under llama-server's names."""
    service = service_of(request)
    engine = service.engine
    tokenizer = engine.tokenizer
    return JSONBytes(
        {
            "default_generation_settings": _slot(service, 0, None),
            "total_slots": service.config.max_num_seqs,
            "model_alias": service.model_names[0],
            "model_path": engine.info.model,
            "chat_template": tokenizer.chat_template or "",
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"paceline-{__version__}",
            "is_sleeping": False,
        }
    )


@router.get("/slots", summary="What is being generated (llama.cpp)")
async def slots(request: Request, fail_on_no_slot: bool = False) -> Response:
    """One entry per request that may run at once; those that wait for a place are not listed."""
    service = service_of(request)
    num_slots = service.config.max_num_seqs
    running = list(service.generations.items())[:num_slots]
    if fail_on_no_slot and len(running) == num_slots:
        raise ApiError(503, "no slot available", headers={"Retry-After": "1"})
    entries = [_slot(service, index, item) for index, item in enumerate(running)]
    return JSONBytes(entries + [_slot(service, index, None) for index in range(len(running), num_slots)])


def _slot(service: Service, index: int, running: tuple[int, Generation] | None) -> dict[str, Any]:
    engine = service.engine
    drafting = engine.speculation if running is None else running[1].speculation
    slot: dict[str, Any] = {
        "id": index,
        "id_task": -1,
        "n_ctx": engine.info.max_model_len,
        "speculative": drafting.mode != "off",
        "is_processing": running is not None,
        "params": _settings(SamplingParams(temperature=1.0), drafting),
        "next_token": {"has_next_token": False, "n_remain": -1, "n_decoded": 0},
    }
    if running is not None:
        number, generation = running
        params, num_tokens = generation.branch.params, generation.num_tokens
        num_left = -1 if params.max_tokens is None else params.max_tokens - num_tokens
        slot |= {
            "id_task": number,
            "params": _settings(params, drafting),
            "n_prompt_tokens": len(generation.branch.prompt.token_ids),
            "next_token": {"has_next_token": True, "n_remain": num_left, "n_decoded": num_tokens},
        }
    return slot
