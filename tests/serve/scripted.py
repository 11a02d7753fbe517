"""An engine whose answers are written down: everything around the model is real, the model is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paceline.engine.async_engine import EngineLoad
from paceline.engine.build import EngineInfo
from paceline.engine.events import Listener, StepEvent
from paceline.engine.output import Delta, KVReport, Output, SpeculationReport, Timing, Usage
from paceline.engine.snapshot import CacheSnapshot, OwnedBlocks
from paceline.engine.text import TextStream
from paceline.errors import ContextLengthError
from paceline.loader.chat import ChatTemplate
from paceline.loader.tokenizer import IncrementalDetokenizer, Tokenizer
from paceline.records import TokenLogprob
from paceline.request import SamplingParams, Speculation, StructuredOutput
from paceline.sampling.grammar import GrammarCompiler

PLAIN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n<tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}{% if tools %}[TOOL_CALLS]{% endif %}"
)
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "[TOOL_CALLS]"]
REPOSITORY_SPECIALS = ["<|repo_name|>", "<|file_sep|>"]


def make_tokenizer(
    template: str | None = PLAIN_TEMPLATE, *, has_fim: bool = True, has_repositories: bool = False
) -> Tokenizer:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([text for text in SPECIALS if has_fim or "fim" not in text])
    backend.add_special_tokens(REPOSITORY_SPECIALS if has_repositories else [])
    end = backend.token_to_id("<|im_end|>")
    return Tokenizer(
        backend, bos_token_id=None, eos_token_id=end, eos_token_ids=[end], adds_bos=False, chat_template=template
    )


@dataclass(frozen=True)
class Name:
    """What the server knows of a session."""

    session_id: str


@dataclass
class Call:
    """One generation the engine was asked for."""

    text: str
    token_ids: list[int]
    params: SamplingParams
    speculation: Speculation | None
    prediction: str | None
    session_id: str | None
    is_closed: bool = False
    num_steps: int = 0


@dataclass
class ScriptedEngine:
    """Answers with ``script(prompt text)``, ``horizon + 1`` tokens a step, ``pause`` seconds apart."""

    script: Callable[[str], str]
    horizon: int = 3
    pause: float = 0.0
    tokenizer: Tokenizer = field(default_factory=make_tokenizer)
    fails: Callable[[], Exception | None] = lambda: None
    max_model_len: int = 100_000
    stalled: float = 0.0
    calls: list[Call] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    listeners: list[Listener] = field(default_factory=list)
    speculation: Speculation = field(default_factory=Speculation)
    is_closed: bool = False

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            "scripted", None, "none", "cpu", "fp32", self.max_model_len, 16, 64, 2**20, ("prediction", "suffix")
        )

    @property
    def num_open(self) -> int:
        return sum(not call.is_closed for call in self.calls)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(self.num_open, 0, 3 * self.num_open, 64, self.stalled)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        return ChatTemplate(self.tokenizer.chat_template, eos_token=self.tokenizer.eos_token).render(
            messages, **options
        )

    def session(self, session_id: str) -> Any:
        return Name(session_id)

    def subscribe(self, listener: Listener) -> None:
        self.listeners.append(listener)

    async def release_session(self, session_id: str) -> None:
        self.released.append(session_id)

    async def snapshot(self) -> CacheSnapshot:
        states = [2, 2, 3, 1] + [0] * 60
        return CacheSnapshot(16, states, [OwnedBlocks("request-0", 30, 3, 1)])

    async def compile_grammar(self, structured: StructuredOutput) -> None:
        GrammarCompiler(self.tokenizer).compile(structured)

    async def score(self, token_ids: Sequence[int], num_top: int = 0) -> list[TokenLogprob]:
        return [TokenLogprob(one, -0.5, {one: -0.5} if num_top else {}) for one in token_ids[1:]]

    async def aclose(self) -> None:
        self.is_closed = True

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str | None = None,
        session: Any = None,
    ) -> AsyncGenerator[Delta, None]:
        params = params or SamplingParams()
        text = self.tokenizer.decode(prompt, skip_special_tokens=False)
        name = session.session_id if session is not None else None
        call = Call(text, list(prompt), params, speculation, prediction, name)
        self.calls.append(call)
        try:
            if len(prompt) >= self.max_model_len:
                raise ContextLengthError("the prompt leaves no room; shorten the prompt")
            async for delta in self._deltas(call):
                call.num_steps += 1
                yield delta
        finally:
            call.is_closed = True

    async def _deltas(self, call: Call) -> AsyncGenerator[Delta, None]:
        params = call.params
        ids = [*self.tokenizer.encode(self.script(call.text)), *self.tokenizer.eos_token_ids]
        detokenizer = IncrementalDetokenizer(self.tokenizer, skip_special_tokens=params.skip_special_tokens)
        stream = TextStream(detokenizer, params.stop, include_stop=params.include_stop_str_in_output)
        limit = params.max_tokens or 10_000
        out: list[int] = []
        while True:
            await asyncio.sleep(self.pause)
            if (error := self.fails()) is not None:
                raise error
            fresh, reason = [], None
            for token_id in ids[len(out) : len(out) + self.horizon + 1]:
                out.append(token_id)
                fresh.append(token_id)
                is_end = token_id in self.tokenizer.eos_token_ids or token_id in params.stop_token_ids
                if is_end or stream.push(token_id, "suffix", may_stop=True):
                    reason = "stop"
                elif len(out) == limit:
                    reason = "length"
                if reason:
                    stream.close("suffix")
                    break
            for listener in self.listeners:
                listener(self._event(len(out), len(fresh) - 1))
            pieces = stream.drain()
            logprobs = [TokenLogprob(one, -0.25, {one: -0.25}) for one in fresh] if params.logprobs is not None else []
            output = self._output(call, stream, out, reason) if reason else None
            yield Delta("".join(piece.text for piece in pieces), pieces, fresh, output, logprobs)
            if reason:
                return

    def _event(self, step: int, num_accepted: int) -> StepEvent:
        return StepEvent(
            "request-0", step, self.horizon, self.horizon, num_accepted, "bonus", "suffix", 4, 3, step, 0.1, 1.0, 1.2
        )

    def _output(self, call: Call, stream: TextStream, out: list[int], reason: Any) -> Output:
        logprobs = [TokenLogprob(one, -0.25, {one: -0.25}) for one in out] if call.params.logprobs is not None else None
        by_source = {"suffix": 4, "prediction": 3} if call.prediction else {"suffix": 4}
        return Output(
            text=stream.text,
            token_ids=out,
            finish_reason=reason,
            usage=Usage(len(call.token_ids), 7, len(out)),
            timing=Timing(10.0, 20.0, 100.0, 5.0, 6.0),
            speculation=SpeculationReport(
                mode="dynamic",
                num_spec_steps=2,
                num_draft_tokens=8,
                num_accepted_draft_tokens=4,
                draft_acceptance_rate=0.5,
                mean_acceptance_length=3.0,
                acceptance_histogram=[0, 0, 2],
                mean_horizon=4.0,
                accepted_by_source=by_source,
                drafted_by_source=by_source,
                horizon_histogram=[0, 0, 0, 0, 2],
                calibration_error=0.1,
            ),
            kv=KVReport(16, 64, 3, 0.1),
            logprobs=logprobs,
            stop_reason=stream.stopped_by,
        )
