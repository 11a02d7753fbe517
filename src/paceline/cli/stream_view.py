"""Streamed text on a terminal: accepted draft tokens stand out by their source; plain text when piped."""

from __future__ import annotations

from rich.console import Console
from rich.segment import Segment, Segments

from paceline.engine.output import Delta

STYLES = {"grammar": "blue", "prediction": "magenta", "suffix": "green", "corpus": "yellow", "model": "cyan"}
LEGEND = "accepted from: " + ", ".join(f"[{style}]{name}[/]" for name, style in STYLES.items())


class StreamView:
    """Prints deltas as they come."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ends_line = True

    def title(self, text: str, legend: str = "") -> None:
        """A ruler between two runs, on a terminal only."""
        if self._console.is_terminal:
            self._console.rule(f"[bold]{text}[/]  {legend}" if legend else f"[bold]{text}[/]", align="left")
        else:
            self._console.print(f"--- {text}", markup=False)

    def show(self, delta: Delta) -> None:
        """Print a delta's text."""
        # As segments, because rich's Text turns tabs into spaces and drops carriage returns.
        segments = [
            Segment(piece.text, self._console.get_style(STYLES.get(piece.origin, "none"))) for piece in delta.pieces
        ]
        self._console.print(Segments(segments), end="")
        if delta.text:
            self._ends_line = delta.text.endswith("\n")
            self._console.file.flush()

    def end(self) -> None:
        """Finish the line."""
        if not self._ends_line:
            self._console.print()
        self._ends_line = True
