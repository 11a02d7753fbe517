"""Everything around generation: models, health, metrics, tokens, sessions, and the live view."""

from __future__ import annotations

import asyncio
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.responses import HTMLResponse

from paceline import __version__
from paceline.serve.errors import ApiError
from paceline.serve.exchange import service_of
from paceline.serve.metrics import CONTENT_TYPE
from paceline.serve.sampling import WireModel
from paceline.serve.service import Service
from paceline.serve.streaming import EventStream, JSONBytes

router = APIRouter()

# Everything is in the page; it may talk to this server and to nobody else.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class TokenizeRequest(WireModel):
    """Text, or messages that the chat template makes into text."""

    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(WireModel):
    """Token ids."""

    tokens: list[int] = Field(max_length=1_000_000)
    model: str | None = None


@router.get("/health", summary="Can it serve?")
@router.get("/v1/health", include_in_schema=False)
async def health(request: Request) -> Response:
    """200, or 503 while the model is loading, while draining, or when the engine makes no progress."""
    service_of(request).require_healthy()
    return JSONBytes({"status": "ok"})


@router.get("/ping", summary="Can it serve?")
async def ping(request: Request) -> Response:
    """The same as /health."""
    return await health(request)


@router.get("/version", summary="The version of Paceline")
async def version() -> Response:
    """The version of Paceline."""
    return JSONBytes({"version": __version__})


@router.get("/metrics", summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus's text format."""
    service = service_of(request)
    assert service.engine is not None
    assert service.metrics is not None
    return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


@router.get("/v1/models", summary="The model")
async def list_models(request: Request) -> Response:
    """The model under each of its names."""
    service = service_of(request)
    cards = [_card(service, name) for name in service.model_names]
    return JSONBytes({"object": "list", "data": cards, "models": cards})


@router.get("/v1/models/{model_id:path}", summary="One model")
async def get_model(model_id: str, request: Request) -> Response:
    """One of the names."""
    service = service_of(request)
    if model_id not in service.model_names:
        raise ApiError(404, f"the model {model_id[:200]!r} does not exist", code="model_not_found")
    return JSONBytes(_card(service, model_id))


@router.post("/tokenize", summary="Text to token ids")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text or of a chat."""
    engine = service_of(request).engine
    text = body.prompt if body.prompt is not None else body.content

    def encode() -> list[int]:
        if body.messages is not None:
            rendered = engine.render(body.messages, add_generation_prompt=body.add_generation_prompt)
            return engine.tokenizer.encode(rendered)
        if text is None:
            raise ApiError(400, "give a prompt or messages", param="prompt")
        return engine.tokenizer.encode(text, add_special_tokens=body.add_special_tokens)

    token_ids = await asyncio.to_thread(encode)
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": engine.info.max_model_len,
        "tokens": token_ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [engine.tokenizer.token_string(token_id) for token_id in token_ids]
    return JSONBytes(answer)


@router.post("/detokenize", summary="Token ids to text")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids."""
    tokenizer = service_of(request).engine.tokenizer
    return JSONBytes({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)})


@router.get("/tokenizer_info", summary="The tokenizer (vLLM)")
async def tokenizer_info(request: Request) -> Response:
    """Special tokens and the chat template, for clients that tokenise through /tokenize and need nothing else."""
    engine = service_of(request).engine
    tokenizer = engine.tokenizer
    return JSONBytes(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokenizer.bos_token or None,
            "eos_token": tokenizer.eos_token or None,
            "pad_token": tokenizer.eos_token or None,
            "chat_template": tokenizer.chat_template,
            "model_max_length": engine.info.max_model_len,
            "vocab_size": tokenizer.vocab_size,
        }
    )


@router.get("/v1/sessions", summary="Sessions that keep a prefix")
async def list_sessions(request: Request) -> Response:
    """Sessions, least recently used first."""
    sessions = service_of(request).sessions.list()
    data = [{"id": one.key, "turns": one.num_turns, "tokens": len(one.token_ids)} for one in sessions]
    return JSONBytes({"object": "list", "data": data})


@router.delete("/v1/sessions/{session_id:path}", summary="Release a session")
async def release_session(session_id: str, request: Request) -> Response:
    """Let the cache reuse a session's blocks."""
    if not await service_of(request).sessions.release(session_id):
        raise ApiError(404, f"there is no session {session_id[:200]!r}", code="session_not_found")
    return JSONBytes({"id": session_id, "object": "session", "deleted": True})


@router.get("/", include_in_schema=False)
async def live_view() -> Response:
    """The live view."""
    page = resources.files("paceline.serve").joinpath("live.html").read_text(encoding="utf-8")
    # Everything is in the page; it may talk to this server and to nobody else.
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
    )
    return HTMLResponse(page, headers={"Content-Security-Policy": policy, "X-Frame-Options": "DENY"})


@router.get("/live/info", include_in_schema=False)
async def live_info(request: Request) -> Response:
    """What the live view says about the engine."""
    service = service_of(request)
    info = service.engine.info
    return JSONBytes(
        {
            "model": service.model_names[0],
            "draft": info.draft,
            "drafters": list(info.drafters),
            "backend": info.backend,
            "dtype": info.dtype,
            "max_model_len": info.max_model_len,
            "num_blocks": info.num_blocks,
            "block_size": info.block_size,
            "kv_bytes": info.kv_bytes,
            "version": __version__,
        }
    )


@router.get("/live/events", include_in_schema=False)
async def live_events(request: Request) -> Response:
    """Steps and the block pool, as server-sent events."""
    service = service_of(request)
    assert service.engine is not None
    assert service.feed is not None
    events = service.feed.events(lambda: service.is_draining)
    return EventStream(events, ping_interval=service.config.ping_interval, on_close=lambda: None)


def _card(service: Service, name: str) -> dict[str, Any]:
    info = service.engine.info
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "paceline",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_model_len,
        "slug": name,
        "display_name": name,
    }
