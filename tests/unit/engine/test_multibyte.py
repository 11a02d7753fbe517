"""Characters of several bytes whose bytes come in different tokens and steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import safetensors.torch
import torch

from paceline import Engine, SamplingParams, Speculation
from tests.support import write_tiny_checkpoint, write_tokenizer

TEXT = "naïve = '漢字' # 😀👩‍💻 é ñandú→🚀"
FIRST_ID, END_ID = 2, 1


def token_bytes(text: str) -> list[bytes]:
    """The UTF-8 of ``text`` cut into different pieces of one to a few bytes, without regard to characters."""
    rest, pieces = text.encode(), []
    while rest:
        length = 1 + len(pieces) % 3
        while rest[:length] in pieces:
            length += 1
        pieces.append(rest[:length])
        rest = rest[length:]
    return pieces


def byte_level(piece: bytes) -> str:
    """The piece in GPT-2's alphabet: printable Latin-1 stands for itself, other bytes for U+0100 onwards in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return "".join(chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in piece)


@pytest.fixture(scope="module")
def reciting_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A model that follows token i with token i + 1 and knows nothing else; its vocabulary spells TEXT in order."""
    pieces = token_bytes(TEXT)
    folder = tmp_path_factory.mktemp("reciting") / "model"
    write_tiny_checkpoint(folder, "llama", hidden_size=64, head_dim=16, num_hidden_layers=1, tie_word_embeddings=False)
    write_tokenizer(folder, [byte_level(piece) for piece in pieces])
    path = folder / "model.safetensors"
    weights = {name: torch.zeros_like(tensor) for name, tensor in safetensors.torch.load_file(path).items()}
    for name, tensor in weights.items():
        if "norm" in name:
            tensor.fill_(1.0)
    last_id = FIRST_ID + len(pieces) - 1
    successor = {token_id: token_id + 1 for token_id in range(FIRST_ID, last_id)} | {last_id: END_ID}
    for token_id, follower in successor.items():
        weights["model.embed_tokens.weight"][token_id, token_id] = 1.0
        weights["lm_head.weight"][follower, token_id] = 1.0
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    with Engine(folder, draft=folder) as engine:
        yield engine


def pieces_after_first(num_tokens: int | None = None) -> bytes:
    return b"".join(token_bytes(TEXT)[1:][:num_tokens])


def stream(engine: Engine, params: SamplingParams, speculation: Speculation) -> tuple[list[str], Sequence[int]]:
    deltas = list(engine.stream([FIRST_ID], params, speculation=speculation))
    output = deltas[-1].output
    assert output is not None
    assert "".join(delta.text for delta in deltas) == output.text == engine.tokenizer.decode(output.token_ids)
    return [delta.text for delta in deltas], output.token_ids


SPECULATIONS = [Speculation("off"), *(Speculation("static", horizon, ("model",)) for horizon in (1, 2, 3, 5, 8))]


def test_the_pieces_really_split_characters() -> None:
    broken = 0
    for piece in token_bytes(TEXT):
        try:
            piece.decode()
        except UnicodeDecodeError:
            broken += 1
    assert broken > 15


@pytest.mark.parametrize("speculation", SPECULATIONS, ids=lambda s: f"{s.mode}-{s.max_tokens}")
def test_a_stream_never_splits_a_character(reciting_engine: Engine, speculation: Speculation) -> None:
    texts, token_ids = stream(reciting_engine, SamplingParams(), speculation)
    assert "".join(texts).encode() == pieces_after_first()
    assert token_ids[-1] == END_ID
    assert all("\ufffd" not in text for text in texts)
    assert sum(map(bool, texts)) >= 3


@pytest.mark.parametrize("speculation", SPECULATIONS[::2], ids=lambda s: f"{s.mode}-{s.max_tokens}")
@pytest.mark.parametrize("max_tokens", range(1, 24))
def test_only_the_very_end_may_be_half_a_character(
    reciting_engine: Engine, speculation: Speculation, max_tokens: int
) -> None:
    texts, _ = stream(reciting_engine, SamplingParams(max_tokens=max_tokens), speculation)
    assert "".join(texts) == pieces_after_first(max_tokens).decode(errors="replace")
    assert all("\ufffd" not in text for text in texts[:-1])


@pytest.mark.parametrize("speculation", SPECULATIONS[::2], ids=lambda s: f"{s.mode}-{s.max_tokens}")
@pytest.mark.parametrize("stop", ["漢", "字'", "😀", "💻 ", "é"])
def test_stop_strings_of_several_bytes(reciting_engine: Engine, speculation: Speculation, stop: str) -> None:
    deltas = list(reciting_engine.stream([FIRST_ID], SamplingParams(stop=(stop,)), speculation=speculation))
    output = deltas[-1].output
    expected = pieces_after_first().decode()
    assert output is not None
    assert output.finish_reason == "stop"
    assert output.text == "".join(delta.text for delta in deltas) == expected[: expected.index(stop)]
