"""Nodes and roles, in Python and in the languages that tree-sitter reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.syntax import Role, parse, roles_of, roles_of_answer
from tests.unit.train.workshop import CODE


def role_at(text: str, piece: str, language: str = "python") -> Role:
    return Role(roles_of(text, language)[len(text[: text.index(piece)].encode())])


@pytest.mark.parametrize(
    ("piece", "role"),
    [
        ("numbers and", Role.DOCSTRING),
        ("import math", Role.KEYWORD),
        ("math\n", Role.IMPORT),
        ("path\n", Role.IMPORT),
        ("counter:", Role.IDENTIFIER),
        ("counts things", Role.DOCSTRING),
        ("self, amount", Role.IDENTIFIER),
        ("total, other)", Role.CALL_ARGUMENT),
        ("> other", Role.OPERATOR),
        ("2)", Role.LITERAL),
        ("# the larger", Role.COMMENT),
        ("    best = item\n", Role.INDENTATION),
        ("for item", Role.KEYWORD),
    ],
)
def test_roles_of_python(piece: str, role: Role) -> None:
    assert role_at(CODE, piece) == role


def test_nodes_are_whole_lines_and_parse_by_themselves() -> None:
    tree = parse(CODE, "python")
    assert tree is not None
    data = CODE.encode()
    assert [node.name for node in tree.nodes if node.name] == ["counter", "add", "largest", "smallest"]
    for node in tree.nodes:
        assert node.start == 0 or data[node.start - 1 : node.start] == b"\n"
        assert data[node.end - 1 : node.end] == b"\n"


def test_code_that_breaks_off_keeps_the_roles_before_the_break() -> None:
    text = "import os\nvalue = compute(first, 'open"
    assert parse(text, "python") is None
    assert role_at(text, "os\n") == Role.IMPORT
    assert role_at(text, "first") == Role.CALL_ARGUMENT


def test_offsets_are_bytes() -> None:
    text = "name = 'größe'\nother = name\n"
    assert role_at(text, "other") == Role.IDENTIFIER
    assert len(roles_of(text, "python")) == len(text.encode())


def test_an_answer_is_prose_around_code() -> None:
    answer = "Here it is:\n```python\nimport os\n```\nIt imports os.\n```js\nlet x = f(y);\n"
    roles = roles_of_answer(answer)
    assert roles[0] == roles[answer.index("It imports")] == Role.PROSE
    assert roles[answer.index("os\n```")] == Role.IMPORT
    assert roles[answer.index("y);")] == Role.CALL_ARGUMENT


@given(st.text(max_size=60))
def test_no_text_is_too_odd(text: str) -> None:
    for language in ("python", "rust", "unheard of"):
        assert len(roles_of(text, language)) == len(text.encode())
    assert len(roles_of_answer(f"```python\n{text}")) == len(f"```python\n{text}".encode())


EXAMPLES = {
    "javascript": "import {a} from 'b';\nfunction twice(x) {\n  // doubles\n  return add(x, 2);\n}\n",
    "typescript": "import {a} from 'b';\nfunction twice(x: number): number {\n  // doubles\n  return add(x, 2);\n}\n",
    "tsx": "import {a} from 'b';\nfunction twice(x: number) {\n  // doubles\n  return add(x, 2);\n}\n",
    "go": 'package b\nimport "a"\nfunc twice(x int) int {\n\t// doubles\n\treturn add(x, 2)\n}\n',
    "rust": "use a::b;\nfn twice(x: i32) -> i32 {\n    // doubles\n    return add(x, 2);\n}\n",
    "java": "import a.b;\nclass T {\n  int twice(int x) {\n    // doubles\n    return add(x, 2);\n  }\n}\n",
    "c": "#include <a.h>\nint twice(int x) {\n  // doubles\n  return add(x, 2);\n}\n",
    "cpp": "#include <a.h>\nint twice(int x) {\n  // doubles\n  return add(x, 2);\n}\n",
}


@pytest.mark.parametrize("language", EXAMPLES)
def test_other_languages(language: str) -> None:
    pytest.importorskip("tree_sitter")
    text = EXAMPLES[language]
    tree = parse(text, language)
    assert tree is not None
    assert "twice" in {node.name for node in tree.nodes}
    assert role_at(text, "// doubles", language) == Role.COMMENT
    assert role_at(text, "x, 2", language) == Role.CALL_ARGUMENT
    assert role_at(text.replace("i32", "int"), "2)", language) == Role.LITERAL
    assert role_at(text, "return", language) == Role.KEYWORD
