"""The state of a server at one moment, and its values of the table's gauges and counters.

Knows nothing of messages: the frontend fills a `Snapshot` from the scheduler's answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from common.speculative import ACCEPTED_AT


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages of one group; the four states add up to the pool. Bytes are those of all ranks.

    token_nbytes: 0 for a group of which a request of any length has one page.
    """

    group: str
    token_nbytes: float
    page_nbytes: int
    free: int
    cached: int
    used: int
    quarantined: int

    @property
    def total(self) -> int:
        return self.free + self.cached + self.used + self.quarantined


@dataclass(frozen=True, slots=True)
class PeerGauge:
    name: str
    is_connected: bool
    in_flight_count: int
    is_breaker_open: bool = False
    breaker_open_count: int = 0
    is_self_test_failing: bool = False


@dataclass(frozen=True, slots=True)
class PrefixCounts:
    """What is kept of prompts for later ones. checkpoint_max: checkpoints that have room.

    host_token_count, host_token_max: tokens in the tier in host memory, and as many as have room.
    """

    token_count: int = 0
    node_count: int = 0
    checkpoint_count: int = 0
    checkpoint_max: int = 0
    host_token_count: int = 0
    host_token_max: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a server at one moment. queues, counters: the scheduler's own names.

    throughput: output tokens per second. hit_rate: share of prompt tokens that were cached.
    """

    is_up: bool = False
    is_ready: bool = False
    page_size: int = 0
    token_capacity: int = 0
    used_token_count: int = 0
    open_request_count: int = 0
    late_message_count: int = 0
    step_count: int = 0
    throughput: float = 0.0
    hit_rate: float = 0.0
    queues: dict[str, int] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    pages: Sequence[PageCounts] = ()
    peers: Sequence[PeerGauge] = ()
    prefixes: PrefixCounts = PrefixCounts()


@dataclass(frozen=True, slots=True)
class Seen:
    """One value. key: of the table; labels: values of the metric's labels, in their order."""

    key: str
    value: float
    labels: tuple[str, ...] = ()


def queue_depth(now: Snapshot, queue: str) -> float:
    return now.queues.get(queue, 0)


def sum_of(now: Snapshot, counter: str) -> float:
    return now.counters.get(counter, 0.0)


def see(now: Snapshot) -> Iterator[Seen]:
    """Everything but the queues and counters that have a metric each."""
    page_count = now.pages[0].total if now.pages else 0
    yield Seen("up", float(now.is_up))
    yield Seen("ready", float(now.is_ready))
    yield Seen("open_requests", now.open_request_count)
    yield Seen("throughput", now.throughput)
    yield Seen("hit_rate", now.hit_rate)
    yield Seen("late_messages", now.late_message_count)
    yield Seen("engine_steps", now.step_count)
    yield Seen("usage", max((_usage(group) for group in now.pages), default=0.0))
    yield Seen("used_tokens", now.used_token_count)
    yield Seen("token_capacity", now.token_capacity)
    yield Seen("page_size", now.page_size)
    yield Seen("page_count", page_count)
    yield Seen("cache_config", 1, (str(now.page_size), str(page_count)))
    yield Seen("block_config", 1, (str(now.page_size), str(page_count)))
    yield Seen("prefix_cache_tokens", now.prefixes.token_count)
    yield Seen("prefix_cache_nodes", now.prefixes.node_count)
    yield Seen("checkpoints", now.prefixes.checkpoint_count)
    yield Seen("checkpoint_max", now.prefixes.checkpoint_max)
    yield Seen("host_cache_tokens", now.prefixes.host_token_count)
    yield Seen("host_cache_token_max", now.prefixes.host_token_max)
    for group in now.pages:
        yield from _see_pages(group)
    for queue, depth in sorted(now.queues.items()):
        yield Seen("queue_depth", depth, (queue,))
    for event, value in sorted(now.counters.items()):
        yield Seen("events", value, (event,))
    yield from _see_speculation(now)
    for peer in now.peers:
        yield from _see_peer(peer)


def _see_speculation(now: Snapshot) -> Iterator[Seen]:
    steps, proposed = sum_of(now, "spec_steps"), sum_of(now, "spec_proposed_tokens")
    if not proposed:
        return
    accepted = sum_of(now, "spec_accepted_tokens")
    yield Seen("spec_accept_length", 1 + accepted / steps)
    yield Seen("spec_accept_rate", accepted / proposed)
    for counter, value in sorted(now.counters.items()):
        if counter.startswith(ACCEPTED_AT):
            yield Seen("spec_accepted_at", value, (counter.removeprefix(ACCEPTED_AT),))


def _usage(group: PageCounts) -> float:
    return (group.used + group.quarantined) / max(1, group.total)


def _see_pages(group: PageCounts) -> Iterator[Seen]:
    states = {
        "free": group.free,
        "cached": group.cached,
        "used": group.used,
        "quarantined": group.quarantined,
    }
    for state, count in states.items():
        yield Seen("pages", count, (group.group, state))
    yield Seen("pool_pages", group.total, (group.group,))
    yield Seen("page_bytes", group.page_nbytes, (group.group,))
    yield Seen("token_bytes", group.token_nbytes, (group.group,))


def _see_peer(peer: PeerGauge) -> Iterator[Seen]:
    label = (peer.name,)
    yield Seen("peer_connected", float(peer.is_connected), label)
    yield Seen("peer_in_flight", peer.in_flight_count, label)
    yield Seen("peer_breaker_open", float(peer.is_breaker_open), label)
    yield Seen("peer_breaker_opened", peer.breaker_open_count, label)
    yield Seen("peer_self_test_failing", float(peer.is_self_test_failing), label)
