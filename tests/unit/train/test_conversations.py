"""Conversations in which the target takes over from a scripted agent."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

from paceline.train.conversations import Message, agent_conversation
from paceline.train.corpus import SourceFile
from paceline.train.syntax import parse
from tests.unit.train.workshop import CODE

FILE = SourceFile("p", "sums.py", "python", "MIT", CODE)


def converse(seed: int) -> list[Message]:
    tree = parse(CODE, "python")
    assert tree is not None
    dice = random.Random(seed)
    unit = dice.choice([node for node in tree.nodes if node.name])
    return agent_conversation(FILE, CODE.encode(), unit, tree, dice)


def test_speakers_take_turns_and_the_user_is_last() -> None:
    lengths = Counter()
    for seed in range(60):
        roles = [message["role"] for message in converse(seed)]
        assert roles[0] == "system"
        assert roles[1:] == (["user", "assistant"] * len(roles))[: len(roles) - 1]
        assert roles[-1] == "user"
        lengths[len(roles)] += 1
    assert set(lengths) == {2, 4, 6, 8}


def test_calls_name_tools_that_the_system_prompt_lists() -> None:
    called = 0
    for seed in range(60):
        system, *rest = converse(seed)
        listed = {
            json.loads(line)["name"]: json.loads(line) for line in system["content"].split("\n") if line[:1] == "{"
        }
        for message in rest:
            if message["role"] == "assistant":
                for call in re.findall(r"<tool_call>(.*?)</tool_call>", message["content"]):
                    call = json.loads(call)
                    assert set(call["arguments"]) <= set(listed[call["name"]]["parameters"])
                    called += 1
    assert called > 60


def test_an_edit_in_the_history_changes_what_the_file_holds() -> None:
    found = 0
    for seed in range(60):
        for message in converse(seed):
            for old in re.findall(r"<<<<<<< SEARCH\n(.*?)\n=======", message["content"], re.DOTALL):
                assert old in CODE
                found += 1
    assert found


def test_the_dice_alone_decide() -> None:
    assert converse(5) == converse(5)
    assert converse(5) != converse(6)
