"""Matplotlib figures as inline SVG that follows the page: real text in the page's font, colours as CSS variables."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

# Matplotlib wants colours in numbers; these stand for the variables of style.css and are replaced in the SVG.
_COLOURS = {
    "ink": "#0a0b00",
    "muted": "#0a0b01",
    "grid": "#0a0b02",
    **{f"series-{number}": f"#0a0b1{number}" for number in range(9)},
}
INK, MUTED, GRID = (_COLOURS[name] for name in ("ink", "muted", "grid"))
SERIES = tuple(_COLOURS[f"series-{number}"] for number in range(9))

_STYLE: dict[RcKeyType, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "lines.solid_capstyle": "round",
}


@contextmanager
def house_style() -> Iterator[None]:
    """Draw figures within this; matplotlib's settings outside stay as they are."""
    with matplotlib.rc_context(_STYLE):
        yield


def figure(height: float, legend_entries: int = 0) -> Figure:
    """An empty figure, taller for a legend of two columns above it.

    Its width in points is close to that of a phone, so that text stays readable there.
    """
    return Figure(figsize=(5.2, height + 0.21 * ((legend_entries + 1) // 2)), layout="constrained")


def to_svg(drawn: Figure, name: str, description: str) -> str:
    """The figure as an ``<svg>`` element. ``name`` keeps element ids apart from those of other figures on the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        drawn.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*|<style.*?</style>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r' id="[\w.]+_\d+"', "", text)  # figure_1, axes_1, ...: the same in each figure
    text = re.sub(r"<svg [^>]*?(viewBox=\"[^\"]+\")[^>]*>", _opening(description), text, count=1, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
    for variable, colour in _COLOURS.items():
        text = text.replace(colour, f"var(--{variable})")
    return text.strip()


def _opening(description: str) -> str:
    label = html.escape(description, quote=True).replace("\\", r"\\")
    return rf'<svg \1 role="img" aria-label="{label}">'
