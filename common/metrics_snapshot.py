"""What is true of a server at one moment, and how Prometheus is told of it.

Knows nothing of messages: whoever scrapes fills a `Snapshot` from what the scheduler answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.metrics_names import COUNTERS, QUEUES

BASE_LABELS = ("model_name", "engine_type")


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages of one group; the four states add up to the pool. Bytes are those of all ranks.

    token_nbytes: 0 for a group of which a request has one page however long it is.
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
    address: str
    is_connected: bool
    in_flight_count: int
    is_breaker_open: bool = False
    breaker_open_count: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is true of a server at one moment. queues, counters: the scheduler's own names."""

    is_up: bool = False
    is_ready: bool = False
    page_size: int = 0
    token_capacity: int = 0
    used_token_count: int = 0
    open_request_count: int = 0
    late_message_count: int = 0
    step_count: int = 0
    queues: dict[str, int] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    pages: Sequence[PageCounts] = ()
    peers: Sequence[PeerGauge] = ()


class SnapshotCollector(Collector):
    """The families that are read off a `Snapshot` at scrape time."""

    def __init__(self, base: list[str]) -> None:
        self.snapshot = Snapshot()
        self.throughput = 0.0
        self._base = base

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        now = self.snapshot
        yield self._gauge("baton:up", "Whether the scheduler answers.", float(now.is_up))
        yield self._gauge("baton:ready", "Whether requests can be served.", float(now.is_ready))
        yield self._gauge(
            "baton:open_requests", "Requests that wait for an answer.", now.open_request_count
        )
        yield self._gauge(
            "sglang:gen_throughput", "Output tokens per second, over a second.", self.throughput
        )
        yield self._counter(
            "baton:late_messages", "Messages for requests already answered.", now.late_message_count
        )
        yield self._counter("baton:engine_steps", "Forward passes.", now.step_count)
        for queue, (name, text) in QUEUES.items():
            yield self._gauge(name, text, now.queues.get(queue, 0))
        for counter, (name, text) in COUNTERS.items():
            yield self._counter(name, text, now.counters.get(counter, 0))
        yield from self._collect_pages(now)
        yield from self._collect_named(now)

    def _collect_pages(self, now: Snapshot) -> Iterator[Metric]:
        pages = self._gauges(
            "baton:pages",
            "Pages by state; the states of a group add up to its pool.",
            "group",
            "state",
        )
        totals = self._gauges("baton:pool_pages", "Pages of a group's pool.", "group")
        page_nbytes = self._gauges(
            "baton:page_bytes", "Bytes of one page of a group, on all ranks together.", "group"
        )
        token_nbytes = self._gauges(
            "baton:token_bytes",
            "Bytes of one token in a group, on all ranks together; 0 if it has one page a request.",
            "group",
        )
        usage = 0.0
        for group in now.pages:
            states = {
                "free": group.free,
                "cached": group.cached,
                "used": group.used,
                "quarantined": group.quarantined,
            }
            for state, count in states.items():
                pages.add_metric([*self._base, group.group, state], count)
            totals.add_metric([*self._base, group.group], group.total)
            page_nbytes.add_metric([*self._base, group.group], group.page_nbytes)
            token_nbytes.add_metric([*self._base, group.group], group.token_nbytes)
            usage = max(usage, (group.used + group.quarantined) / max(1, group.total))
        yield from (pages, totals, page_nbytes, token_nbytes)
        yield self._gauge("sglang:token_usage", "Share of the pool in use, 0 to 1.", usage)
        first = now.pages[0] if now.pages else PageCounts("", 0, 0, 0, 0, 0, 0)
        yield self._gauge(
            "sglang:num_used_tokens",
            "Tokens whose pages are in use.",
            now.used_token_count,
        )
        yield self._gauge(
            "sglang:max_total_num_tokens",
            "Tokens that fit at a time; if all layers have a window, those in the windows.",
            now.token_capacity,
        )
        yield self._gauge("sglang:page_size", "Tokens per page.", now.page_size)
        yield self._gauge("sglang:num_pages", "Pages of the pool.", first.total)
        info = self._gauges(
            "sglang:cache_config_info",
            "1; the labels describe the cache.",
            "page_size",
            "num_pages",
        )
        info.add_metric([*self._base, str(now.page_size), str(first.total)], 1)
        yield info

    def _collect_named(self, now: Snapshot) -> Iterator[Metric]:
        depths = self._gauges("baton:queue_depth", "Requests in each queue, by its name.", "queue")
        for queue, depth in sorted(now.queues.items()):
            depths.add_metric([*self._base, queue], depth)
        yield depths
        events = CounterMetricFamily(
            "baton:events",
            "What the scheduler counts, by its name.",
            labels=(*BASE_LABELS, "event"),
        )
        for event, value in sorted(now.counters.items()):
            events.add_metric([*self._base, event], value)
        yield events
        connected = self._gauges("baton:peer_connected", "Whether a peer can be used.", "peer")
        in_flight = self._gauges(
            "baton:peer_in_flight", "Hand-overs under way with a peer.", "peer"
        )
        open_now = self._gauges(
            "baton:peer_breaker_open", "Whether a peer is left alone after failures.", "peer"
        )
        opened = CounterMetricFamily(
            "baton:peer_breaker_opened",
            "How often a peer was left alone after failures.",
            labels=(*BASE_LABELS, "peer"),
        )
        for peer in now.peers:
            open_now.add_metric([*self._base, peer.address], float(peer.is_breaker_open))
            opened.add_metric([*self._base, peer.address], peer.breaker_open_count)
            connected.add_metric([*self._base, peer.address], float(peer.is_connected))
            in_flight.add_metric([*self._base, peer.address], peer.in_flight_count)
        yield connected
        yield in_flight
        yield open_now
        yield opened

    def _gauges(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=(*BASE_LABELS, *labels))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=BASE_LABELS)
        family.add_metric(self._base, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=BASE_LABELS)
        family.add_metric(self._base, value)
        return family
