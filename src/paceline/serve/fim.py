"""Fill in the middle: a prompt that asks for what stands between two texts, as the model's tokens have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.loader.tokenizer import Tokenizer
from paceline.serve.errors import ApiError

# Families by the tokens in their vocabulary, and where prefix, suffix and the beginning of the middle go.
_FAMILIES = (
    (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "{0}{prefix}{1}{suffix}{2}{middle}"),
    (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "{0}{prefix}{1}{suffix}{2}{middle}"),
    (("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), "{0}{prefix}{1}{suffix}{2}{middle}"),
    (
        ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
        "{0}{prefix}{1}{suffix}{2}{middle}",
    ),
    (("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"), "{0} {prefix} {1}{suffix} {2}{middle}"),
    (("[SUFFIX]", "[PREFIX]"), "{0}{suffix}{1}{prefix}{middle}"),
)
_REPOSITORY_TOKENS = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILE_TOKENS = ("<|file_sep|>", "<file_sep>", "<filename>")
_OTHER_ENDS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "\u2581<EOT>")
# Names for what editors do not name; models saw some name there.
_REPOSITORY_NAME = "project"
_FILE_NAME = "file"


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """How one model writes it.

    Attributes:
        stop_token_ids: tokens that no middle contains; a model that goes on into the next file writes one of them.
    """

    tokens: Sequence[str]
    layout: str
    repository_token: str | None
    file_token: str | None
    stop_token_ids: Sequence[int]

    def prompt(self, prefix: str, suffix: str, *, middle: str = "", extra: Sequence[tuple[str, str]] = ()) -> str:
        """The prompt; ``middle`` is how the answer begins, ``extra`` other files as (name, text).

        Without tokens for repositories the files stand before everything as plain text.
        """
        asked = self.layout.format(*self.tokens, prefix=prefix, suffix=suffix, middle=middle)
        if not extra:
            return asked
        if self.repository_token is None or self.file_token is None:
            return "\n\n".join([*(text for _, text in extra), asked])
        files = "".join(f"{self.file_token}{name or _FILE_NAME}\n{text}\n" for name, text in extra)
        return f"{self.repository_token}{_REPOSITORY_NAME}\n{files}{self.file_token}{_FILE_NAME}\n{asked}"


def fill_in_middle(tokenizer: Tokenizer, *, param: str) -> FillInMiddle:
    """The way of a tokenizer's model.

    Raises:
        ApiError: 400, the model's vocabulary has no tokens for it; ``param`` is the field that asked.
    """

    def first_of(tokens: Sequence[str]) -> str | None:
        return next((token for token in tokens if tokenizer.token_id(token) is not None), None)

    for tokens, layout in _FAMILIES:
        if all(tokenizer.token_id(token) is not None for token in tokens):
            repository, file = first_of(_REPOSITORY_TOKENS), first_of(_FILE_TOKENS)
            ends = (*tokens, *_REPOSITORY_TOKENS, *_FILE_TOKENS, *_OTHER_ENDS)
            stops = [token_id for token in ends if (token_id := tokenizer.token_id(token)) is not None]
            return FillInMiddle(tokens, layout, repository, file, stops)
    raise ApiError(
        400,
        f"this model has no fill-in-the-middle tokens; use a code model that has them, or leave out {param!r}",
        param=param,
    )
