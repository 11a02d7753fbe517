"""How an answer writes an edit: the whole new function, or SEARCH/REPLACE blocks."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.bench.suite.functions import Change, hunks

MAX_GOLD_CHARS = 800


def edit_text(change: Change, old_lines: Sequence[str], new_lines: Sequence[str], shape: str) -> str:
    """What follows the ``apply_edit`` call: the whole new function, or SEARCH/REPLACE blocks unique in the file."""
    if shape == "function":
        return "```python\n" + "\n".join(change.new.lines(new_lines)) + "\n```"
    old, new = change.old.lines(old_lines), change.new.lines(new_lines)
    whole = "\n".join(old_lines)
    blocks = []
    for before, after in hunks(old, new):
        first, last, new_first, new_last = before.first, before.last, after.first, after.last
        for grow in range(40):
            search = "\n".join(old[first - 1 : last])
            if last >= first and search.strip() and whole.count(search + "\n") == 1 and (grow >= 2 or first == 1):
                break
            if first > 1 and (grow % 2 == 0 or last == len(old)):
                first, new_first = first - 1, new_first - 1
            elif last < len(old):
                last, new_last = last + 1, new_last + 1
        blocks.append((first, last, new_first, new_last))
    merged: list[tuple[int, int, int, int]] = []
    for block in blocks:
        if merged and block[0] <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], block[1]), merged[-1][2], max(merged[-1][3], block[3]))
        else:
            merged.append(block)
    return "\n".join(
        "\n".join(["<<<<<<< SEARCH", *old[a - 1 : b], "=======", *new[c - 1 : d], ">>>>>>> REPLACE"])
        for a, b, c, d in merged
    )
