"""The latest requests and their ends: a list, a timeline of each, all of them for a viewer.

Knows nothing of prompts or text: a request is shown by its name, its lengths and its times.
"""

from __future__ import annotations

from fastapi import APIRouter, Response

from common.errors import RequestError
from common.frontend.context import FrontendContext
from common.frontend.http.errors import json_response
from common.frontend.requests.request_log import LoggedRequest
from common.frontend.requests.stages import Stage, chunks_of, stages_of

CLOCKS = (
    "every duration is of the monotonic clock of the server in `clock`, and the two clocks are "
    "never compared: a prefill server's stages are laid end to end from the moment the transfer "
    "was asked for, and what is left until the first token, messages included, is first_token. "
    "started_at is this server's wall clock; nothing corrects for that of another host."
)
PROCESS_ID = 1  # a trace viewer wants one; there is one group of rows


def build_router(context: FrontendContext) -> APIRouter:
    router = APIRouter()

    @router.get("/requests")
    async def requests() -> Response:
        """The latest requests that have ended, newest first."""
        logged = context.scheduler.log.newest()
        return json_response({"requests": [one.summary() for one in logged]})

    @router.get("/requests/{rid:path}/timeline")
    async def timeline(rid: str) -> Response:
        """Where the time of one of them went. Raises: RequestError 404 if it is not among them."""
        logged = context.scheduler.log.find(rid)
        if logged is None:
            count_max = context.config.request_history
            raise RequestError(
                f"rid={rid!r}: not among the latest {count_max} requests that have ended here",
                field="rid",
                status=404,
            )
        return json_response(_timeline(context, logged))

    @router.get("/trace")
    async def trace() -> Response:
        """The latest requests in Chrome's trace format, for Perfetto or chrome://tracing."""
        return json_response(_chrome_trace(context))

    return router


def _timeline(context: FrontendContext, logged: LoggedRequest) -> dict[str, object]:
    spans = []
    for stage in stages_of(logged.trace, context.config.role):
        span = _span(stage)
        if stage.name == "prefill":
            span["chunks"] = [_span(chunk) for chunk in chunks_of(logged.trace, stage)]
        spans.append(span)
    transfer = logged.trace.transfer
    return {
        **logged.summary(),
        "engine_type": str(context.config.engine_type),
        "spans": spans,
        "transfer": {
            "wire_s": transfer.wire_s,
            "bytes": transfer.nbytes,
            "exposed_bytes": transfer.exposed_nbytes,
            "runs": transfer.run_count,
            "chunks": transfer.chunk_count,
        },
        "clocks": CLOCKS,
    }


def _span(stage: Stage) -> dict[str, object]:
    return {
        "name": stage.name,
        "start_s": stage.start_s,
        "duration_s": stage.duration_s,
        "clock": str(stage.clock),
    }


# ---- Chrome's trace format -----------------------------------------------------------------------


def _chrome_trace(context: FrontendContext) -> dict[str, object]:
    """One row per request, oldest on top; times in µs of this server's wall clock."""
    config = context.config
    name = f"{config.engine_type} server, {config.served_model_name}"
    events = [_row_name("process_name", 0, name)]
    for row, logged in enumerate(reversed(context.scheduler.log.newest()), 1):
        events.append(_row_name("thread_name", row, logged.rid or f"request {row}"))
        events += _row(logged, row, context)
    return {"traceEvents": events, "displayTimeUnit": "ms", "metadata": {"clocks": CLOCKS}}


def _row(logged: LoggedRequest, row: int, context: FrontendContext) -> list[dict[str, object]]:
    trace = logged.trace
    events = [_event(logged, row, "request", 0.0, trace.e2e_s, logged.summary())]
    for stage in stages_of(trace, context.config.role):
        arguments: dict[str, object] = {"clock": str(stage.clock)}
        events.append(_event(logged, row, stage.name, stage.start_s, stage.duration_s, arguments))
        if stage.name == "prefill":
            events += [
                _event(logged, row, chunk.name, chunk.start_s, chunk.duration_s, {})
                for chunk in chunks_of(trace, stage)
            ]
    return events


def _event(
    logged: LoggedRequest,
    row: int,
    name: str,
    start_s: float,
    duration_s: float,
    arguments: dict[str, object],
) -> dict[str, object]:
    return {
        "ph": "X",
        "pid": PROCESS_ID,
        "tid": row,
        "name": name,
        "ts": round(1e6 * (logged.started_wall_s + start_s), 1),
        "dur": round(1e6 * duration_s, 1),
        "args": arguments,
    }


def _row_name(what: str, row: int, name: str) -> dict[str, object]:
    return {"ph": "M", "pid": PROCESS_ID, "tid": row, "name": what, "args": {"name": name}}
