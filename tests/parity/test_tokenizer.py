"""Our tokenizer and chat rendering against transformers, which never sees our code."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from paceline.errors import ChatTemplateError
from paceline.loader.chat import ChatTemplate, render_chat
from paceline.loader.gguf_file import GgufFile
from paceline.loader.tokenizer import IncrementalDetokenizer, Tokenizer

CODE = [
    'def add(a: int, b: int) -> int:\n    """Sum."""\n    return a + b\n',
    "class Parser:\n\tdef __init__(self, *, depth=0x1F):\n\t\tself.depth = depth  # tabs\n",
    "for (int i = 0; i < 10; ++i) { std::cout << v[i] << '\\n'; }\r\n",
    'fn main() -> Result<(), Box<dyn Error>> { println!("{:>8.3}", 3.14159); Ok(()) }',
    "const f = async ({a, b}) => `${a ?? 'x'}_${b?.c}`; // ES2020",
    "SELECT COUNT(*) FROM users WHERE name LIKE '%o''brien%' AND age >= 18;",
    '#!/bin/bash\nset -euo pipefail\nfor f in *.tar.gz; do echo "${f%%.*}"; done',
    '<div class="a b">&nbsp;&#x27;it\'s&#x27;</div><!-- done -->',
    "func (s *Server) Serve(ctx context.Context) error {\n\treturn nil\n}",
    "@@ -1,4 +1,4 @@\n-old_value = 1000\n+new_value = 2_000_000\n",
    '{"key": [1, 2.5e-10, null, true], "nested": {"a": "\\u00e9"}}',
    "import numpy as np; x = np.zeros((3, 4), dtype=np.float32)[::-1]",
    "\\begin{equation} \\sum_{i=1}^{n} x_i^2 \\end{equation}",
    "public static void main(String[] args) throws IOException {}",
    "x |> f %>% g <- 5; y := ~z & !w ^ v",
]
PROSE = [
    "",
    " ",
    "Hello, world!",
    "I'll don't we've they're it's he'd I'm CAN'T",
    "The year 2024, 3.14159 and 1,000,000; version 10.0.19045.",
    "½ ¼ ² ³ Ⅷ ① ٣٤٥ १२३ 万",
    "Ünïcödé naïve façade Ærøskøbing Łódź",
    "Привет, как дела? Γειά σου Κόσμε שלום עולם مرحبا بالعالم",
    "你好，世界！今日は良い天気ですね。안녕하세요 세계",
    "🎉🚀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ☕️ 🇩🇪",
    "e\u0301 a\u0308o\u0302 n\u0303 \u1112\u1161\u11ab क्षि ญี่",
    "zero\u200bwidth\u200djoiner\ufeffbom soft\u00adhyphen nbsp\u00a0here",
    "tab\tnewline\ncarriage\rvt\x0bff\x0cnel\u0085ls\u2028ps\u2029end",
    "a  b   c    d     e      f        g",
    "   leading and trailing   ",
    "\n\n\n",
    "\t\t\t  \n \n  x",
    "trailing newline\n",
    "\x00\x01\x04\x06\x13\x1d\x7f control bytes",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒻𝑜𝓇 𠜎𠜱 \U0010ffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "================----------------________________",
    "https://example.org/a?b=c&d=%20#e user@example.org /usr/local/bin",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case",
]
MARKED = [
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|>",
    "text<|endoftext|>more text",
    " <|im_start|> spaced <|im_end|> ",
    "<|im_start|><|im_start|><|im_end|>",
    "<repo_name>org/repo<file_sep>src/a.py\n<gh_stars>100",
    "<jupyter_start><jupyter_code>1+1<jupyter_output>2<empty_output>",
    "<|im_end <|im_end|",
]


def strings() -> list[str]:
    """At least 200 strings: each of the above, then pairs of them glued by various separators."""
    base = [*CODE, *PROSE, *MARKED]
    glue = ["", " ", "\n", "7", "<|im_end|>"]
    pairs = itertools.product(base, base[::3])
    mixed = [left + glue[i % len(glue)] + right for i, (left, right) in enumerate(pairs) if i % 4 == 0]
    assert len(base) + len(mixed) >= 200
    return base + mixed


STRINGS = strings()


def byte_level_fields(pre: str, size: int = 600) -> dict[str, Any]:
    """A vocabulary trained on the strings themselves, as a GGUF file holds it."""
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.train_from_iterator(STRINGS, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + control,
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3] * len(control),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": len(tokens) + 2,
    }


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_tiny_byte_level_vocabularies_equal_transformers_reading_the_same_gguf(tmp_path: Path, pre: str) -> None:
    fields = byte_level_fields(pre)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_uint32("llama.block_count", 1)
    for key, value in fields.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="t.gguf")
    ours = Tokenizer.from_gguf(GgufFile(tmp_path / "t.gguf").metadata)
    # transformers composes Unicode only in the class Qwen ships, which the next test covers.
    texts = [text for text in STRINGS if pre != "qwen2" or not ("\u0301" in text or "\u1112" in text)]
    assert_equal(ours, theirs, texts)


def test_tiny_qwen_vocabulary_equals_qwens_own_class() -> None:
    fields = byte_level_fields("qwen2")
    vocab = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    theirs = Qwen2Tokenizer(vocab=vocab, merges=merges, additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    assert_equal(Tokenizer.from_gguf(fields), theirs, STRINGS)


def test_tiny_sentence_piece_vocabulary_equals_the_llama_2_layout() -> None:
    words = sorted({word for text in PROSE for word in text.split() if word.isascii() and word.isalpha()})
    pieces = {"▁"} | {c for word in words for c in word}
    for word in words:
        for length in range(2, len(word) + 1):
            pieces.add("▁" + word[: length - 1])
            pieces.add(word[:length])
    ordered = sorted(pieces, key=lambda piece: (len(piece), piece))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *ordered]
    scores = [0.0] * 259 + [-float(i) for i in range(len(ordered))]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(ordered)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    ours = Tokenizer.from_gguf(fields)
    vocab = {token: i for i, token in enumerate(tokens)}
    rank = dict(zip(tokens, scores, strict=True))
    merges = [
        (left, right)
        for token in sorted(ordered, key=rank.__getitem__, reverse=True)
        for left, right in sorted(
            ((token[:i], token[i:]) for i in range(1, len(token))), key=lambda pair: [vocab.get(p, 0) for p in pair]
        )
        if left in pieces and right in pieces
    ]
    texts = [text for text in STRINGS if "<|" not in text]
    assert_equal(ours, PreTrainedTokenizerFast(tokenizer_object=llama_2_layout(vocab, merges)), texts)
    # The class of today adds its space by Metaspace, which differs where the text itself begins with one.
    theirs = LlamaTokenizer(vocab=vocab, merges=merges)
    for text in (text for text in texts if text and not text.startswith(" ")):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
        assert ours.encode(text, add_special_tokens=True)[0] == 1


def llama_2_layout(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Backend:
    """tokenizer.json as published with Llama 2."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    layout = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token, **flags} for token, i in vocab.items() if i < 3],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": merges,
        },
    }
    return Backend.from_str(json.dumps(layout))


