"""A conversation with a server, by ``paceline chat --url``: any that speaks OpenAI's chat completions."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import httpx

from paceline.engine.output import Delta, TokenPiece
from paceline.errors import ServerError
from paceline.request import SamplingParams, Speculation


class RemoteChat:
    """Keeps the history, and a session in the server's cache where the server is a Paceline.

    ``url`` may end in /v1 or not.
    """

    def __init__(
        self,
        url: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.messages = list(messages)
        self.usage: Mapping[str, Any] = {}
        self.timings: Mapping[str, Any] = {}
        self._session_id = uuid.uuid4().hex
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        base = url.rstrip("/").removesuffix("/v1")
        timeout = httpx.Timeout(10.0, read=None)  # a long prompt is silent for a while
        try:
            self._client = httpx.Client(base_url=base, headers=headers, timeout=timeout, transport=transport)
        except httpx.InvalidURL as error:
            raise ServerError(f"{url!r} is not a URL: {error}") from None

    def model(self) -> str:
        """The model the server offers.

        Raises:
            ServerError: it does not answer, or not as such a server does.
        """
        try:
            response = self._client.get("/v1/models")
            _require_ok(response)
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(f"no answer from {self._client.base_url}: {error}; is the server running?") from None
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{self._client.base_url} does not speak OpenAI's API; check --url") from None

    def stream(
        self, content: str, params: SamplingParams, speculation: Speculation, is_stopped: Callable[[], bool]
    ) -> Iterator[Delta]:
        """One turn, piece by piece. A turn that fails, or that ``is_stopped`` ends, is not kept.

        Raises:
            ServerError: the server refuses the turn, or breaks off.
        """
        messages = [*self.messages, {"role": "user", "content": content}]
        body = {
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True, "include_origins": True},
            "temperature": params.temperature,
            "top_p": params.top_p,
            "session_id": self._session_id,
            "speculative": _speculative(speculation),
            **{name: getattr(params, name) for name in ("seed", "max_tokens") if getattr(params, name) is not None},
        }
        answer = ""
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                _require_ok(response)
                for chunk in _chunks(response):
                    if is_stopped():
                        return
                    delta = self._delta(chunk)
                    answer += delta.text
                    yield delta
        except httpx.HTTPError as error:
            raise ServerError(f"the server broke off: {error}") from None
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def close(self) -> None:
        """Let the server's cache go."""
        with suppress(httpx.HTTPError):
            self._client.delete(f"/v1/sessions/{self._session_id}")
        self._client.close()

    def _delta(self, chunk: Mapping[str, Any]) -> Delta:
        if "error" in chunk:
            raise ServerError(f"the server broke off: {_message(chunk)}")
        self.usage = chunk.get("usage") or self.usage
        self.timings = chunk.get("timings") or self.timings
        choices = chunk.get("choices") or [{}]
        text = (choices[0].get("delta") or {}).get("content") or ""
        origins = choices[0].get("origins") or ([[text, "bonus"]] if text else [])
        return Delta(text, [TokenPiece(piece, origin) for piece, origin in origins], ())


def _speculative(speculation: Speculation) -> bool | dict[str, Any]:
    if speculation.mode == "off":
        return False
    return {**asdict(speculation), "drafters": list(speculation.drafters)}


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _require_ok(response: httpx.Response) -> None:
    if response.is_success:
        return
    response.read()
    try:
        message = _message(response.json())
    except ValueError:
        message = response.text[:200]
    raise ServerError(f"the server answers {response.status_code}: {message}")


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message", error)) if isinstance(error, Mapping) else str(error or body)
