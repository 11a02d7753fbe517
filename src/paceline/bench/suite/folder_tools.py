"""A folder of files in memory with the functions of BFCL's GorillaFileSystem: same names, arguments and results.

Written anew for this suite, so that a build executes nothing out of a downloaded wheel.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

Node = dict[str, Any] | str
"""A folder's entries by name, or a file's text."""

Result = dict[str, Any]

_FORBIDDEN = frozenset('|/\\?%*:"><')


def _load(contents: Mapping[str, Any]) -> dict[str, Node]:
    return {
        name: _load(data["contents"]) if data["type"] == "directory" else str(data["content"])
        for name, data in contents.items()
    }


class FolderTools:
    """The tree of one BFCL scenario and a working directory; every public method is a tool."""

    def __init__(self, scenario: Mapping[str, Any]) -> None:
        root = next(iter(scenario["root"]))
        self._root: dict[str, Node] = _load(scenario["root"][root]["contents"])
        self._path: list[str] = []
        self._root_name = root

    @classmethod
    def has(cls, name: str) -> bool:
        """Is there such a tool?"""
        return hasattr(cls, f"_do_{name}")

    @classmethod
    def parameters(cls, name: str) -> list[str]:
        """A tool's parameters in order; none for an unknown tool."""
        return [*inspect.signature(getattr(cls, f"_do_{name}")).parameters][1:] if cls.has(name) else []

    def call(self, name: str, arguments: Mapping[str, Any]) -> Result:
        """The result of one tool call; a tool that says nothing gives an empty result."""
        tool = getattr(self, f"_do_{name}")
        result: Result | None = tool(**arguments)
        return result or {}

    def environment(self) -> str:
        """The working directory and what it holds, as an agent's harness shows it with every request."""
        rows = [
            f"  {name}/ ({len(node)} entries)" if isinstance(node, dict) else f"  {name} ({len(node.encode())} bytes)"
            for name, node in self._here.items()
        ]
        return f"Working directory: {self._where}\n" + ("\n".join(rows) or "  (empty)")

    @property
    def _where(self) -> str:
        return "/" + "/".join([self._root_name, *self._path])

    @property
    def _here(self) -> dict[str, Node]:
        node = self._root
        for name in self._path:
            below = node[name]
            assert isinstance(below, dict)
            node = below
        return node

    def _file(self, name: str) -> str | None:
        node = self._here.get(name)
        return node if isinstance(node, str) else None

    def _folder(self, path: str) -> list[str] | None:
        """The path from the root, or None when there is no such folder."""
        if path == ".":
            return self._path
        names = [name for name in path.split("/") if name]
        found = [] if path.startswith("/") else list(self._path)
        for name in names:
            node = self._root
            for step in found:
                node = node[step]  # type: ignore[assignment]
            if not isinstance(node.get(name), dict):
                return None
            found.append(name)
        return found

    def _do_pwd(self) -> Result:
        return {"current_working_directory": self._where}

    def _do_ls(self, a: bool = False) -> Result:
        return {"current_directory_content": [name for name in self._here if a or not name.startswith(".")]}

    def _do_cd(self, folder: str) -> Result:
        folder = folder.rstrip("/") or "/"
        if folder == "..":
            if not self._path:
                return {"error": "Current directory is already the root. Cannot go back."}
            self._path.pop()
            return {}
        if folder not in (".", "/") and "/" in folder:
            return {"error": f"cd: {folder}: Unsupported path. Only one folder level at a time is supported."}
        path = self._folder(folder)
        if path is None:
            return {"error": f"cd: '{folder}': No such file or directory"}
        self._path = list(path)
        return {"current_working_directory": path[-1] if path else self._root_name}

    def _new(self, tool: str, name: str, node: Node, what: str) -> Result:
        if _FORBIDDEN & set(name):
            return {"error": f"{tool}: cannot {what} '{name}': Invalid character"}
        if name in self._here:
            return {"error": f"{tool}: cannot {what} '{name}': File exists"}
        self._here[name] = node
        return {}

    def _do_mkdir(self, dir_name: str) -> Result:
        return self._new("mkdir", dir_name, {}, "create directory")

    def _do_touch(self, file_name: str) -> Result:
        return self._new("touch", file_name, "", "touch")

    def _do_echo(self, content: str, file_name: str | None = None) -> Result:
        if not file_name:
            return {"terminal_output": content}
        if file_name not in self._here:
            return {"error": f"echo: cannot write to '{file_name}': No such file"}
        self._here[file_name] = content
        return {}

    def _do_cat(self, file_name: str) -> Result:
        text = self._file(file_name)
        return {"error": f"cat: '{file_name}': No such file or directory"} if text is None else {"file_content": text}

    def _do_find(self, path: str = ".", name: str | None = None) -> Result:
        start = self._folder(path)
        if start is None:
            return {"error": f"find: '{path}': No such file or directory"}
        matches: list[str] = []

        def walk(node: dict[str, Node], base: str) -> None:
            for entry, below in node.items():
                if name is None or name in entry:
                    matches.append(f"{base}/{entry}")
                if isinstance(below, dict):
                    walk(below, f"{base}/{entry}")

        node = self._root
        for step in start:
            node = node[step]  # type: ignore[assignment]
        walk(node, path.rstrip("/"))
        return {"matches": matches}

    def _do_wc(self, file_name: str, mode: str = "l") -> Result:
        text = self._file(file_name)
        if text is None:
            return {"error": f"wc: {file_name}: No such file or directory"}
        counts = {
            "l": ("lines", len(text.splitlines())),
            "w": ("words", len(text.split())),
            "c": ("characters", len(text)),
        }
        kind, count = counts[mode]
        return {"count": count, "type": kind}

    def _do_sort(self, file_name: str) -> Result:
        text = self._file(file_name)
        if text is None:
            return {"error": f"sort: {file_name}: No such file or directory"}
        return {"sorted_content": "\n".join(sorted(text.splitlines()))}

    def _do_grep(self, file_name: str, pattern: str) -> Result:
        text = self._file(file_name)
        if text is None:
            return {"error": f"grep: {file_name}: No such file or directory"}
        return {"matching_lines": [line for line in text.splitlines() if pattern in line]}

    def _do_tail(self, file_name: str, lines: int = 10) -> Result:
        text = self._file(file_name)
        if text is None:
            return {"error": f"tail: {file_name}: No such file or directory"}
        all_lines = text.splitlines()
        return {"last_lines": "\n".join(all_lines[-min(lines, len(all_lines)) :])}

    def _do_diff(self, file_name1: str, file_name2: str) -> Result:
        one, two = self._file(file_name1), self._file(file_name2)
        if one is None or two is None:
            return {"error": f"diff: {file_name1} or {file_name2}: No such file or directory"}
        pairs = zip(one.splitlines(), two.splitlines(), strict=False)
        return {"diff_lines": "\n".join(f"- {a}\n+ {b}" for a, b in pairs if a != b)}

    def _do_du(self, human_readable: bool = False) -> Result:
        def size(node: Node) -> int:
            return len(node.encode()) if isinstance(node, str) else sum(map(size, node.values()))

        total = float(size(self._here))
        if not human_readable:
            return {"disk_usage": f"{int(total)} bytes"}
        units = ["B", "KB", "MB", "GB", "TB"]
        while total >= 1024 and len(units) > 1:
            total /= 1024
            units.pop(0)
        return {"disk_usage": f"{total:.2f} {units[0]}"}

    def _do_rm(self, file_name: str) -> Result:
        if file_name not in self._here:
            return {"error": f"rm: cannot remove '{file_name}': No such file or directory"}
        del self._here[file_name]
        return {"result": f"'{file_name}' removed"}

    def _do_rmdir(self, dir_name: str) -> Result:
        node = self._here.get(dir_name)
        if not isinstance(node, dict) or node:
            reason = "Directory not empty" if isinstance(node, dict) else "No such file or directory"
            return {"error": f"rmdir: cannot remove '{dir_name}': {reason}"}
        return self._do_rm(dir_name)

    def _do_mv(self, source: str, destination: str) -> Result:
        result = self._place("mv", "move", "moved", source, destination)
        if "error" not in result:
            del self._here[source]
        return result

    def _do_cp(self, source: str, destination: str) -> Result:
        return self._place("cp", "copy", "copied", source, destination)

    def _place(self, tool: str, verb: str, done: str, source: str, destination: str) -> Result:
        node = self._here.get(source)
        if node is None:
            return {"error": f"{tool}: cannot {verb} '{source}': No such file or directory"}
        if "/" in destination:
            return {"error": f"{tool}: path not allowed in destination. Provide only a file or directory name."}
        copy: Node = dict(node) if isinstance(node, dict) else node
        target = self._here.get(destination)
        if target is None:
            self._here[destination] = copy
            return {"result": f"'{source}' {done} to '{destination}'"}
        if isinstance(target, str):
            return {"error": f"{tool}: cannot {verb} '{source}' to '{destination}': Not a directory"}
        if source in target:
            return {"error": f"{tool}: cannot {verb} '{source}' to '{destination}/{source}': File exists"}
        target[source] = copy
        return {"result": f"'{source}' {done} to '{destination}/{source}'"}