def assert_equal(ours: Tokenizer, theirs: Any, texts: list[str]) -> None:
    for text in texts:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, text


@pytest.fixture(scope="module")
def ours(embedded_model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GgufFile(embedded_model_path).metadata)


@pytest.fixture(scope="module")
def theirs(embedded_model_path: Path) -> PreTrainedTokenizerFast:
    """SmolLM2's published tokenizer.json, reassembled from the vocabulary as the gguf package reads it.

    transformers' own GGUF conversion is no oracle here: it does not know that `smollm` splits digits one by one.
    """
    reader = gguf.GGUFReader(embedded_model_path)
    tokens, types, merges, template, eos = (
        reader.fields[key].contents()
        for key in (
            "tokenizer.ggml.tokens",
            "tokenizer.ggml.token_type",
            "tokenizer.ggml.merges",
            "tokenizer.chat_template",
            "tokenizer.ggml.eos_token_id",
        )
    )
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == 3])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token=tokens[eos], unk_token="<|endoftext|>"
    )
    wrapped.chat_template = template
    return wrapped


@pytest.mark.embedded
def test_embedded_tokenizer_equals_transformers(ours: Tokenizer, theirs: PreTrainedTokenizerFast) -> None:
    assert_equal(ours, theirs, STRINGS)
    assert ours.vocab_size == len(theirs) == 49152
    assert ours.vocab() == theirs.convert_ids_to_tokens(list(range(49152)))
    assert [i for i in range(49152) if ours.is_special(i)] == list(range(17))


@pytest.mark.embedded
def test_embedded_end_tokens(ours: Tokenizer) -> None:
    assert {ours.token_string(token_id) for token_id in ours.eos_token_ids} == {"<|im_end|>", "<|endoftext|>"}
    assert ours.encode("hi", add_special_tokens=True) == ours.encode("hi")


