"""tokenizer.ggml.* metadata to a `tokenizers.Tokenizer` that splits and merges as the model was trained."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from paceline.errors import ModelFormatError

_LOGGER = logging.getLogger(__name__)

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"  # SentencePiece writes a space as this

# How each family cuts text before merging. The patterns are part of the published models, written here in the
# dialect of the tokenizers library.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_NUMBERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_AFTER_NUMBERS}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_AFTER_NUMBERS}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")

_GPT2_FAMILY = frozenset({"default", "gpt-2", "gpt2", "olmo", "mpt", "phi-2"})
_SINGLE_DIGIT_FAMILY = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
_LLAMA3_FAMILY = frozenset({"llama3", "llama-v3", "llama-bpe", "smaug-bpe", "falcon3"})
_QWEN2_FAMILY = frozenset({"qwen2", "deepseek-r1-qwen"})


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer a GGUF file describes, with its control and user-defined tokens recognised in text.

    Raises:
        ModelFormatError: no vocabulary, or one that is neither byte-level BPE nor SentencePiece BPE.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelFormatError("the GGUF file holds no vocabulary (tokenizer.ggml.tokens); use a complete model file")
    if kind not in _BUILDERS:
        raise ModelFormatError(f"the GGUF file has a {kind!r} tokenizer; supported are gpt2 (byte-level BPE) and llama")
    try:
        tokenizer = _BUILDERS[kind](metadata, tokens)
    except ModelFormatError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception, for instance for an unknown merge
        raise ModelFormatError(f"the GGUF file's vocabulary is damaged ({error}); convert the model anew") from error
    types = token_types(metadata, len(tokens))
    control = [token for token, token_type in zip(tokens, types, strict=True) if token_type == CONTROL]
    named = [token for token, token_type in zip(tokens, types, strict=True) if token_type == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in named])
    return tokenizer


def token_types(metadata: Mapping[str, Any], count: int) -> Sequence[int]:
    """The type of every token; all normal when the file does not say."""
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * count
    if len(types) != count:
        raise ModelFormatError(f"the GGUF file types {len(types)} of its {count} tokens; convert the model anew")
    return types


def ignores_merges(metadata: Mapping[str, Any]) -> bool:
    """True when a piece that is a token is taken whole, whatever the merges (Llama 3, Mistral's Tekken)."""
    return metadata.get("tokenizer.ggml.pre") in _LLAMA3_FAMILY | {"tekken"}


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether a prompt starts with BOS. Files that do not say follow llama.cpp: SentencePiece and Llama 3 do."""
    default = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_FAMILY
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ModelFormatError("the GGUF file holds no merges (tokenizer.ggml.merges); convert the model anew")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pre = metadata.get("tokenizer.ggml.pre", "default")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_pairs(merges), ignore_merges=ignores_merges(metadata)))
    if pre in _QWEN2_FAMILY:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """The two halves of each merge. Neither spells a space as a space, so the one between them is unique."""
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    def split(pattern: str) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Split(Regex(pattern), behavior="isolated")

    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    if pre in _SINGLE_DIGIT_FAMILY:
        return pre_tokenizers.Sequence([digits, gpt2])
    if pre in _LLAMA3_FAMILY:
        return pre_tokenizers.Sequence([split(_LLAMA3), bytes_only])
    if pre in _QWEN2_FAMILY:
        return pre_tokenizers.Sequence([split(_QWEN2), bytes_only])
    if pre == "tekken":
        return pre_tokenizers.Sequence([split(_TEKKEN), bytes_only])
    if pre == "deepseek-coder":
        return pre_tokenizers.Sequence([*map(split, _DEEPSEEK_CODER), digits, bytes_only])
    if pre not in _GPT2_FAMILY:
        _LOGGER.warning("unknown pre-tokenizer %r in the GGUF file: text is cut as for GPT-2, tokens may differ", pre)
    return gpt2


def _sentence_piece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    types = token_types(metadata, len(tokens))
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(metadata, tokens, types),
            unk_token=tokens[unknown_id] if 0 <= unknown_id < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixes_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    # Every stretch of text between special tokens gets the prefix, as in llama.cpp and Hugging Face's Llama 2.
    prefix = [normalizers.Prepend(_SPACE)] if prefixes_space else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefixes_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> list[tuple[str, str]]:
    """The merges a SentencePiece vocabulary implies: any two pieces whose union is a piece, best score first.

    Only normal tokens take part: the text of a control or byte token must not come out of ordinary letters.
    """
    if "tokenizer.ggml.merges" in metadata:
        return _pairs(metadata["tokenizer.ggml.merges"])
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelFormatError("the GGUF file lacks the scores of its tokens (tokenizer.ggml.scores); convert it anew")
    ids = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == NORMAL}
    ranked = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[token_id], ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


_BUILDERS = {"gpt2": _byte_level, "llama": _sentence_piece}
