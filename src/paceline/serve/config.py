"""Settings of the server; the command line, the environment and a file all end here."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import InvalidParameterError


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the server listens and what it lets in.

    Attributes:
        host, port: where it listens.
        api_keys: any of them opens the API; none leaves it open.
        is_insecure: listen beyond this machine without a key all the same.
        allowed_origins: web origins that browsers may call from; none by default.
        served_model_names: names under which clients may ask for the model; the first one is reported. Empty: the
            model's own.
        max_num_seqs: requests that run at once.
        max_queue: requests that may wait beyond those that run; more are answered 429.
        max_body_bytes, max_tool_schema_bytes, max_grammar_bytes: larger ones are answered 413. A grammar is also a JSON
            schema or a regular expression.
        request_timeout: seconds until a request is cancelled; 0 for no limit.
        drain_timeout: seconds that running requests get after SIGTERM.
        stall_timeout: seconds without a finished step, while there is work, after which /health answers 503.
        ping_interval: seconds of silence in a stream after which a comment keeps the connection alive.
        session_ttl: seconds that an idle session's prefix stays referenced.
        max_sessions: sessions kept; the least recently used is released first.
        log_prompts: write prompts and answers to the log.
        otlp_traces_endpoint: where OpenTelemetry spans go; None makes none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Sequence[str] = ()
    is_insecure: bool = False
    allowed_origins: Sequence[str] = ()
    served_model_names: Sequence[str] = ()
    max_num_seqs: int = 16
    max_queue: int = 64
    max_body_bytes: int = 16 * 2**20
    max_tool_schema_bytes: int = 2**20
    max_grammar_bytes: int = 2**18
    request_timeout: float = 0.0
    drain_timeout: float = 30.0
    stall_timeout: float = 120.0
    ping_interval: float = 15.0
    session_ttl: float = 900.0
    max_sessions: int = 64
    log_prompts: bool = False
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidParameterError(f"port must be from 0 to 65535, got {self.port}")
        for name in ("max_num_seqs", "max_body_bytes", "max_tool_schema_bytes", "max_grammar_bytes", "max_sessions"):
            if getattr(self, name) < 1:
                raise InvalidParameterError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("max_queue", "request_timeout", "drain_timeout"):
            if getattr(self, name) < 0:
                raise InvalidParameterError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("stall_timeout", "ping_interval", "session_ttl"):
            if getattr(self, name) <= 0:
                raise InvalidParameterError(f"{name} must be above 0, got {getattr(self, name)}")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise InvalidParameterError(f"otlp_traces_endpoint must be an http or https URL, got {endpoint!r}")
        if any(not key.strip() for key in self.api_keys):
            raise InvalidParameterError("an API key must not be empty")
        if not self.api_keys and not self.is_insecure and not is_loopback(self.host):
            raise InvalidParameterError(
                f"listening on {self.host} lets other machines in; give --api-key, or --insecure to do it without one"
            )


def is_loopback(host: str) -> bool:
    """True for an address that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
