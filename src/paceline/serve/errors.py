"""Errors as clients expect them: an HTTP status and the error object of the wire format they speak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import ContextLengthError, PacelineError

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "not_implemented_error",
    503: "unavailable_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """Ends a request with an HTTP status; ``param`` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _printable(message)
        self.param = _printable(param) if param is not None else None
        self.code = code
        self.headers = dict(headers or {})

    def body(self, *, is_anthropic: bool = False) -> dict[str, Any]:
        """The error object of OpenAI's API, or of Anthropic's."""
        if is_anthropic:
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = _OPENAI_TYPES.get(self.status, "server_error")
        code: str | int = self.code if self.code is not None else self.status
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}


def not_supported(what: str, param: str) -> ApiError:
    """A 400 for a field that is understood but not implemented."""
    return ApiError(400, f"{what} is not supported yet; leave out {param!r}", param=param, code="unsupported_parameter")


def from_exception(error: Exception) -> ApiError:
    """What a client is told about an error; only those of the user's making are quoted."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, PacelineError):
        return ApiError(400, str(error))
    if isinstance(error, UnicodeEncodeError):
        return ApiError(400, "the request holds half a surrogate pair, which is no text; send whole characters")
    if isinstance(error, TimeoutError):
        return ApiError(408, "the request took longer than the server allows", headers={"x-should-retry": "false"})
    return ApiError(500, "the server failed to answer; its log says why")


def _printable(text: str) -> str:
    """Half a surrogate pair can come out of a JSON string, but cannot go into an answer."""
    return text.encode("utf-8", "replace").decode()
