"""Examples made from files: what they cover, where they end, what counts in them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from paceline.loader.chat import ChatTemplate
from paceline.loader.tokenizer import Tokenizer
from paceline.train.corpus import SourceFile
from paceline.train.encoding import FAINT, Example, encode
from paceline.train.examples import ExampleMaker
from paceline.train.prompts import make_prompts
from paceline.train.recipe import SYNTAX_FEATURES
from paceline.train.syntax import Role, parse, roles_of
from paceline.train.vocabulary import choose_vocabulary, coverage
from tests.support import CHAT_TEMPLATE
from tests.unit.train.workshop import CODE, write_code_target

FILE = SourceFile("p", "sums.py", "python", "MIT", CODE)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(write_code_target(tmp_path_factory.mktemp("target")))


def make(tokenizer: Tokenizer, *syntax: str, row_tokens: int = 200, seed: int = 3) -> list[Example]:
    chat = ChatTemplate(CHAT_TEMPLATE, eos_token="</s>")
    return list(ExampleMaker(tokenizer, chat, row_tokens, syntax, seed).examples(FILE))


def counted(tokenizer: Tokenizer, example: Example) -> str:
    """The text that counts."""
    return tokenizer.decode([t for t, w in zip(example.token_ids, example.weights, strict=True) if w > 0])


def test_plain_windows_are_the_file(tokenizer: Tokenizer) -> None:
    examples = make(tokenizer)
    assert {example.kind for example in examples} == {"window"}
    assert "".join(tokenizer.decode(example.token_ids) for example in examples) == CODE
    assert [len(example.token_ids) for example in examples[:-1]] == [200] * (len(examples) - 1)
    assert all(example.weights[0] == 0 and (example.weights[1:] == 1).all() for example in examples)


def test_aligned_windows_end_where_nodes_do(tokenizer: Tokenizer) -> None:
    tree = parse(CODE, "python")
    assert tree is not None
    ends = {node.end for node in tree.nodes}
    aligned = other = 0
    for seed in range(8):
        texts = [tokenizer.decode(example.token_ids) for example in make(tokenizer, "windows", seed=seed)]
        assert "".join(texts) == CODE
        for at in np.cumsum([len(text) for text in texts[:-1]]).tolist():
            aligned, other = aligned + (at in ends), other + (at not in ends)
    assert aligned > 3
    assert other > 3  # a running text is cut anywhere, and the draft must know that too


@pytest.mark.parametrize("kind", ["completion", "continuation", "edits"])
def test_each_use_of_the_tree_adds_its_own_examples(tokenizer: Tokenizer, kind: str) -> None:
    plain, more = make(tokenizer), make(tokenizer, kind, row_tokens=400)
    added = [example for example in more if example.kind != "window"]
    assert {example.kind for example in added} == {"edit" if kind == "edits" else kind}
    assert {example.kind for example in plain} == {"window"}
    for example in added:
        assert len(example.token_ids) <= 400
        assert 0 < (example.weights > 0).sum() < len(example.token_ids)


def test_a_completion_counts_a_whole_node_and_nothing_else(tokenizer: Tokenizer) -> None:
    tree = parse(CODE, "python")
    assert tree is not None
    nodes = {CODE.encode()[node.start : node.end].decode() for node in tree.nodes}
    completions = [e for e in make(tokenizer, "completion", row_tokens=400) if e.kind == "completion"]
    assert completions
    assert all(counted(tokenizer, example) in nodes for example in completions)


def test_an_edit_is_a_rename_throughout(tokenizer: Tokenizer) -> None:
    edits = [e for e in make(tokenizer, "edits", row_tokens=1500) if e.kind == "edit"]
    assert edits
    for example in edits:
        text = tokenizer.decode(example.token_ids)
        asked = re.search(r"`(\w+)` (?:to|is unclear. .all it|by) `?(\w+)|every use of `(\w+)`[^`]*`(\w+)`", text)
        assert asked is not None, text
        old, new = asked[1] or asked[3], asked[2] or asked[4]
        answer = counted(tokenizer, example)
        assert new in answer
        assert not re.search(rf"^[^<-].*\b{old}\b", answer.partition("=======")[2] or "", re.MULTILINE)


def test_roles_weigh_names_and_words_less(tokenizer: Tokenizer) -> None:
    source = encode(CODE, tokenizer, roles_of(CODE, "python"))
    weights = source.role_weights()
    at = CODE.index("amount, other")
    assert weights[at] == pytest.approx(FAINT)  # nobody can guess how a name begins
    assert (weights[at + 1 : at + 6] == 1).all()  # but how it goes on
    assert weights[CODE.index("counts things")] == pytest.approx(FAINT)
    assert weights[CODE.index("):")] == 1
    assert (source.roles[CODE.index("counts") : CODE.index("counts") + 6] == Role.DOCSTRING).all()


def test_examples_depend_on_the_file_and_the_seed_alone(tokenizer: Tokenizer) -> None:
    one, other = make(tokenizer, *SYNTAX_FEATURES), make(tokenizer, *SYNTAX_FEATURES)
    assert [e.token_ids for e in one] == [e.token_ids for e in other]


def test_prompts_ask_about_definitions(tokenizer: Tokenizer) -> None:
    prompts = list(make_prompts([FILE], per_file=3, has_chat=True, seed=0))
    assert len(prompts) == 3
    assert prompts == list(make_prompts([FILE], per_file=3, has_chat=True, seed=0))
    plain = list(make_prompts([FILE], per_file=3, has_chat=False, seed=0))
    assert all(isinstance(prompt.content, str) and prompt.content.strip() for prompt in plain)


def test_the_vocabulary_has_the_frequent_and_the_forced(tokenizer: Tokenizer) -> None:
    common = tokenizer.encode("xyzxyzxyz")
    vocabulary = choose_vocabulary(tokenizer, 20, answers=[common], sources=[tokenizer.encode("abc")])
    listed = vocabulary.token_ids.tolist()
    assert len(listed) == 20
    assert set(common) <= set(listed)
    assert {0, 1, *tokenizer.encode("0123456789\n ")} <= set(listed)
    assert coverage(vocabulary, common) == 1
    assert coverage(vocabulary, tokenizer.encode("q")) == 0
