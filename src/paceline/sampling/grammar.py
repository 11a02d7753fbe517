"""Structured output: compiles what an answer must look like, and says what may come next after any few tokens.

The parser is llguidance's (https://github.com/guidance-ai/llguidance, MIT): an Earley parser whose lexer walks the
model's own vocabulary. Its masks are a function of the tokens before them alone, so that the row after i drafts is
masked as plain decoding would mask it (law 4).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from paceline.errors import GrammarError
from paceline.request import FinishReason, StructuredOutput
from paceline.sampling.token_table import TokenTable, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger("paceline")

# Compiled grammars that are kept: an agent sends the same few with every turn.
_MAX_COMPILED = 32
# Of 1 to 2 KB each.
_MAX_LEXER_STATES = 50_000
# How JSON is written, in llguidance's words: on one line, with a space behind commas and colons or without. Whoever may
# write blanks wherever JSON allows them does so before every colon, or for ever.
JSON_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
)
_NOUNS = {
    "json_schema": "the JSON schema",
    "json_object": "the JSON object",
    "regex": "the regular expression",
    "grammar": "the grammar",
}


class GrammarCompiler:
    """Makes a matcher for each request; what was compiled is kept. Any thread may call it.

    Nothing is built before the first structured output is asked for.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._building = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()

    def matcher(self, structured: StructuredOutput, *, may_end: bool = True) -> GrammarMatcher:
        """A matcher at the beginning of an answer.

        With ``may_end`` False an end token is never allowed: the answer ends when nothing more can follow.

        Raises:
            GrammarError: it cannot be compiled, or this model has no tokens to write it with.
        """
        return GrammarMatcher(self.compile(structured), self._vocabulary, may_end=may_end)

    def compile(self, structured: StructuredOutput) -> LLMatcher:
        """What matchers are copied from; compiled at first, found afterwards.

        Raises:
            GrammarError: see :meth:`matcher`.
        """
        compiled = self._compiled.get(structured)
        if compiled is None:
            compiled = self._compile(structured)
            self._compiled[structured] = compiled
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, structured: StructuredOutput) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        noun = _NOUNS[structured.kind]
        try:
            grammar = _source(structured)
        except Exception as error:  # converters of the library raise what comes
            raise GrammarError(f"{noun} cannot be used: {_brief(str(error))}") from None
        limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        compiled = LLMatcher(self._tokens(), grammar, log_level=0, limits=limits)
        if compiled.is_error():
            raise GrammarError(f"{noun} cannot be used: {_brief(compiled.get_error())}")
        probe = compiled.deep_copy()
        probe.compute_bitmask()  # the first one costs more than those after it, and copies share what it found out
        if probe.is_stopped():
            reason = _brief(probe.get_error())
            if reason.startswith("NoExtension"):
                reason = "this model has no tokens to begin the answer with"
            raise GrammarError(f"{noun} cannot be used: {reason}")
        return compiled

    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._building:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(TokenTable(self._vocabulary))  # type: ignore[arg-type]
            return self._tokenizer