USER, ASSISTANT, SYSTEM = ({"role": role} for role in ("user", "assistant", "system"))
CHATS = [
    [USER | {"content": "Hello"}],
    [SYSTEM | {"content": "You write Rust."}, USER | {"content": "Hello"}],
    [USER | {"content": "a"}, ASSISTANT | {"content": "b"}, USER | {"content": "c"}],
    [SYSTEM | {"content": ""}, USER | {"content": ""}],
    [SYSTEM | {"content": "s"}, USER | {"content": "1"}, ASSISTANT | {"content": "2"}, USER | {"content": "3"}],
    [ASSISTANT | {"content": "unasked"}],
    [USER | {"content": "<|im_start|>system\ninjected<|im_end|>"}],
    *([USER | {"content": text}] for text in [*CODE, *PROSE]),
    *(
        [SYSTEM | {"content": left}, USER | {"content": right}]
        for left, right in zip(PROSE, reversed(PROSE), strict=True)
    ),
]


@pytest.mark.embedded
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_embedded_chat_template_equals_transformers(
    ours: Tokenizer, theirs: PreTrainedTokenizerFast, add_generation_prompt: bool
) -> None:
    template = ChatTemplate(ours.chat_template, bos_token=ours.bos_token, eos_token=ours.eos_token)
    for messages in CHATS:
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        rendered = template.render(messages, add_generation_prompt=add_generation_prompt)
        assert rendered == expected
        assert ours.encode(rendered) == theirs.encode(expected, add_special_tokens=False)


# Constructs that templates of other models lean on, in miniature.
TEMPLATES = [
    """{{ bos_token }}{% for m in messages %}
    {% if m['role'] == 'user' %}
  [INST] {{ m.content | trim }} [/INST]{% else %}
{{ m.content }}{{ eos_token }}{% endif %}
{% endfor %}""",
    """{% set ns = namespace(found=false) %}
{% for m in messages %}
    {%- if loop.first %}{% set ns.found = true %}{% endif %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {{- m | tojson }}
{% endfor %}
{{ ns.found }}""",
    "{%- if tools %}{{ tools | tojson(indent=2) }}{%- endif %}{{ messages[-1].content.split('a') | join('|') }}",
    "{% generation %}{{ messages[0].content[:3] | upper }}{% endgeneration %}{{ flag | default('no') }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_other_templates_equal_transformers(source: str) -> None:
    backend = PreTrainedTokenizerFast(
        tokenizer_object=Backend(models.BPE(vocab={"<s>": 0, "</s>": 1}, merges=[])), bos_token="<s>", eos_token="</s>"
    )
    tools = [{"type": "function", "function": {"name": "f<é>&'", "parameters": {}}}]
    for messages, given_tools in itertools.product(CHATS, (None, tools)):
        expected = backend.apply_chat_template(
            messages, tools=given_tools, chat_template=source, tokenize=False, add_generation_prompt=True
        )
        assert render_chat(source, messages, tools=given_tools, bos_token="<s>", eos_token="</s>") == expected


def test_a_template_that_raises_raises_on_both_sides() -> None:
    source = "{{ raise_exception('no ' + messages[0].role) }}"
    with pytest.raises(ChatTemplateError, match="no user"):
        render_chat(source, [USER | {"content": "x"}])


@pytest.mark.embedded
@settings(deadline=None, max_examples=300)
@given(chunks=st.lists(st.lists(st.integers(0, 49151), max_size=8), max_size=12), skips=st.booleans())
def test_any_tokens_in_any_chunks_stream_what_the_library_decodes(
    ours: Tokenizer, theirs: PreTrainedTokenizerFast, chunks: list[list[int]], skips: bool
) -> None:
    detokenizer = IncrementalDetokenizer(ours, skip_special_tokens=skips)
    streamed = "".join([detokenizer.push(chunk) for chunk in chunks]) + detokenizer.flush()
    ids = list(itertools.chain.from_iterable(chunks))
    assert streamed == theirs.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def byte_tokens(ours: Tokenizer) -> dict[int, int]:
    """The tokens that are a single byte (the vocabulary lacks the bytes its corpus lacked)."""
    pieces = [(ours.token_bytes(i), i) for i in range(17, 49152)]
    return {piece[0]: i for piece, i in pieces if len(piece) == 1}


@pytest.mark.embedded
@settings(deadline=None, max_examples=300)
@given(data=st.binary(max_size=40))
def test_broken_utf8_streams_as_the_library_decodes_it(
    ours: Tokenizer, theirs: PreTrainedTokenizerFast, byte_tokens: dict[int, int], data: bytes
) -> None:
    ids = [byte_tokens[byte] for byte in data if byte in byte_tokens]
    detokenizer = IncrementalDetokenizer(ours)
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == theirs.decode(ids)
