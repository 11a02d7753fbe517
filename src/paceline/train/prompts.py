"""What the target is asked, so that its answers can be learnt from: work as agents and editors send it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.train.conversations import MAX_UNIT_BYTES, Message, agent_conversation
from paceline.train.corpus import SourceFile
from paceline.train.syntax import Node, Tree, parse

_MIN_UNIT_BYTES = 120
_EDITOR = (
    "You are a programming assistant in an editor. You see files of the user's project and change them. Answer with "
    "code first and few words."
)
_TASKS = (
    "Rewrite `{name}` with type hints on all parameters and the return value. Answer with the whole function.",
    "Add a docstring to `{name}` that describes its parameters and result. Answer with the whole function.",
    "Handle the case of empty input in `{name}`. Answer with the changed code only.",
    "Rename the most unclear variable of `{name}`. Show the change as a SEARCH/REPLACE block.",
    "Make `{name}` shorter without changing what it does. Answer with a unified diff.",
    "Write tests for `{name}` with pytest.",
    "Explain in a few sentences what `{name}` does.",
    "Find a possible bug in `{name}` and fix it. Answer with the corrected function.",
    "Write an example that calls `{name}` and prints the result.",
    "Raise a clear error in `{name}` for arguments of a wrong type. Answer with the whole function.",
    "Which lines of `{path}` have to change so that `{name}` logs what it does? Show them.",
    "The tests of `{path}` fail in `{name}`. Read the file you need first.",
)
_IMPLEMENT = "Write the body of this {language} code so that it does what its name says:\n\n```{language}\n{head}\n```"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question to the target: messages for its chat template, or plain text to be completed."""

    package: str
    kind: str
    content: tuple[Message, ...] | str


def make_prompts(files: Iterable[SourceFile], *, per_file: int, has_chat: bool, seed: int) -> Iterator[Prompt]:
    """Questions about definitions of the files, at most ``per_file`` each; without a chat template, completions.

    The same for the same file and seed, whatever else is in the corpus.
    """
    for file in files:
        tree = parse(file.text, file.language)
        if tree is None:
            continue
        data = file.text.encode()
        units = [node for node in tree.nodes if node.name and node.end - node.start >= _MIN_UNIT_BYTES]
        dice = random.Random(f"{seed}/prompt/{file.package}/{file.path}")
        for unit in dice.sample(units, min(per_file, len(units))):
            yield _prompt(file, data, unit, tree, dice, has_chat=has_chat)


def _prompt(file: SourceFile, data: bytes, unit: Node, tree: Tree, dice: random.Random, *, has_chat: bool) -> Prompt:
    chance = dice.random()
    if not has_chat or chance < 0.15:
        cut = unit.start + min(unit.end - unit.start, MAX_UNIT_BYTES) // dice.choice([2, 3, 4])
        text = data[max(0, cut - 2 * MAX_UNIT_BYTES) : cut].decode(errors="ignore")
        return Prompt(file.package, "completion", text)
    code = data[unit.start : min(unit.end, unit.start + MAX_UNIT_BYTES)].decode(errors="ignore").rstrip()
    if chance < 0.3:
        head = "\n".join(code.split("\n")[: dice.choice([1, 2, 3])])
        content = _IMPLEMENT.format(language=file.language, head=head)
        return Prompt(file.package, "implement", ({"role": "user", "content": content},))
    if chance < 0.65:
        return Prompt(file.package, "agent", tuple(agent_conversation(file, data, unit, tree, dice)))
    before = data[max(0, unit.start - 600) : unit.start].decode(errors="ignore") if dice.random() < 0.4 else ""
    task = dice.choice(_TASKS).format(name=unit.name, path=file.path)
    question = f"{file.path}:\n```{file.language}\n{before}{code}\n```\n\n{task}"
    messages: tuple[Message, ...] = ({"role": "user", "content": question},)
    if dice.random() < 0.5:
        messages = ({"role": "system", "content": _EDITOR}, *messages)
    return Prompt(file.package, "task", messages)
