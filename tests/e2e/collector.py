"""A tiny OpenTelemetry collector: takes OTLP over HTTP and keeps the spans, by service."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


@dataclass(frozen=True)
class Received:
    """One span. Ids as hexadecimal digits; parent_id "" for none.

    is_entry: its parent is said to be another service's.
    """

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    duration_s: float
    attributes: dict[str, object]
    is_error: bool
    is_entry: bool


@dataclass
class Collector:
    url: str
    spans: list[Received] = field(default_factory=list)

    def of_trace(self, trace_id: str) -> list[Received]:
        return [span for span in list(self.spans) if span.trace_id == trace_id]

    def take(self, body: bytes) -> None:
        message = ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            about = attributes_of(resource.resource.attributes)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Received(
                            service=str(about["service.name"]),
                            name=span.name,
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            duration_s=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                            attributes=attributes_of(span.attributes),
                            is_error=span.status.code == 2,
                            is_entry=bool(span.flags & SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK),
                        )
                    )


def attributes_of(pairs: object) -> dict[str, object]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}  # type: ignore[attr-defined]


@contextmanager
def collector() -> Iterator[Collector]:
    """Listens on a port of its own until the block ends."""

    class Take(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                found.take(body)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Take)
    server.daemon_threads = True
    found = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
