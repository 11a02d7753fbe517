"""Reads one JSON object ``{"name": ..., "arguments": {...}}`` piece by piece, handing its arguments on as they come."""

from __future__ import annotations

import json


class CallScanner:
    """Fed with text from the opening brace on; knows where the object ends.

    The arguments are passed on as they are written. Where a model wrote them as a JSON string, they are that string's
    content, and come in one piece. With ``name`` given, the whole object is the arguments.

    Attributes:
        name: the call's name once it is complete.
        is_done: the object's closing brace was read.
        is_broken: this is not such an object.
    """

    def __init__(self, arguments_key: str, *, name: str = "") -> None:
        self._keys = {arguments_key, "arguments", "parameters"}
        self.name: str | None = name or None
        self.is_done = False
        self.is_broken = False
        self.has_arguments = bool(name)
        self._is_whole = bool(name)
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._string = ""  # the string being read at depth 1, or just read
        self._key: str | None = None  # of the value being read at depth 1
        self._awaits_value = False
        self._in_value = False
        self._arguments = ""
        self._is_quoted = False

    def push(self, text: str) -> int:
        """Read on; how many characters belonged to the object."""
        for index, character in enumerate(text):
            self._read(character)
            if self.is_done or self.is_broken:
                return index + 1
        return len(text)

    def take_arguments(self) -> str:
        """The arguments read since the last call."""
        if self._is_quoted:
            if not self.is_done:
                return ""
            self._is_quoted = False
            try:
                text = json.loads(self._arguments)
            except json.JSONDecodeError:
                text = self._arguments
            self._arguments = ""
            return text if isinstance(text, str) else json.dumps(text)
        taken, self._arguments = self._arguments, ""
        return taken

    def _read(self, character: str) -> None:
        was_in_arguments = self._is_whole or (self._in_value and self._key in self._keys)
        if self._in_string:
            self._read_in_string(character)
        elif character == '"':
            self._open_string()
        elif character in "{[":
            self._open(character)
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()
                self.is_done = character == "}"
                was_in_arguments = self._is_whole
        elif self._is_whole:
            pass  # only braces and strings matter
        elif self._depth == 1 and character == ":":
            self._key, self._awaits_value = self._string, True
            return
        elif self._depth == 1 and character == ",":
            self._end_value()
            return
        elif self._depth == 1 and self._awaits_value and not character.isspace():
            self._start_value()
        elif self._depth == 1 and not self._in_value and not character.isspace():
            self.is_broken = True
        if was_in_arguments or (self._in_value and self._key in self._keys):
            self._arguments += character

    def _read_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = False
            if self._depth == 1 and self._in_value and self._key == "name":
                self.name = self._string
            return
        if self._depth == 1:
            self._string += character

    def _open_string(self) -> None:
        self._in_string = True
        if self._depth == 1:
            self._string = ""
            if self._awaits_value:
                self._start_value()
                self._is_quoted = self._key in self._keys and not self._is_whole

    def _open(self, character: str) -> None:
        if self._depth == 0:
            self.is_broken = character != "{"
        elif self._depth == 1 and not self._is_whole:
            if not self._awaits_value:
                self.is_broken = True
                return
            self._start_value()
        self._depth += 1

    def _start_value(self) -> None:
        self._awaits_value, self._in_value = False, True
        self.has_arguments = self.has_arguments or self._key in self._keys

    def _end_value(self) -> None:
        self._in_value = self._awaits_value = False
        self._key = None
