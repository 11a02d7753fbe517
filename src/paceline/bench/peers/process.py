"""A worker process and the lines exchanged with it; everything that can go wrong becomes one BenchmarkError."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import BenchmarkError

_CHUNK_BYTES = 1 << 16
_LOG_TAIL_BYTES = 4096
_CLOSE_TIMEOUT_S = 5.0


class WorkerProcess:
    """Runs ``command`` and exchanges JSON lines with it, see ``worker_protocol.py``.

    Lines of its output that are no answer to the pending request are ignored: libraries print what they like. A
    worker that hangs, dies or answers with an error is ended, and stays so.
    """

    def __init__(self, name: str, command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        self._name = name
        self._buffer = bytearray()
        self._num_requests = 0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment
            )
        except OSError as error:
            self._log.close()
            raise BenchmarkError(f"{name} cannot be started: {error.strerror or error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)

    def request(self, operation: str, *, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """Send one request and return its answer.

        Raises:
            BenchmarkError: no answer in time, the worker died, or it answered with an error; it is closed then.
        """
        if self._stdin.closed:
            raise BenchmarkError(f"{self._name} has ended already")
        deadline = time.monotonic() + timeout_s
        self._num_requests += 1
        try:
            self._send({"id": self._num_requests, "op": operation, **fields}, deadline)
            answer = self._receive(deadline)
            if "error" in answer:
                raise BenchmarkError(f"{self._name} failed: {answer['error']}")
        except TimeoutError:
            self.close()
            raise BenchmarkError(f"{self._name} gave no answer to {operation!r} within {timeout_s:.0f} s") from None
        except (BrokenPipeError, EOFError):
            reason = self._reason_of_death()
            self.close()
            raise BenchmarkError(f"{self._name} died during {operation!r}: {reason}") from None
        except BaseException:
            self.close()
            raise
        return answer

    def close(self) -> None:
        """End the worker, politely only if it is idle; closing twice is allowed."""
        if self._stdin.closed:
            return
        with contextlib.suppress(OSError):
            self._stdin.close()
        self._process.kill()
        self._process.wait()
        self._stdout.close()
        self._log.close()

    def _send(self, message: Mapping[str, Any], deadline: float) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            _wait(self._stdin.fileno(), selectors.EVENT_WRITE, deadline)
            data = data[os.write(self._stdin.fileno(), data[:_CHUNK_BYTES]) :]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while True:
            while (end := self._buffer.find(b"\n")) >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                if (answer := _parse(line)) is not None and answer.get("id") == self._num_requests:
                    return answer
            _wait(self._stdout.fileno(), selectors.EVENT_READ, deadline)
            chunk = os.read(self._stdout.fileno(), _CHUNK_BYTES)
            if not chunk:
                raise EOFError
            self._buffer += chunk

    def _reason_of_death(self) -> str:
        try:
            status = self._process.wait(timeout=_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL_BYTES))
        lines = self._log.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}, {last[:300]}" if last else how


def _wait(descriptor: int, event: int, deadline: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, event)
        # Also checked when there is something to read: babbling is no answer.
        if time.monotonic() >= deadline or not selector.select(deadline - time.monotonic()):
            raise TimeoutError


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None
