from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidPromptError, ModelFormatError
from paceline.loader.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.unit.loader.tiny_checkpoints import MERGES, SPECIAL, VOCAB, gguf_tokenizer_fields, tokenizer_json

PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *"▁helo",
    "he",
    "ll",
    "hell",
    "▁hell",
    "▁▁",
]


def byte_level(**fields: Any) -> Tokenizer:
    changed = gguf_tokenizer_fields() | fields
    return Tokenizer.from_gguf({key: value for key, value in changed.items() if value is not ...})


def sentence_piece(**fields: Any) -> Tokenizer:
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(PIECES))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **fields,
    }
    return Tokenizer.from_gguf({key: value for key, value in metadata.items() if value is not ...})


def write_folder(folder: Path, tokenizer: dict[str, Any] | None = None, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer or tokenizer_json()))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def strings(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_string(token_id) for token_id in tokenizer.encode(text)]


def test_gguf_and_folder_agree(tmp_path: Path) -> None:
    from_gguf = byte_level()
    from_file = Tokenizer.from_file(write_folder(tmp_path / "m"))
    for text in ("hell hello 1234 ünï", "<|im_start|>he<tool>ll<|im_end|>\n", "", "  \t\n"):
        assert from_gguf.encode(text) == from_file.encode(text)
    assert from_gguf.vocab() == from_file.vocab() == VOCAB
    assert from_gguf.vocab_size == len(VOCAB)


def test_special_tokens_are_recognised_hidden_and_shown() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("<|im_start|>hell<tool><|im_end|>")
    assert ids == [260, 258, 262, 261]
    assert [tokenizer.is_special(token_id) for token_id in ids] == [True, False, False, True]
    assert tokenizer.decode(ids) == "hell<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hell<tool><|im_end|>"
    assert tokenizer.token_bytes(260) == b"<|im_start|>"


def test_half_a_surrogate_pair_is_no_text() -> None:
    with pytest.raises(InvalidPromptError, match="whole characters"):
        byte_level().encode("a\ud800")


def test_end_tokens_of_gguf_files_include_the_well_known_control_tokens() -> None:
    assert byte_level().eos_token_ids == {SPECIAL["<|im_end|>"], SPECIAL["<|endoftext|>"]}
    assert byte_level().bos_token_id == SPECIAL["<|im_start|>"]
    assert (byte_level().bos_token, byte_level().eos_token) == ("<|im_start|>", "<|im_end|>")
    fields = {"tokenizer.ggml.eos_token_id": 10_000, "tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.token_type": ...}
    assert byte_level(**fields).eos_token_ids == {5}, "an id outside the vocabulary is no token"


def test_bos_is_added_only_if_asked_for_and_due() -> None:
    assert byte_level().encode("h", add_special_tokens=True) == byte_level().encode("h")
    assert byte_level(**{"tokenizer.ggml.add_bos_token": True}).encode("hell", add_special_tokens=True) == [260, 258]
    assert byte_level(**{"tokenizer.ggml.add_bos_token": True}).encode("hell") == [258]
    llama3 = byte_level(**{"tokenizer.ggml.add_bos_token": ..., "tokenizer.ggml.pre": "llama-bpe"})
    assert llama3.encode("hell", add_special_tokens=True) == [260, 258]
    assert byte_level(**{"tokenizer.ggml.add_bos_token": ...}).encode("hell", add_special_tokens=True) == [258]
    assert sentence_piece().encode("hell", add_special_tokens=True)[0] == 1
    no_bos = byte_level(**{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": ...})
    assert no_bos.encode("hell", add_special_tokens=True) == [258]


def test_folder_bos_follows_config_then_post_processor(tmp_path: Path) -> None:
    names = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [260], "tokens": ["<|im_start|>"]}},
    }
    with_template = tokenizer_json() | {"post_processor": template}

    def first(tokenizer: dict[str, Any], config: dict[str, Any]) -> list[int]:
        folder = write_folder(tmp_path / "m", tokenizer, tokenizer_config=config)
        return Tokenizer.from_file(folder).encode("hell", add_special_tokens=True)

    assert first(tokenizer_json(), names) == [258]
    assert first(with_template, names) == [260, 258]
    assert first(with_template, names | {"add_bos_token": False}) == [258]
    assert first(tokenizer_json(), names | {"add_bos_token": True}) == [260, 258]


