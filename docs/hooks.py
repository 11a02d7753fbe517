"""Documentation build: docstrings write :class:`Name` for readers of the source; the site shows the name alone."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:class|meth|func|mod|attr):(?=<code)")
_FULL_PATH = re.compile(r"(<code>)~(?:\w+\.)+(?=\w)")


def on_page_content(html: str, **_: Any) -> str:
    """Drop the cross-reference roles that Markdown does not know."""
    return _FULL_PATH.sub(r"\1", _ROLE.sub("", html))