class GrammarMatcher:
    """One answer's place in its grammar: a :class:`paceline.request.Constraint`.

    It has consumed the committed tokens and, tentatively, drafts behind them. Drafts that come true are not consumed
    again, their masks are not computed again, and what was rejected is rolled back when another token takes its place.
    Not thread-safe.
    """

    def __init__(self, compiled: LLMatcher, vocabulary: Vocabulary, *, may_end: bool = True) -> None:
        self._compiled = compiled
        self._matcher = compiled.deep_copy()
        self._vocabulary = vocabulary
        self._end_token_ids = vocabulary.eos_token_ids
        self._may_end = may_end
        self._consumed: list[int] = []
        self._num_committed = 0  # of the consumed ones
        self._masks: dict[int, bytes] = {}  # by the number of tokens consumed before
        self._lost: tuple[list[int], str] | None = None  # where the library gave up, and why

    @property
    def failure(self) -> str | None:
        """See :class:`paceline.request.Constraint`."""
        if self._lost is None or self._lost[0] != self._consumed[: self._num_committed]:
            return None
        return self._lost[1]

    def masks(self, token_ids: Sequence[int]) -> list[bytes]:
        """See :class:`paceline.request.Constraint`."""
        masks: list[bytes] = []
        for position in range(len(token_ids) + 1):
            mask = self._mask(token_ids[:position])
            if mask is None:
                break
            masks.append(mask)
            if position < len(token_ids) and not _has(mask, token_ids[position]):
                break
        return masks

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """See :class:`paceline.request.Constraint`."""
        return self._follow(token_ids)

    def forced(self, num_tokens: int) -> list[int]:
        """See :class:`paceline.request.Constraint`."""
        self._return_to(self._num_committed)
        return self._matcher.compute_ff_tokens()[:num_tokens]

    def advance(self, token_id: int) -> FinishReason | None:
        """See :class:`paceline.request.Constraint`."""
        position = self._num_committed
        if self._consumed[position : position + 1] != [token_id]:
            self._return_to(position)
            if not self._consume(token_id):
                self._give_up(f"token {token_id} was committed although the grammar forbids it")
                return "length"
        self._num_committed += 1
        self._masks = {place: mask for place, mask in self._masks.items() if place > position}
        is_complete = len(self._consumed) == self._num_committed and self._matcher.is_stopped()
        return "stop" if is_complete else None

    def _mask(self, token_ids: Sequence[int]) -> bytes | None:
        """What may follow the committed tokens and these; None where they cannot stand there."""
        place = self._num_committed + len(token_ids)
        is_known = self._consumed[self._num_committed : place] == list(token_ids)
        if is_known and place in self._masks:
            return self._masks[place]
        if self._follow(token_ids) < len(token_ids):
            return None
        was_complete = self._matcher.is_stopped()
        mask = self._with_all_ends(self._matcher.compute_bitmask())
        if was_complete or not self._matcher.is_stopped():
            self._masks[place] = mask
        else:  # too complex, or no token of the vocabulary fits: the mask lets nothing through but an end
            self._give_up(_brief(self._matcher.get_error() or self._matcher.stop_reason()))
            self._return_to(self._num_committed, is_broken=True)
        return mask

    def _with_all_ends(self, mask: bytes) -> bytes:
        """A mask of the library, which knows of one end token, with all of them or none."""
        adjusted = bytearray(mask)
        may_end = self._may_end and any(_has(mask, token_id) for token_id in self._end_token_ids)
        for token_id in self._end_token_ids:
            _set(adjusted, token_id, may_end)
        return bytes(adjusted)

    def _follow(self, token_ids: Sequence[int]) -> int:
        """Go from the committed tokens along these as far as the grammar allows; how far that was."""
        start = self._num_committed
        shared = 0
        for known, token_id in zip(self._consumed[start:], token_ids, strict=False):
            if known != token_id:
                break
            shared += 1
        self._return_to(start + shared)
        for token_id in token_ids[shared:]:
            if not self._consume(token_id):
                break
        return len(self._consumed) - start

    def _consume(self, token_id: int) -> bool:
        # An end token ends the request, whatever the parser would make of it; an unknown id would break it.
        if token_id in self._end_token_ids or not 0 <= token_id < self._vocabulary.vocab_size:
            return False
        if self._matcher.try_consume_tokens([token_id]) != 1:
            return False
        self._consumed.append(token_id)
        return True

    def _return_to(self, num_tokens: int, *, is_broken: bool = False) -> None:
        """Take back all but the first ``num_tokens`` consumed tokens."""
        excess = self._consumed[num_tokens:]
        if not excess:
            return
        del self._consumed[num_tokens:]
        self._masks = {place: mask for place, mask in self._masks.items() if place <= num_tokens}
        # The library counts bytes to go back, of which a special token has none of its own; and no error leaves it.
        must_rebuild = is_broken or any(map(self._vocabulary.is_special, excess))
        if must_rebuild or not self._matcher.rollback(len(excess)):
            self._matcher = self._compiled.deep_copy()
            self._matcher.consume_tokens(self._consumed)

    def _give_up(self, reason: str) -> None:
        self._lost = (list(self._consumed), reason)
        log.warning("a structured output cannot go on: %s", reason)


def _source(structured: StructuredOutput) -> str:
    """The grammar as llguidance reads it."""
    from llguidance import LLMatcher, grammar_from

    if structured.kind in ("json_schema", "json_object"):
        schema = structured.text if structured.kind == "json_schema" else '{"type": "object"}'
        return LLMatcher.grammar_from_json_schema(schema, defaults=dict(JSON_OPTIONS))  # type: ignore[arg-type]
    if structured.kind == "regex":
        return LLMatcher.grammar_from_regex(structured.text)
    return grammar_from("grammar", structured.text)


def _has(mask: bytes | bytearray, token_id: int) -> bool:
    return 0 <= token_id < 8 * len(mask) and bool(mask[token_id // 8] >> token_id % 8 & 1)


def _set(mask: bytearray, token_id: int, is_allowed: bool) -> None:
    if 0 <= token_id < 8 * len(mask):
        mask[token_id // 8] &= ~(1 << token_id % 8)
        mask[token_id // 8] |= is_allowed << token_id % 8


def _brief(message: str) -> str:
    """An error of the library on one line."""
    return " ".join(message.removesuffix("<non-verbose/>").split())[:300]
