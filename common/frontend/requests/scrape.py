"""What is true of this server now, asked of the scheduler, for /metrics and the pages about state.

A scheduler that does not answer in time is itself a fact to show: then the state heard last is
used, and said to be old.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from common.errors import RequestError
from common.failures import STOPPING
from common.frontend.context import FrontendContext
from common.metrics.snapshot import PageCounts, PeerGauge, PrefixCounts, Snapshot
from common.protocol.frontend import PageGroupState, PeerState, PrefixCacheState, State

SCRAPE_TIMEOUT_S = 2.0  # below a scraper's usual 10 s, far above one scheduler step


@dataclass(frozen=True, slots=True)
class SchedulerReport:
    """state: what the scheduler said last, None if nothing. is_fresh: it said so just now."""

    state: State | None
    is_fresh: bool


async def ask_state(context: FrontendContext) -> SchedulerReport:
    try:
        return SchedulerReport(await context.scheduler.get_state(SCRAPE_TIMEOUT_S), is_fresh=True)
    except RequestError:
        return SchedulerReport(context.scheduler.state, is_fresh=False)


def not_ready_reason(context: FrontendContext) -> str:
    """Why requests can't be served now, "" if they can; cheap, from what was heard last."""
    if context.scheduler.is_draining:
        return STOPPING
    trouble = context.scheduler.trouble()
    if trouble:
        return trouble
    state = context.scheduler.state
    if context.scheduler.server_info is None or state is None:
        return "the server is still starting"
    if not state.is_ready:
        problems = [f"{source}: {text}" for source, text in context.peers.problems.items()]
        return f"no prefill server can be used: {'; '.join([peers_in_words(state), *problems])}"
    return ""


def peers_in_words(state: State) -> str:
    """Every peer and its state, for an error message."""
    words = [f"{p.label} {p.state}{f' ({p.detail})' if p.detail else ''}" for p in state.peers]
    return ", ".join(words) or "none is known"


async def take_snapshot(context: FrontendContext) -> Snapshot:
    seen = await ask_state(context)
    state = seen.state
    return Snapshot(
        is_up=seen.is_fresh,
        is_ready=not not_ready_reason(context),
        page_size=context.config.page_size,
        token_capacity=pool_token_count(state),
        used_token_count=used_token_count(state),
        open_request_count=context.scheduler.open_request_count,
        late_message_count=context.scheduler.late_message_count,
        step_count=state.step_count if state else 0,
        throughput=context.metrics.throughput,
        hit_rate=context.metrics.hit_rate,
        queues=state.queues if state else {},
        counters=state.counters if state else {},
        pages=[page_counts(group) for group in state.page_groups] if state else (),
        peers=[peer_gauge(peer) for peer in state.peers] if state else (),
        prefixes=prefix_counts(state.prefix_cache if state else None),
    )


def token_group(state: State | None) -> PageGroupState | None:
    """The page group that decides how many tokens fit; None if nothing grows with tokens.

    The smallest of those that keep every token of a request. Where all layers have a window, it is
    the smallest window's: what it holds at a time, as SGLang counts it; requests may be longer.
    """
    growing = [group for group in state.page_groups if group.page_tokens] if state else []
    lasting = [group for group in growing if not group.is_window]
    return min(lasting or growing, key=lambda group: group.total * group.page_tokens, default=None)


def pool_token_count(state: State | None) -> int:
    """Tokens that the pool holds; see `token_group`."""
    group = token_group(state)
    return group.total * group.page_tokens if group else 0


def used_token_count(state: State | None) -> int:
    """Tokens whose pages are in use, of as many as the pool holds."""
    group = token_group(state)
    return (group.used + group.quarantined) * group.page_tokens if group else 0


def describe_group(group: PageGroupState) -> dict[str, object]:
    """A page group as /server_info shows it."""
    return structs.asdict(group) | {"token_nbytes": group.token_nbytes}


def page_counts(group: PageGroupState) -> PageCounts:
    """Cached pages are part of the message's free ones; here every page has one state."""
    return PageCounts(
        group=group.name,
        token_nbytes=group.token_nbytes,
        page_nbytes=group.page_nbytes,
        free=group.free - group.cached,
        cached=group.cached,
        used=group.used,
        quarantined=group.quarantined,
    )


def prefix_counts(cache: PrefixCacheState | None) -> PrefixCounts:
    if cache is None:
        return PrefixCounts()
    return PrefixCounts(
        token_count=cache.token_count,
        node_count=cache.node_count,
        checkpoint_count=cache.checkpoint_count,
        checkpoint_max=cache.checkpoint_max,
        host_token_count=cache.host_token_count,
        host_token_max=cache.host_token_max,
    )


def peer_gauge(peer: PeerState) -> PeerGauge:
    return PeerGauge(
        name=peer.label,
        is_connected=peer.state == "connected",
        in_flight_count=peer.in_flight_count,
        is_breaker_open=peer.breaker in ("open", "half open"),
        breaker_open_count=peer.breaker_open_count,
        is_self_test_failing=peer.is_self_test_failing,
    )
