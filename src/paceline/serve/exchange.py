"""What every route does: find the service, answer in one piece or as a stream, give the queue's place back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from fastapi import Request, Response

from paceline.serve.service import Service, Ticket
from paceline.serve.streaming import EventStream, unless_disconnected


def service_of(request: Request) -> Service:
    """The service of the app a request came to."""
    service: Service = request.app.state.service
    return service


def stream(
    service: Service, ticket: Ticket, chunks: AsyncGenerator[bytes, None], *, is_anthropic: bool = False
) -> Response:
    """An event stream; its end, whichever it is, gives the ticket back."""
    return EventStream(
        chunks, ping_interval=service.config.ping_interval, on_close=ticket.close, is_anthropic=is_anthropic
    )


async def answer(request: Request, ticket: Ticket, work: Coroutine[Any, Any, Response]) -> Response:
    """An answer in one piece; the work is cancelled when the client leaves."""
    with ticket:
        return await unless_disconnected(request.receive, work)
