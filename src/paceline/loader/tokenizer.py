"""Text to token ids and back: one class over both file formats, and a detokenizer for streams."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from paceline.errors import InvalidPromptError, ModelFormatError
from paceline.loader import gguf_vocab
from paceline.loader.tokenizer_files import TokenizerFiles

LeadingSpace = Literal["keep", "drop_one", "drop_in_first_token"]
"""What decoding does with the space SentencePiece puts before the first word."""

# End tokens a GGUF file may hold without naming them in an id field, since it has no generation_config.json.
_END_TOKEN_TEXTS = frozenset(
    {
        "<|endoftext|>",
        "<|im_end|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|EOT|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A model's vocabulary and rules.

    Decoding is the tokens' bytes joined and read as UTF-8, invalid sequences becoming U+FFFD. For byte-level
    vocabularies this is exactly what Hugging Face's tokenizers does. With SentencePiece's byte tokens it differs in
    one respect: there a single invalid byte turns every byte token beside it into U+FFFD, here valid characters
    survive, which is what lets a stream show them at once.

    Attributes:
        bos_token_id: starts a text, or None.
        eos_token_ids: any of these ends a turn.
        bos_token: the text of BOS as chat templates write it, or empty.
        eos_token: the text of the model's own end token, or empty.
        chat_template: Jinja source, or None for a base model.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_id: int | None,
        eos_token_ids: Iterable[int],
        adds_bos: bool,
        chat_template: str | None,
    ) -> None:
        self._backend = backend
        backend.no_truncation()  # a file may carry its training's limits
        backend.no_padding()
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self.chat_template = chat_template
        self._adds_bos = adds_bos and bos_token_id is not None
        is_byte_level, self.leading_space = _decoding_rules(backend)
        by_text = backend.get_vocab(with_added_tokens=True)
        self._strings = [""] * (1 + max(by_text.values(), default=-1))
        for text, token_id in by_text.items():
            self._strings[token_id] = text
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.bos_token = "" if bos_token_id is None else self.token_string(bos_token_id)
        self.eos_token = "" if eos_token_id is None else self.token_string(eos_token_id)
        self._bytes = [(_byte_level_bytes if is_byte_level else _sentence_piece_bytes)(text) for text in self._strings]

    @classmethod
    def from_file(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and its companions from a Hugging Face folder.

        Raises:
            ModelFormatError: a file is missing or damaged, or its decoder is neither byte-level nor SentencePiece.
        """
        files = TokenizerFiles(folder)
        backend = files.backend
        bos_token_id = files.token_id("bos_token")
        # Only the post-processor knows whether a prompt starts with BOS, unless the config says so outright.
        adds_bos = files.config.get("add_bos_token")
        if adds_bos is None:
            adds_bos = bos_token_id is not None and backend.encode("").ids[:1] == [bos_token_id]
        return cls(
            backend,
            bos_token_id=bos_token_id,
            eos_token_id=files.token_id("eos_token"),
            eos_token_ids=files.eos_token_ids(),
            adds_bos=bool(adds_bos),
            chat_template=files.chat_template(),
        )

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer from a GGUF file's metadata (plain Python values by key).

        Raises:
            ModelFormatError: no vocabulary, or one of an unsupported kind.
        """
        backend = gguf_vocab.build_tokenizer(fields)
        tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
        types = gguf_vocab.token_types(fields, len(tokens))

        def named_id(key: str) -> int | None:
            token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
            return token_id if token_id is not None and 0 <= token_id < len(tokens) else None

        ends = {token_id for key in ("eos", "eot", "eom") if (token_id := named_id(key)) is not None}
        ends |= {
            token_id
            for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == gguf_vocab.CONTROL and token in _END_TOKEN_TEXTS
        }
        return cls(
            backend,
            bos_token_id=named_id("bos"),
            eos_token_id=named_id("eos"),
            eos_token_ids=ends,
            adds_bos=gguf_vocab.adds_bos(fields),
            chat_template=fields.get("tokenizer.chat_template"),
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id. The model's matrix may have more rows than that."""
        return len(self._strings)

    def vocab(self) -> list[str]:
        """Every token as the file spells it, by id; empty where an id has no token."""
        return list(self._strings)

    def token_id(self, text: str) -> int | None:
        """The id of the token that the file spells like this, or None."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``. Special tokens in it are recognised; BOS is added only if asked for and due.

        Raises:
            InvalidPromptError: the text holds half a surrogate pair, which JSON can express but no encoding can.
        """
        try:
            token_ids = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise InvalidPromptError("the text holds half a surrogate pair; send whole characters") from None
        if add_special_tokens and self._adds_bos:
            assert self.bos_token_id is not None
            return [self.bos_token_id, *token_ids]
        return list(token_ids)

    def encode_exactly(self, text: str) -> list[int] | None:
        """Token ids whose bytes are exactly those of ``text``, no special token among them; None where there are none.

        For text in the middle of an answer: SentencePiece's space before the first word is left out.
        """
        # Nothing merges with a line break put first, and the space comes before it.
        line_break = "" if self.leading_space == "keep" else "\n"
        token_ids = list(self._backend.encode(line_break + text, add_special_tokens=False).ids)
        head = b""
        while line_break and token_ids and not head.endswith(b"\n"):
            head += self.token_bytes(token_ids.pop(0))
        if any(token_id in self._special for token_id in token_ids):
            return None
        spelled = b"".join(map(self.token_bytes, token_ids))
        return token_ids if spelled == text.encode() else None  # a normaliser may have changed it

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``; ids outside the vocabulary (padding rows of the model) have none."""
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; a special token's are its name, an unused id's are empty."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_string(self, token_id: int) -> str:
        """The token as the file spells it; empty for an unused id."""
        return self._strings[token_id] if 0 <= token_id < len(self._strings) else ""

    def is_special(self, token_id: int) -> bool:
        """True for control tokens, which are left out of displayed text."""
        return token_id in self._special


class IncrementalDetokenizer:
    """Turns a stream of tokens into text as it becomes certain, a bounded amount of work per token.

    Bytes of a character that is not complete yet are held back. All pushes and the flush, joined, are exactly
    ``tokenizer.decode`` of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.leading_space != "keep"

    def push(self, token_ids: Iterable[int]) -> str:
        """The new text these tokens complete; may be empty."""
        return "".join(map(self._push_one, token_ids))

    def flush(self) -> str:
        """The rest: U+FFFD for a character the stream broke off in. The next push starts a new text."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._at_start = self._tokenizer.leading_space != "keep"
        return rest

    def _push_one(self, token_id: int) -> str:
        if self._skips_special and self._tokenizer.is_special(token_id):
            return ""
        piece = self._tokenizer.token_bytes(token_id)
        if self._at_start and piece:
            self._at_start = False
            if self._tokenizer.leading_space == "drop_one":
                piece = piece.removeprefix(b" ")
            else:
                piece = piece.replace(b" ", b"")
        return self._utf8.decode(piece)


def _decoding_rules(backend: tokenizers.Tokenizer) -> tuple[bool, LeadingSpace]:
    """Whether tokens are spelled in the byte-level alphabet, and what happens to the first space."""
    rules = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = {step["type"]: step for step in rules.get("decoders", [rules]) if step}
    if "ByteLevel" in steps:
        return True, "keep"
    if "Metaspace" in steps:
        return False, "keep" if steps["Metaspace"].get("prepend_scheme") == "never" else "drop_in_first_token"
    if "ByteFallback" in steps:
        return False, "drop_one" if "Strip" in steps else "keep"
    raise ModelFormatError(
        f"the tokenizer decodes by {', '.join(steps) or 'nothing'}; supported are byte-level BPE and SentencePiece BPE"
    )


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
    assert set(alphabet) == set(ByteLevel.alphabet())
    return alphabet


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    # Added tokens are spelled as text; one outside the alphabet is recognised by that.
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode()


def _sentence_piece_bytes(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode()
