"""The public engine: text or messages in, text out; one thread at a time inside."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.engine.build import EngineInfo, assemble
from paceline.engine.core import EngineCore, RequestState
from paceline.engine.events import Listener
from paceline.engine.output import Delta, Output
from paceline.engine.session import Session
from paceline.engine.snapshot import CacheSnapshot, take_snapshot
from paceline.engine.text import TextStream
from paceline.engine.tracker import RequestTracker
from paceline.errors import ContextLengthError, InvalidPromptError
from paceline.loader.chat import ChatTemplate
from paceline.loader.tokenizer import IncrementalDetokenizer
from paceline.records import TokenLogprob
from paceline.request import Constraint, Request, SamplingParams, Speculation
from paceline.sampling.grammar import GrammarCompiler
from paceline.sampling.penalties import TokenHistory, require_valid_bias

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]


class Engine:
    """A model ready to generate, with speculation.

    ``model`` is a catalog name, a hub id, a Hugging Face folder or a .gguf file. ``draft`` names a draft model the
    same way; "auto" takes the one the catalog pairs with the model, None uses none. ``corpus`` names files and folders
    of the user's that answers are likely to quote: drafts are looked up in them. ``options`` are the fields of
    :mod:`paceline.config`'s sections, for example ``block_size=16, dtype="fp32", max_model_len=4096``.

    Calls from several threads are served in turn, step by step. Use as a context manager or call :meth:`close`.

    Raises:
        PacelineError: a subclass that says what cannot be loaded, and what to do.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        draft: str | Path | None = "auto",
        corpus: Sequence[str | Path] = (),
        **options: Any,
    ) -> None:
        self.config = EngineConfig.from_options(options)
        parts = assemble(model, draft, self.config, corpus)
        self.core: EngineCore = parts.core
        self.tokenizer = parts.tokenizer
        self.info: EngineInfo = parts.info
        self.grammars = GrammarCompiler(parts.tokenizer)
        self._chat: ChatTemplate | None = None
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._inboxes: dict[str, list[Delta]] = {}

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is running."""
        with self._lock:
            for request_id in list(self._inboxes):
                self.cancel(request_id)

    def subscribe(self, listener: Listener) -> None:
        """Have ``listener`` called with a StepEvent for each request of each step, on the stepping thread."""
        self.core.listeners.append(listener)

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template, compiled at first use: a base model may have none.

        Raises:
            ChatTemplateError: there is none, or it is malformed.
        """
        if self._chat is None:
            tokenizer = self.tokenizer
            self._chat = ChatTemplate(
                tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
            )
        return self._chat

    def render(self, messages: Sequence[Message], **template_options: Any) -> str:
        """The model's chat template applied to messages, ready for the assistant's turn.

        Raises:
            ChatTemplateError: the model has no template, or the template rejects the messages.
        """
        return self.chat_template.render(messages, **template_options)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str | None = None,
        session: Session | None = None,
    ) -> Output:
        """Generate to the end; see :meth:`stream`."""
        output: Output | None = None
        for delta in self.stream(prompt, params, speculation=speculation, prediction=prediction, session=session):
            output = delta.output
        assert output is not None, "a stream ends with its output"
        return output

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str | None = None,
        session: Session | None = None,
    ) -> Iterator[Delta]:
        """Generate piece by piece; the last delta carries the Output. Abandoning the iterator cancels the request.

        ``prompt`` is raw text, a list of chat messages, or token ids. ``prediction`` is text the answer is expected to
        repeat; it is only ever a draft. With ``session``, what was verified stays referenced for its next turn.

        Raises:
            InvalidPromptError, ContextLengthError, ChatTemplateError: the prompt cannot be served.
            GrammarError: the structured output asked for cannot be compiled.
            CacheCapacityError: the request could never fit the KV cache.
        """
        request_id = self.submit(prompt, params, speculation=speculation, prediction=prediction, session=session)
        deltas = self._follow(request_id)
        next(deltas)  # only a generator that has begun runs its `finally` when it is dropped
        return deltas

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str | None = None,
        session: Session | None = None,
    ) -> str:
        """Queue a request and return its id; :meth:`step` advances it, :meth:`take` collects its deltas."""
        params = params or SamplingParams()
        token_ids = self._tokenize(prompt)
        number = next(self._numbers)
        request = Request(
            request_id=f"request-{number}",
            prompt_token_ids=token_ids,
            params=params,
            speculation=speculation or self.config.speculation,
            max_total_tokens=self._max_total_tokens(len(token_ids), params),
            prediction_token_ids=self.tokenizer.encode(prediction) if prediction else (),
            session_id=session.session_id if session is not None else None,
            arrival=number,
            constraint=self._constraint(params),
        )
        with self._lock:
            self.core.add(self._state(request))
            self._inboxes[request.request_id] = []
        return request.request_id

    def step(self) -> bool:
        """Advance every request by one step; False when there was nothing to do."""
        with self._lock:
            if not self.core.scheduler.has_work:
                return False
            for request_id, delta in self.core.step().items():
                self._inboxes[request_id].append(delta)
            return True

    def take(self, request_id: str) -> list[Delta]:
        """The deltas of a request not collected yet; after the one that carries the output it is forgotten."""
        with self._lock:
            deltas = self._inboxes.pop(request_id, [])
            if request_id in self.core:
                self._inboxes[request_id] = []
            return deltas

    def cancel(self, request_id: str) -> None:
        """Stop a request and free its blocks; whoever follows it gets an output with reason "cancelled".

        A finished or unknown id is ignored.
        """
        with self._lock:
            delta = self.core.cancel(request_id)
            if delta is not None:
                self._inboxes[request_id].append(delta)

    def reset_prefix_cache(self) -> None:
        """Forget everything computed for earlier prompts, their answers included, for a cold start."""
        with self._lock:
            self.core.cache.reset_prefix_cache()
            self.core.ladder.forget_answers()

    def session(self, messages: Sequence[Message] = (), *, session_id: str | None = None) -> Session:
        """A conversation whose prefix stays in the cache between turns; ``messages`` opens it."""
        return Session(self, messages, session_id=session_id)

    def snapshot(self) -> CacheSnapshot:
        """Who holds which block at this moment."""
        with self._lock:
            return take_snapshot(self.core.cache)

    def score(self, token_ids: Sequence[int], num_top: int = 0) -> list[TokenLogprob]:
        """The log-probability of each token but the first, given those before it; nothing is generated.

        ``num_top`` alternatives are named for each.

        Raises:
            InvalidPromptError, ContextLengthError: there is nothing to score, or it is longer than the context.
            CacheCapacityError: too few blocks are free at the moment.
        """
        with self._lock:
            return self.core.score(self._whole_text(token_ids), num_top)

    def hidden_states(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """The model's last hidden states, after the final norm: for each text [num_tokens, hidden_size].

        Raises:
            InvalidPromptError, ContextLengthError: a text is empty, or longer than the context.
            CacheCapacityError: too few blocks are free at the moment.
        """
        with self._lock:
            return self.core.hidden_states([self._whole_text(token_ids) for token_ids in texts])

    def fork_session(self, session_id: str, new_session_id: str) -> None:
        """Let a second session reference the first one's prefix."""
        with self._lock:
            self.core.scheduler.fork_session(session_id, new_session_id)

    def release_session(self, session_id: str) -> None:
        """Let the cache reuse a session's blocks; they stay findable until then."""
        with self._lock:
            self.core.scheduler.release_session(session_id)

    def _follow(self, request_id: str) -> Iterator[Delta]:
        """The deltas of a request as they come, after a first empty one."""
        try:
            yield Delta("", (), ())
            while True:
                for delta in self.take(request_id):
                    yield delta
                    if delta.output is not None:
                        return
                self.step()
        finally:
            with self._lock:
                self.cancel(request_id)
                self._inboxes.pop(request_id, None)

    def _tokenize(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt, add_special_tokens=True)
        elif prompt and isinstance(prompt[0], Mapping):
            token_ids = self.tokenizer.encode(self.render(prompt))  # type: ignore[arg-type]
        else:
            token_ids = list(prompt)  # type: ignore[arg-type]
        if not token_ids:
            raise InvalidPromptError("the prompt is empty; give at least one token of text")
        for token_id in token_ids:
            if not isinstance(token_id, int):
                raise InvalidPromptError(
                    f"a prompt is text, messages or token ids, but it holds a {type(token_id).__name__}"
                )
            if not 0 <= token_id < self.tokenizer.vocab_size:
                raise InvalidPromptError(
                    f"token id {token_id} is outside the vocabulary of {self.tokenizer.vocab_size} tokens"
                )
        return token_ids

    def _whole_text(self, token_ids: Sequence[int]) -> list[int]:
        """A text that is read to its end, and not continued."""
        if len(token_ids) > self.info.max_model_len:
            raise ContextLengthError(
                f"{len(token_ids)} tokens to read exceed the context of {self.info.max_model_len}; shorten the prompt"
            )
        return self._tokenize(token_ids)

    def _max_total_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        limit = self.info.max_model_len
        if num_prompt_tokens >= limit:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens and the context holds {limit}, answer included; "
                "shorten the prompt or choose a model with a longer context"
            )
        if params.max_tokens is None:
            return limit
        return min(limit, num_prompt_tokens + params.max_tokens)

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        if params.structured is None:
            return None
        return self.grammars.matcher(params.structured, may_end=not params.ignore_eos)

    def _state(self, request: Request) -> RequestState:
        params = request.params
        require_valid_bias(params, self.tokenizer.vocab_size)
        generator = torch.Generator()
        generator.seed()
        ends = frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids
        return RequestState(
            request=request,
            text=TextStream(
                IncrementalDetokenizer(self.tokenizer, skip_special_tokens=params.skip_special_tokens),
                params.stop,
                include_stop=params.include_stop_str_in_output,
            ),
            history=TokenHistory(request.prompt_token_ids),
            generator=generator,
            tracker=RequestTracker(request),
            end_token_ids=ends | frozenset(params.stop_token_ids),
        )
