"""Spans on their way to an OpenTelemetry collector; the only importer of opentelemetry.

Spans are made when a request has ended, out of what is measured anyway, and are put into a bounded
queue that a thread of the SDK empties: a collector that is slow, broken or gone costs spans, never
a request. Where nothing is traced, a client's `traceparent` is still passed on: the prefill server
may trace for itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from common.config import Role, ServerConfig
from common.errors import ConfigError
from common.frontend.requests.request_log import LoggedRequest
from common.frontend.requests.spans import (
    RequestIds,
    Span,
    decode_spans,
    name_request,
    parse_trace_parent,
    prefill_spans,
)

QUEUED_SPAN_COUNT_MAX = 4096  # some hundred requests; more are dropped
BATCH_SPAN_COUNT_MAX = 512
EXPORT_INTERVAL_MS = 1000
EXPORT_TIMEOUT_S = 2
CLOSE_TIMEOUT_S = 2.0  # what a stopping server waits for its last spans to leave


class Tracing:
    """Names the spans of requests when they arrive and tells of them when they have ended.

    sink: None if nothing is traced.
    """

    def __init__(self, role: Role, sink: OtlpSink | None) -> None:
        self._role = role
        self._sink = sink

    def begin(self, trace_parent: str) -> RequestIds | None:
        """Ids for a new request. None if its spans are another server's to name: a prefill server's
        belong to the decode server's transfer, of which it hears later."""
        if self._sink is None or self._role is Role.PREFILL:
            return None
        return name_request(trace_parent)

    def end(self, logged: LoggedRequest, ids: RequestIds | None) -> None:
        """A request has ended. ids: as `begin` gave them."""
        if self._sink is None:
            return
        trace, started_s = logged.trace, logged.started_wall_s
        if ids is not None:
            if ids.request.is_sampled:
                self._sink.add(decode_spans(trace, started_s, ids))
            return
        parent = parse_trace_parent(trace.origin.trace_parent)
        if parent is not None and parent.is_sampled:
            self._sink.add(prefill_spans(trace, started_s, parent))

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()


def open_tracing(config: ServerConfig) -> Tracing:
    """Raises: ConfigError if spans are wanted and the extra that sends them is not installed."""
    endpoint = config.trace_endpoint
    return Tracing(config.role, OtlpSink(endpoint, config) if endpoint else None)


class OtlpSink:
    """OTLP over HTTP, in protobuf. Never blocks and never fails after its start."""

    def __init__(self, endpoint: str, config: ServerConfig) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as exc:
            raise ConfigError(
                f"--otlp-traces-endpoint {endpoint}: needs the extra `trace`: "
                f"pip install 'baton[trace]' ({exc})"
            ) from exc
        # It would warn of every span that a full queue drops.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        self._resource = Resource.create(
            {
                "service.name": f"baton-{config.role}",
                "service.instance.id": f"{config.host}:{config.port}",
                "gen_ai.request.model": config.served_model_name,
            }
        )
        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S),
            max_queue_size=QUEUED_SPAN_COUNT_MAX,
            schedule_delay_millis=EXPORT_INTERVAL_MS,
            max_export_batch_size=BATCH_SPAN_COUNT_MAX,
        )

    def add(self, spans: Sequence[Span]) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
        from opentelemetry.trace.status import Status, StatusCode

        kinds = {
            "request": SpanKind.SERVER,
            "prefill_request": SpanKind.SERVER,
            "remote_prefill": SpanKind.CLIENT,
        }

        def context(trace_id: str, span_id: str, *, is_remote: bool) -> SpanContext:
            flags = TraceFlags(TraceFlags.SAMPLED)
            return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, flags)

        for span in spans:
            trace_id, parent_id = span.ids.trace_id, span.parent_id
            kind = kinds.get(span.name, SpanKind.INTERNAL)
            is_entry = kind is SpanKind.SERVER  # below a span of the client's
            self._processor.on_end(
                ReadableSpan(
                    name=span.name,
                    context=context(trace_id, span.ids.span_id, is_remote=False),
                    parent=context(trace_id, parent_id, is_remote=is_entry) if parent_id else None,
                    resource=self._resource,
                    attributes=dict(span.attributes),
                    kind=kind,
                    status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                    start_time=int(1e9 * span.start_s),
                    end_time=int(1e9 * span.end_s),
                    instrumentation_scope=InstrumentationScope("baton"),
                )
            )

    def close(self) -> None:
        """Send what is queued, for at most CLOSE_TIMEOUT_S: the SDK itself would wait half a minute
        for a collector that does not answer, and a daemon thread is never joined."""
        last = threading.Thread(target=self._processor.shutdown, daemon=True)
        last.start()
        last.join(CLOSE_TIMEOUT_S)
