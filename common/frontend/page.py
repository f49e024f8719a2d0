"""GET /: one page that shows what the server does now, and GET /state, which the page reads.

Knows nothing of how the page looks: that is `page.html` beside it, read once, without any outside
assets.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from fastapi import APIRouter, Response

from common.frontend.context import FrontendContext
from common.frontend.errors import json_response
from common.frontend.scrape import look, not_ready_reason, page_counts
from common.metrics_snapshot import PageCounts
from common.request import RequestTrace

TRACE_COUNT = 20  # what fits a screen; the client keeps a few more


def build_router(context: FrontendContext) -> APIRouter:
    router = APIRouter()
    html = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

    @router.get("/")
    async def page() -> Response:
        return Response(html, media_type="text/html; charset=utf-8")

    @router.get("/state")
    async def state() -> Response:
        return json_response(await _state(context))

    return router


def _group(pages: PageCounts) -> dict[str, object]:
    return {
        "name": pages.group,
        "total": pages.total,
        "free": pages.free,
        "cached": pages.cached,
        "used": pages.used,
        "quarantined": pages.quarantined,
    }


def trace_fields(trace: RequestTrace) -> dict[str, object]:
    """Every field, zeros included, which messages leave out."""
    return {
        **msgspec.structs.asdict(trace),
        "hand_over": msgspec.structs.asdict(trace.hand_over),
    }


async def _state(context: FrontendContext) -> dict[str, object]:
    """Everything on the page. traces: newest first."""
    seen = await look(context)
    state = seen.state
    config = context.config
    traces = list(context.scheduler.recent_traces)[::-1][:TRACE_COUNT]
    return {
        "served_model_name": config.served_model_name,
        "engine_type": str(config.engine_type),
        "role": str(config.role),
        "version": context.version,
        "uptime_s": context.clock.wall() - context.started_wall_s,
        "not_ready_reason": not_ready_reason(context),
        "is_fresh": seen.is_fresh,
        "open_request_count": context.scheduler.open_request_count,
        "tokens_per_s": context.metrics.throughput,
        "queues": state.queues if state else {},
        "counters": state.counters if state else {},
        "step_count": state.step_count if state else 0,
        "page_groups": [_group(page_counts(g)) for g in state.page_groups] if state else [],
        "peers": [msgspec.structs.asdict(peer) for peer in state.peers] if state else [],
        "traces": [trace_fields(trace) for trace in traces],
    }
