"""Everything that the page shows of a server, as one compact object: GET /state.

Knows nothing of HTTP. What is true now comes from the scheduler, what has happened from the log of
the latest requests, so that it costs the same however long the server has run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from msgspec import structs

from common.config import Role
from common.frontend.context import FrontendContext
from common.frontend.requests.request_log import LoggedRequest
from common.frontend.requests.scrape import ask_state, not_ready_reason, page_counts
from common.frontend.requests.stages import stages_of
from common.metrics.snapshot import PageCounts
from common.protocol.frontend import PeerState, State

REQUEST_COUNT = 20  # what fits a screen
PERCENTILES = (50, 90, 99)


async def page_state(context: FrontendContext) -> dict[str, object]:
    """Everything on the page. requests, failures: newest first; also failures that are older."""
    seen = await ask_state(context)
    state = seen.state or State(0, False, {}, {}, [], [])
    config = context.config
    logged = context.scheduler.log.newest()
    failed = [one for one in logged if one.trace.status != "ok"]
    return {
        "served_model_name": config.served_model_name,
        "engine_type": str(config.engine_type),
        "role": str(config.role),
        "version": context.version,
        "uptime_s": context.clock.wall() - context.started_wall_s,
        "clock_s": context.clock.now(),
        "not_ready_reason": not_ready_reason(context),
        "is_fresh": seen.is_fresh,
        "has_chat_template": context.tokenizer.chat_template is not None,
        "layout": {
            "tp_size": config.tp_size,
            "pp_size": config.pp_size,
            "page_size": config.page_size,
        },
        "worker": _worker(state),
        "open_request_count": context.scheduler.open_request_count,
        "tokens_per_s": context.metrics.throughput,
        "hit_rate": context.metrics.hit_rate,
        "handed_over_nbytes": context.metrics.handed_over_nbytes,
        "step_count": state.step_count,
        "queues": state.queues,
        "counters": state.counters,
        "page_groups": [_group(page_counts(group)) for group in state.page_groups],
        "prefix_cache": structs.asdict(state.prefix_cache) if state.prefix_cache else None,
        "peers": [_peer(peer, logged) for peer in state.peers],
        "percentiles": _percentiles(context, logged),
        "requests": [_request(context, one) for one in logged[:REQUEST_COUNT]],
        "failures": [_request(context, one) for one in failed[:REQUEST_COUNT]],
    }


def _worker(state: State) -> dict[str, str]:
    """What all ranks have in common."""
    first = state.workers[0] if state.workers else {}
    return {key: first[key] for key in ("device", "dtype", "attention", "tls") if key in first}


def _group(pages: PageCounts) -> dict[str, object]:
    return {
        "name": pages.group,
        "total": pages.total,
        "free": pages.free,
        "cached": pages.cached,
        "used": pages.used,
        "quarantined": pages.quarantined,
        "page_nbytes": pages.page_nbytes,
    }


def _peer(peer: PeerState, logged: Sequence[LoggedRequest]) -> dict[str, object]:
    """gb_per_s: what the latest transfers with this peer reached while bytes were on the wire."""
    transfers = [one.trace.transfer for one in logged if one.trace.peer == peer.label]
    nbytes = sum(one.nbytes for one in transfers)
    wire_s = sum(one.wire_s for one in transfers)
    return structs.asdict(peer) | {"gb_per_s": nbytes / 1e9 / wire_s if wire_s > 0 else None}


def _percentiles(
    context: FrontendContext, logged: Sequence[LoggedRequest]
) -> list[dict[str, object]]:
    """Of the latest requests that went well, and of the time between the latest tokens."""
    answered = [one for one in logged if one.trace.output_token_count > 0]
    values: dict[str, list[float]] = defaultdict(list)
    values["ttft"] = [one.trace.ttft_s for one in answered]
    values["inter_token"] = context.metrics.intervals_s
    for trace in (one.trace for one in answered):
        values["reserve"].append(trace.reserve_s)
        values["queue"].append(trace.transfer.queue_s)
        values["prefill"].append(trace.transfer.prefill_s)
        if trace.transfer.nbytes:
            values["transfer"].append(trace.transfer.transfer_s)
        if context.config.role is Role.DECODE:
            values["first_token"].append(trace.first_token_s)
    return [
        {"name": name, "count": len(found), **_at(sorted(found))}
        for name, found in values.items()
        if found
    ]


def _at(ascending: Sequence[float]) -> dict[str, float]:
    """Nearest-rank percentiles: the smallest value that so many percent do not exceed."""
    count = len(ascending)
    return {f"p{p}_s": ascending[math.ceil(p * count / 100) - 1] for p in PERCENTILES}


def _request(context: FrontendContext, logged: LoggedRequest) -> dict[str, object]:
    trace = logged.trace
    return {
        **logged.summary(),
        "id": trace.request_id,
        "wire_s": trace.transfer.wire_s,
        "decode_s": trace.decode_s,
        "spans": [
            {"name": stage.name, "start_s": stage.start_s, "duration_s": stage.duration_s}
            for stage in stages_of(trace, context.config.role)
        ],
    }
