"""Runs the application: one socket, one process, and an orderly end."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from paceline.errors import InvalidParameterError
from paceline.serve.app import create_app
from paceline.serve.config import ServerConfig
from paceline.serve.served import ServedEngine
from paceline.serve.service import Service

if TYPE_CHECKING:
    from paceline.serve.tracing import Tracing


def run_server(
    load: Callable[[], ServedEngine], config: ServerConfig, *, on_ready: Callable[[Service, str], None]
) -> None:
    """Serve until SIGINT or SIGTERM; ``on_ready`` gets the service and its address once the model is loaded.

    Raises:
        InvalidParameterError: the address cannot be listened on, or there is nothing to trace with.
        PacelineError: the model cannot be loaded.
    """
    tracing = _tracing(config.otlp_traces_endpoint) if config.otlp_traces_endpoint is not None else None
    listener = listen(config)
    port = listener.getsockname()[1]
    host = f"[{config.host}]" if ":" in config.host else config.host

    def ready(service: Service) -> None:
        if service.load_error is not None:
            server.should_exit = True
        else:
            on_ready(service, f"http://{host}:{port}")

    app = create_app(load, config, on_ready=ready, tracing=tracing)
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=max(1, round(config.drain_timeout)),
    )
    service: Service = app.state.service
    server = _Server(settings, service)
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()
    if service.load_error is not None:
        raise service.load_error


def configure_logging(level: str, *, as_json: bool) -> None:
    """Log lines to standard error, as text or as one JSON object each.

    Raises:
        InvalidParameterError: an unknown level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise InvalidParameterError(f"unknown log level {level!r}; choose from debug, info, warning, error")
    handler = logging.StreamHandler()
    handler.setFormatter(_JSONFormatter() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("paceline", "uvicorn", "opentelemetry"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(number if name == "paceline" else max(number, logging.WARNING))


class _Server(uvicorn.Server):
    """Tells the service first, so that endless streams end and nothing new is let in while the rest drains."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """An orderly end at the first signal, an immediate one at the second; either way the exit status is ours."""
        self._service.drain()
        self.force_exit = self.should_exit
        self.should_exit = True


class _JSONFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _tracing(endpoint: str) -> Tracing:
    try:
        from paceline.serve.tracing import Tracing
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise InvalidParameterError(
            "--otlp-traces-endpoint needs OpenTelemetry; install it with: pip install 'paceline[otel]'"
        ) from None
    return Tracing.to_endpoint(endpoint)


def listen(config: ServerConfig) -> socket.socket:
    """The socket that the server takes its connections from; what is written to them is sent at once.

    Raises:
        InvalidParameterError: the address cannot be had.
    """
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listener = socket.create_server((config.host.strip("[]"), config.port), family=family, backlog=2048)
    except OSError as error:
        raise InvalidParameterError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}; choose another --port or --host"
        ) from None
    # asyncio sets this only where it made the socket itself. Without it the first token waits behind the headers until
    # the client acknowledges them: 40 ms on a connection that is used again.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
