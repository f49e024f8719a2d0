"""The spans of a request, as a tracing backend shows them: ids, parents, times, attributes.

    request                      decode server; its parent is the client's, from `traceparent`
    ├─ reserve
    ├─ remote_prefill           asked for until the first token
    │  └─ prefill_request        prefill server; its parent came with the reservation
    │     ├─ queue
    │     ├─ prefill
    │     │  └─ chunk 0, 1, ...
    │     └─ transfer
    └─ decode

Durations are of each server's monotonic clock, starts of its wall clock: where the clocks of two
hosts differ, the prefill server's spans are shifted against the others, and nothing here corrects
for it. Knows nothing of how spans leave the process.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.config import Role
from common.failures import FailureKind
from common.frontend.requests.stages import TRANSFER_STAGES, Stage, chunks_of, stages_of
from common.request import RequestTrace
from common.request_bounds import TRACE_PARENT

_SAMPLED = 0x01

Attributes = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class SpanIds:
    """Which span. is_sampled: whether anybody collects it."""

    trace_id: str
    span_id: str
    is_sampled: bool

    def child(self) -> SpanIds:
        return SpanIds(self.trace_id, secrets.token_hex(8), self.is_sampled)

    @property
    def trace_parent(self) -> str:
        """As W3C writes it in the header `traceparent`."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


@dataclass(frozen=True, slots=True)
class Span:
    """start_s, end_s: wall clock. parent_id: "" for the first of a trace. error: "" if none."""

    name: str
    ids: SpanIds
    parent_id: str
    start_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    error: str = ""


def new_trace() -> SpanIds:
    return SpanIds(secrets.token_hex(16), secrets.token_hex(8), is_sampled=True)


def parse_trace_parent(text: str) -> SpanIds | None:
    """None if there is none, or one that no span can belong to."""
    match = TRACE_PARENT.fullmatch(text)
    if match is None or not int(match[1], 16) or not int(match[2], 16):
        return None
    return SpanIds(match[1], match[2], bool(int(match[3], 16) & _SAMPLED))


def trace_parent_of(given: Sequence[str]) -> str:
    """The one valid `traceparent` among the headers of a request; "" if it has none or several."""
    one = given[0].strip() if len(given) == 1 else ""
    return one if parse_trace_parent(one) is not None else ""


@dataclass(frozen=True, slots=True)
class RequestIds:
    """The spans of a decode server's request, named before anything is known of it.

    parent_id: the client's span, "" if it has none. remote_prefill: what prefill servers' spans
    belong to; also of a request that is computed here in the end, and then nothing belongs to it.
    """

    parent_id: str
    request: SpanIds
    remote_prefill: SpanIds


def name_request(trace_parent: str) -> RequestIds:
    parent = parse_trace_parent(trace_parent)
    request = parent.child() if parent is not None else new_trace()
    return RequestIds(parent.span_id if parent is not None else "", request, request.child())


def decode_spans(trace: RequestTrace, started_s: float, ids: RequestIds) -> list[Span]:
    """The decode server's spans of a request that has ended."""
    spans = [
        Span(
            "request",
            ids.request,
            ids.parent_id,
            started_s,
            started_s + trace.e2e_s,
            _request_attributes(trace),
            _error(trace),
        )
    ]
    stages = stages_of(trace, Role.DECODE)
    if trace.peer:
        asked = [stage for stage in stages if stage.name not in ("reserve", "decode")]
        stages = [stage for stage in stages if stage not in asked]
        if asked:
            start_s, end_s = started_s + asked[0].start_s, started_s + asked[-1].end_s
            attributes = _transfer_attributes(trace)
            own, parent_id = ids.remote_prefill, ids.request.span_id
            spans.append(Span("remote_prefill", own, parent_id, start_s, end_s, attributes))
    return spans + [_stage_span(stage, started_s, ids.request) for stage in stages]


def prefill_spans(trace: RequestTrace, started_s: float, parent: SpanIds) -> list[Span]:
    """The prefill server's spans of a request that has ended, below the span that asked for it."""
    own = parent.child()
    attributes = {**_request_attributes(trace), **_transfer_attributes(trace)}
    end_s = started_s + trace.e2e_s
    error = _error(trace)
    spans = [Span("prefill_request", own, parent.span_id, started_s, end_s, attributes, error)]
    for stage in stages_of(trace, Role.PREFILL):
        if stage.name in TRANSFER_STAGES:
            span = _stage_span(stage, started_s, own)
            spans.append(span)
            if stage.name == "prefill":
                chunks = chunks_of(trace, stage)
                spans += [_stage_span(chunk, started_s, span.ids) for chunk in chunks]
    return spans


def _stage_span(stage: Stage, started_s: float, parent: SpanIds) -> Span:
    start_s, end_s = started_s + stage.start_s, started_s + stage.end_s
    return Span(stage.name, parent.child(), parent.span_id, start_s, end_s)


def _request_attributes(trace: RequestTrace) -> dict[str, str | int | float]:
    """In OpenTelemetry's words for generative AI where it has any."""
    return {
        "gen_ai.request.id": trace.origin.rid,
        "gen_ai.usage.prompt_tokens": trace.prompt_token_count,
        "gen_ai.usage.completion_tokens": trace.output_token_count,
        "gen_ai.latency.time_to_first_token": trace.ttft_s,
        "gen_ai.latency.e2e": trace.e2e_s,
        "baton.cached_tokens": trace.cached.count,
        "baton.cached_prefill_tokens": trace.cached.prefill,
        "baton.cached_decode_tokens": trace.cached.decode,
        "baton.retractions": trace.retraction_count,
        "baton.status": trace.status,
    }


def _transfer_attributes(trace: RequestTrace) -> dict[str, str | int | float]:
    """On a decode server the durations are those that the prefill server told."""
    transfer = trace.transfer
    return {
        "baton.peer": trace.peer,
        "baton.tokens": trace.prompt_token_count,
        "baton.bytes": transfer.nbytes,
        "baton.exposed_bytes": transfer.exposed_nbytes,
        "baton.runs": transfer.run_count,
        "baton.chunks": transfer.chunk_count,
        "baton.queue_s": transfer.queue_s,
        "baton.prefill_s": transfer.prefill_s,
        "baton.transfer_s": transfer.transfer_s,
        "baton.wire_s": transfer.wire_s,
    }


def _error(trace: RequestTrace) -> str:
    return "" if trace.status in ("ok", FailureKind.ABORTED) else trace.message or trace.status