def test_folder_end_tokens_and_roles(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    bare = Tokenizer.from_file(write_folder(folder))
    assert (bare.eos_token_ids, bare.bos_token_id, bare.bos_token, bare.eos_token) == (frozenset(), None, "", "")
    write_folder(folder, special_tokens_map={"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"})
    tokenizer = Tokenizer.from_file(folder)
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ({261}, 260)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    write_folder(folder, config={"eos_token_id": 7})
    assert Tokenizer.from_file(folder).eos_token_ids == {261, 7}
    write_folder(folder, generation_config={"eos_token_id": [259, 261]})
    assert Tokenizer.from_file(folder).eos_token_ids == {259, 261}
    write_folder(folder, generation_config={"eos_token_id": 259})
    assert Tokenizer.from_file(folder).eos_token_ids == {259, 261}


def test_folder_chat_template_sources(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    assert Tokenizer.from_file(folder).chat_template is None
    write_folder(folder, tokenizer_config={"chat_template": "plain"})
    assert Tokenizer.from_file(folder).chat_template == "plain"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_folder(folder, tokenizer_config={"chat_template": named})
    assert Tokenizer.from_file(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("file wins", encoding="utf-8")
    assert Tokenizer.from_file(folder).chat_template == "file wins"
    assert byte_level().chat_template == gguf_tokenizer_fields()["tokenizer.chat_template"]


def test_damaged_or_unsupported_folders(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(ModelFormatError, match=r"no tokenizer.json; make one"):
        Tokenizer.from_file(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFormatError, match="damaged"):
        Tokenizer.from_file(tmp_path / "m")
    with pytest.raises(ModelFormatError, match="decodes by nothing"):
        Tokenizer.from_file(write_folder(tmp_path / "m", tokenizer_json() | {"decoder": None}))
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(ModelFormatError, match="decodes by WordPiece"):
        Tokenizer.from_file(write_folder(tmp_path / "m", tokenizer_json() | {"decoder": decoder}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert' tokenizer; supported are"),
        ({"tokenizer.ggml.tokens": ...}, "no vocabulary"),
        ({"tokenizer.ggml.merges": ...}, "no merges"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "vocabulary is damaged"),
        ({"tokenizer.ggml.token_type": [1]}, "types 1 of its 263 tokens"),
        ({"tokenizer.ggml.model": "llama"}, "lacks the scores"),
    ],
)
def test_unusable_gguf_vocabularies(fields: dict[str, Any], message: str) -> None:
    if fields.get("tokenizer.ggml.model") == "llama":
        fields = fields | {"tokenizer.ggml.merges": ...}
    with pytest.raises(ModelFormatError, match=message):
        byte_level(**fields)


def splits(pre: str, text: str) -> list[str]:
    """How a vocabulary without merges would be cut before merging."""
    backend = byte_level(**{"tokenizer.ggml.pre": pre})._backend
    assert backend.pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("default", "I'll pay 1234", ["I", "'ll", " pay", " 1234"]),
        ("gpt-2", "x=12;\n\n  y", ["x", "=", "12", ";", "\n\n ", " y"]),
        ("smollm", "pay 1234", ["pay", " ", "1", "2", "3", "4"]),
        ("starcoder", "a12", ["a", "1", "2"]),
        ("llama-bpe", "I'LL pay 12345;\n\n  y", ["I", "'LL", " pay", " ", "123", "45", ";\n\n", " ", " y"]),
        ("qwen2", "(pay 123)\n", ["(pay", " ", "1", "2", "3", ")\n"]),
        ("tekken", "camelCase 12/\n", ["camel", "Case", " ", "1", "2", "/\n"]),
        ("deepseek-coder", "pay !!\n12 你好", ["pay", " !!", "\n", "1", "2", " ", "你好"]),
    ],
)
def test_pre_tokenizers(pre: str, text: str, expected: list[str]) -> None:
    assert splits(pre, text) == expected


def test_an_unknown_pre_tokenizer_warns_and_splits_as_gpt2(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert splits("brand-new", "a 12") == ["a", " 12"]
    assert "'brand-new'" in caplog.text


def test_ignored_merges_take_a_piece_that_is_a_token_whole() -> None:
    vocab = [*VOCAB[:-4], "Ġhell", *VOCAB[-4:]]
    fields = {"tokenizer.ggml.tokens": vocab, "tokenizer.ggml.token_type": [*[1] * 260, 3, 3, 3, 4]}
    assert strings(byte_level(**fields, **{"tokenizer.ggml.pre": "llama-bpe"}), " hell") == ["Ġhell"]
    assert strings(byte_level(**fields), " hell") == ["Ġ", "hell"]


def test_qwen_normalises_to_composed_characters() -> None:
    assert byte_level(**{"tokenizer.ggml.pre": "qwen2"}).encode("e\u0301") == byte_level().encode("é")


def test_sentence_piece_merges_by_score_and_falls_back_to_bytes() -> None:
    tokenizer = sentence_piece()
    assert strings(tokenizer, "hellhe") == ["▁hell", "he"]
    assert strings(tokenizer, "hel") == ["▁", "he", "l"]
    assert strings(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert strings(tokenizer, "<s>he</s>he") == ["<s>", "▁", "he", "</s>", "▁", "he"]
    assert strings(sentence_piece(**{"tokenizer.ggml.add_space_prefix": False}), "hell") == ["hell"]
    merged = sentence_piece(**{"tokenizer.ggml.merges": ["l l"], "tokenizer.ggml.scores": ...})
    assert strings(merged, "hell") == ["▁", "h", "e", "ll"]


def test_sentence_piece_drops_the_space_it_added() -> None:
    tokenizer = sentence_piece()
    ids = tokenizer.encode("hell  é")
    assert tokenizer.decode(ids) == "hell  é"
    assert tokenizer.decode([1, *ids]) == "hell  é"
    assert tokenizer.decode([1, *ids], skip_special_tokens=False) == "<s> hell  é"
    assert tokenizer.token_bytes(PIECES.index("▁hell")) == b" hell"
    assert tokenizer.token_bytes(PIECES.index("<0x0A>")) == b"\n"
    kept = sentence_piece(**{"tokenizer.ggml.add_space_prefix": False})
    assert kept.decode([PIECES.index("▁hell")]) == " hell"


def test_metaspace_decoders_drop_every_space_of_the_first_token(tmp_path: Path) -> None:
    vocab = {piece: index for index, piece in enumerate(PIECES)}
    layout = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    tokenizer = Tokenizer.from_file(write_folder(tmp_path / "m", layout))
    ids = [vocab["▁▁"], vocab["▁hell"]]
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids) == " hell"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    tokenizer = byte_level()
    for token_id in (-1, 263, 10_000):
        assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.token_string(token_id) == ""
        assert not tokenizer.is_special(token_id)
    assert tokenizer.decode([258, 10_000, 258]) == "hellhell"


def test_a_character_appears_when_its_last_byte_does() -> None:
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode("a🎉b")
    assert [detokenizer.push([token_id]) for token_id in ids] == ["a", "", "", "", "🎉", "b"]
    assert detokenizer.flush() == ""
    assert detokenizer.push(ids[:3]) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(ids[:1]) == "a", "a flushed detokenizer starts afresh"


BYTE_LEVEL, SENTENCE_PIECE = byte_level(), sentence_piece()
CHUNKS = st.lists(st.lists(st.integers(0, len(VOCAB)), max_size=6), max_size=20)


@settings(deadline=None)
@given(chunks=CHUNKS, skips=st.booleans())
def test_pushes_and_flush_equal_the_library_for_any_bytes(chunks: list[list[int]], skips: bool) -> None:
    tokenizer = BYTE_LEVEL
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skips)
    text = "".join([detokenizer.push(chunk) for chunk in chunks]) + detokenizer.flush()
    ids = [token_id for chunk in chunks for token_id in chunk]
    assert text == tokenizer.decode(ids, skip_special_tokens=skips)
    assert text == tokenizer._backend.decode(ids, skip_special_tokens=skips)


@settings(deadline=None)
@given(text=st.text(), skips=st.booleans())
def test_sentence_piece_streams_what_the_library_decodes(text: str, skips: bool) -> None:
    tokenizer = SENTENCE_PIECE
    ids = tokenizer.encode(text, add_special_tokens=True)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skips)
    streamed = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()
    assert streamed == tokenizer.decode(ids, skip_special_tokens=skips)
    assert streamed == tokenizer._backend.decode(ids, skip_special_tokens=skips)


def test_merges_of_the_tiny_vocabulary_apply_in_order() -> None:
    assert MERGES == ["h e", "l l", "he ll"]
    assert strings(byte_level(), "hello") == ["hell", "o"]


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@pytest.mark.parametrize("text", ["hell", " hell", "he  ll", "\nhell\n", '{"he": 1}', "ünï漢", ""])
def test_text_in_the_middle_is_spelled_exactly(make: Any, text: str) -> None:
    tokenizer = make()
    token_ids = tokenizer.encode_exactly(text)
    assert token_ids is not None
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()


def test_text_that_no_tokens_spell_exactly() -> None:
    assert byte_level().encode_exactly("he<|im_end|>") is None
    assert sentence_piece().encode_exactly("</s>") is None
    assert byte_level(**{"tokenizer.ggml.pre": "qwen2"}).encode_exactly("e\u0301") is None  # composed by the normaliser
