"""OpenTelemetry spans: one per request, and in it the wait, the prefill and the decoding of each generation.

Names and attributes follow the semantic conventions for generative AI; what they do not know is under ``paceline.``.
Texts are never part of a span. Needs the extra ``otel``: import this module only where tracing is asked for.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, get_current_span, set_span_in_context, use_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline import __version__
from paceline.engine.output import Output
from paceline.request import SamplingParams
from paceline.serve.service import Job

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/infill": "text_completion",
}


class Tracing:
    """Makes the spans and hands them to a processor; ``close`` sends what is left."""

    def __init__(self, processor: SpanProcessor) -> None:
        name = os.environ.get("OTEL_SERVICE_NAME", "paceline")
        resource = Resource.create({"service.name": name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("paceline", __version__)

    @classmethod
    def to_endpoint(cls, endpoint: str) -> Tracing:
        """Spans go to a collector over OTLP/HTTP; a URL without a path gets the standard one."""
        if urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + "/v1/traces"
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))

    async def aclose(self) -> None:
        """Send what is left and stop."""
        await asyncio.to_thread(self._provider.shutdown)

    # ---- requests ------------------------------------------------------------------------------------------

    def around(self, app: ASGIApp) -> ASGIApp:
        """``app`` with a span around each request that generates; it continues the trace the client names."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in _OPERATIONS:
                await app(scope, receive, send)
                return
            span = self._begin(scope)
            status = 499  # nobody was answered

            async def noting(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                    request_id = Headers(raw=list(message["headers"])).get("x-request-id")
                    if request_id is not None:
                        span.set_attribute("http.response.header.x-request-id", [request_id])
                await send(message)

            # What an exception says may quote the request.
            with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
                try:
                    await app(scope, receive, noting)
                finally:
                    _note_status(span, status)

        return traced

    def _begin(self, scope: Scope) -> Span:
        operation = _OPERATIONS[scope["path"]]
        host, port = scope.get("server") or (None, None)
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "paceline",
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "server.address": host,
            "server.port": port,
        }
        parent = TraceContextTextMapPropagator().extract(dict(Headers(scope=scope)), context=Context())
        return self._tracer.start_span(operation, parent, SpanKind.SERVER, _present(attributes))

    # ---- generations ---------------------------------------------------------------------------------------

    def finished(self, job: Job, index: int, started_ns: int, model_name: str) -> None:
        """The spans of a generation, reckoned back from now, and what the request's span says of all of them."""
        span = get_current_span()
        if not span.is_recording():
            return
        output = job.outputs[index]
        end = time.time_ns()
        first = max(started_ns, end - round(output.timing.decode_ms * 1e6))
        scheduled = max(started_ns, first - round((output.timing.ttft_ms - output.timing.queue_ms) * 1e6))
        usage = output.usage
        read = {"paceline.cached_tokens": usage.cached_tokens, "paceline.read_tokens": usage.prompt_tokens}
        read["paceline.read_tokens"] -= usage.cached_tokens
        written = {"gen_ai.usage.output_tokens": usage.completion_tokens, **_speculation([output])}
        self._child("queue", index, started_ns, scheduled, {})
        self._child("prefill", index, scheduled, first, read)
        self._child("decode", index, first, end, written)
        operation = getattr(span, "attributes", {}).get("gen_ai.operation.name", "chat")
        span.update_name(f"{operation} {model_name}")
        span.set_attributes({**_asked(job, model_name), **_answered(job)})

    def failed(self, error: BaseException | None) -> None:
        """A generation ended without an output: it failed, or its client left."""
        span = get_current_span()
        is_cancelled = error is None or isinstance(error, asyncio.CancelledError | GeneratorExit)
        kind = "cancelled" if is_cancelled else "timeout" if isinstance(error, TimeoutError) else type(error).__name__
        span.set_attribute("error.type", kind)
        if not is_cancelled:
            span.set_status(Status(StatusCode.ERROR))

    def _child(self, name: str, index: int, start: int, end: int, attributes: Mapping[str, Any]) -> None:
        context = set_span_in_context(get_current_span())
        all_attributes = {"paceline.choice": index, **attributes}
        self._tracer.start_span(name, context, SpanKind.INTERNAL, all_attributes, start_time=start).end(end)


def _note_status(span: Span, status: int) -> None:
    if status != 499:
        span.set_attribute("http.response.status_code", status)
    if status >= 400 and "error.type" not in getattr(span, "attributes", {}):
        span.set_attribute("error.type", "cancelled" if status == 499 else str(status))
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))


def _asked(job: Job, model_name: str) -> dict[str, Any]:
    """Attributes of the request."""
    branch = job.branches[0]
    params: SamplingParams = branch.params
    conversation = branch.prompt.conversation
    return _present(
        {
            "gen_ai.request.model": model_name,
            "gen_ai.response.model": model_name,
            "gen_ai.request.choice.count": len(job.branches) if len(job.branches) > 1 else None,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k or None,
            "gen_ai.request.seed": params.seed if (params.seed or 0) < 2**63 else None,  # OTLP's integers are signed
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.request.stop_sequences": list(params.stop) or None,
            "gen_ai.conversation.id": conversation.key if conversation is not None else None,
            "paceline.speculation.mode": job.speculation.mode,
        }
    )


def _answered(job: Job) -> dict[str, Any]:
    """Attributes of the answer so far; a prompt that several choices share counts once."""
    outputs = [job.outputs[index] for index in sorted(job.outputs)]
    by_prompt = {id(job.branches[index].prompt.token_ids): output.usage for index, output in job.outputs.items()}
    return {
        "gen_ai.response.finish_reasons": [output.finish_reason for output in outputs],
        "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in by_prompt.values()),
        "gen_ai.usage.cache_read.input_tokens": sum(usage.cached_tokens for usage in by_prompt.values()),
        "gen_ai.usage.output_tokens": sum(output.usage.completion_tokens for output in outputs),
        **_speculation(outputs),
    }


def _speculation(outputs: Sequence[Output]) -> dict[str, Any]:
    reports = [output.speculation for output in outputs]
    sources = sorted({source for report in reports for source in report.accepted_by_source})
    return {
        "paceline.speculation.num_spec_steps": sum(report.num_spec_steps for report in reports),
        "paceline.speculation.num_draft_tokens": sum(report.num_draft_tokens for report in reports),
        "paceline.speculation.num_accepted_draft_tokens": sum(report.num_accepted_draft_tokens for report in reports),
        **{
            f"paceline.speculation.accepted.{source}": sum(one.accepted_by_source.get(source, 0) for one in reports)
            for source in sources
        },
    }


def _present(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that have no value."""
    return {name: value for name, value in attributes.items() if value is not None}
