"""The measurements of a server: requests and transfers as they end, and their exposition.

Lives in the frontend process. Knows nothing of HTTP, messages or the code that measures: it takes
plain values and `RequestTrace`s. Gauges come as a `Snapshot` at scrape time; events are counted
when they happen.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import repeat

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from common.config import EngineType, MetricsNames
from common.failures import FailureKind
from common.metrics.definitions import Kind, Metric
from common.metrics.exposition import Exposition, Instrument
from common.metrics.instruments import Counter, Histogram
from common.metrics.recorded import CACHED_ON, DEVICE, RECORDED
from common.metrics.snapshot import Snapshot
from common.request import CachedTokens, FinishKind, RequestTrace, TransferTrace

CONTENT_TYPE = CONTENT_TYPE_LATEST
OTHER_PEERS = "other"  # label of all peers beyond the first PEER_COUNT_MAX
PEER_COUNT_MAX = 32  # values of a label: with stages and buckets, some thousand series
INTERVAL_COUNT = 2048  # between tokens, for percentiles of the present, 16 KiB
# How long a peer that is gone is shown: scrapers have seen its last counts by then, and a server
# that was started again under its name goes on with them.
GONE_PEER_KEPT_S = 600.0
HIT_RATE_PROMPT_COUNT = 128  # SGLang's is of one batch; ours of about as many prompts as one has


class ServerMetrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(
        self,
        model_name: str,
        engine_type: EngineType,
        names: MetricsNames = MetricsNames.SGLANG,
    ) -> None:
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in RECORDED:
            self._define(metric)
        instruments: dict[str, Instrument] = {**self._counters, **self._histograms}
        self._instruments_of_peers = [
            one for one in instruments.values() if "peer" in one.label_names
        ]
        self._exposition = Exposition(instruments, model_name, engine_type, names)
        self._registry = CollectorRegistry()
        self._registry.register(self._exposition)
        self._is_prefill = engine_type is EngineType.PREFILL
        self._peers: dict[str, float] = {}
        self._peers_noted_at = math.inf
        self._prompts: deque[tuple[int, int]] = deque(maxlen=HIT_RATE_PROMPT_COUNT)
        self._intervals_s: deque[float] = deque(maxlen=INTERVAL_COUNT)
        self._throughput = 0.0
        self._generated_count = 0
        self._handed_over_nbytes = 0
        self._rate_basis = (0.0, 0)

    def _define(self, metric: Metric) -> None:
        """The instrument of one metric; it has the metric's own labels only."""
        if metric.kind is Kind.HISTOGRAM:
            self._histograms[metric.key] = Histogram(
                metric.key, metric.text, metric.buckets, metric.labels
            )
            return
        counter = Counter(metric.key, metric.text, metric.labels)
        for values in metric.starts_at:
            counter.inc(0, *values)
        self._counters[metric.key] = counter

    # ---- what happened -----------------------------------------------------------------------

    def observe_tokens(
        self,
        token_count: int,
        interval_s: float | None,
        *,
        is_streaming: bool,
        request_count: int = 1,
    ) -> None:
        """New output tokens of each of so many requests, `interval_s` after the tokens before them;
        None for a request's first."""
        all_count = token_count * request_count
        self._generated_count += all_count
        self._counters["output_tokens"].inc(all_count, _flag(is_streaming))
        if interval_s is None or self._is_prefill:
            return
        interval_s /= token_count
        self._histograms["inter_token"].observe(interval_s, count=all_count)
        self._intervals_s.extend(repeat(interval_s, all_count))

    def observe_end(
        self, trace: RequestTrace, *, is_streaming: bool, finish: FinishKind | None = None
    ) -> None:
        """A request of this server's clients has ended. finish: its reason; None: not known.

        A prefill server's clients are routers, which take the first token for themselves. A
        client's waiting time is measured only on the decode server, so that sums over both are
        right.
        """
        flag = _flag(is_streaming)
        self._counters["prompt_tokens"].inc(trace.prompt_token_count, flag)
        self._count_cached(trace.cached)
        if self._is_prefill:
            self.observe_transfer(trace)
        if trace.status != "ok":
            self.observe_failure(trace.status, is_streaming=is_streaming)
            return
        self._counters["requests"].inc(1, flag, str(finish or FinishKind.STOP))
        self._histograms["prompt_length"].observe(trace.prompt_token_count)
        self._histograms["output_length"].observe(trace.output_token_count)
        if not self._is_prefill:
            self._observe_latencies(trace, flag)

    def _observe_latencies(self, trace: RequestTrace, flag: str) -> None:
        waited_s = trace.reserve_s + trace.transfer.queue_s
        self._histograms["e2e"].observe(trace.e2e_s, flag)
        self._histograms["queue_time"].observe(waited_s)
        self._histograms["inference_time"].observe(max(0.0, trace.e2e_s - waited_s))
        if trace.output_token_count > 0:
            self._histograms["ttft"].observe(trace.ttft_s, flag)
            self._observe_stages(trace)
        if trace.output_token_count > 1:
            mean_s = trace.decode_s / (trace.output_token_count - 1)
            self._histograms["per_output_token"].observe(mean_s, flag)

    def observe_failure(self, kind: str, *, is_streaming: bool) -> None:
        """A request ended in an error, or its client gave it up."""
        reason = FinishKind.ABORT if kind == FailureKind.ABORTED else "error"
        self._counters["requests"].inc(1, _flag(is_streaming), str(reason))
        if reason is not FinishKind.ABORT:
            self._counters["failed"].inc(1, kind)

    def observe_transfer(self, trace: RequestTrace) -> None:
        """A transfer that this prefill server has sent has ended."""
        transfer, peer = trace.transfer, self._peer(trace.peer)
        if trace.status == "ok" and _is_transferred(trace):
            self._histograms["queue_time"].observe(transfer.queue_s)
            self._histograms["bootstrap_ms"].observe(trace.reserve_s * 1e3)
            stages = self._histograms["per_stage"]
            stages.observe(trace.reserve_s, "prefill_bootstrap")
            stages.observe(transfer.prefill_s, "prefill_forward")
            stages.observe(transfer.transfer_s, "prefill_transfer_kv_cache")
            self._histograms["wire_ms"].observe(transfer.wire_s * 1e3)
            self._histograms["size_mb"].observe(transfer.nbytes / 1e6)
            if transfer.wire_s > 0:
                speed = transfer.nbytes / 1e9 / transfer.wire_s
                self._histograms["speed_gb_s"].observe(speed, peer)
            self._note_prompt(trace)
        self._count_transfer(transfer, peer)

    def _observe_stages(self, trace: RequestTrace) -> None:
        transfer, peer = trace.transfer, self._peer(trace.peer)
        for stage, seconds in (
            ("reserve", trace.reserve_s),
            ("queue", transfer.queue_s),
            ("prefill", transfer.prefill_s),
            ("transfer", transfer.transfer_s),
            ("first_token", trace.first_token_s),
            ("decode", trace.decode_s),
        ):
            self._histograms["stage"].observe(seconds, stage, peer)
        self._note_prompt(trace)
        if _is_transferred(trace):
            stages = self._histograms["per_stage"]
            stages.observe(trace.reserve_s, "decode_bootstrap")
            stages.observe(trace.ttft_s - trace.reserve_s, "decode_transferred")
            self._histograms["alloc_ms"].observe(trace.reserve_s * 1e3)
            self._count_transfer(transfer, peer)

    def _count_transfer(self, transfer: TransferTrace, peer: str) -> None:
        self._handed_over_nbytes += transfer.nbytes
        self._counters["transfer_bytes"].inc(transfer.nbytes, peer)
        self._counters["exposed_bytes"].inc(transfer.exposed_nbytes)
        self._counters["transfer_runs"].inc(transfer.run_count)

    def _count_cached(self, cached: CachedTokens) -> None:
        """Both servers count from a prompt's beginning, so the smaller part is what both had."""
        both = min(cached.prefill, cached.decode)
        counts = (cached.prefill - both, cached.decode - both, both)
        for server, count in zip(CACHED_ON, counts, strict=True):
            self._counters["cached_tokens"].inc(count, DEVICE, server)

    def _note_prompt(self, trace: RequestTrace) -> None:
        self._prompts.append((trace.cached.count, trace.prompt_token_count))

    def _peer(self, peer: str) -> str:
        """The label of a peer; clients can name peers, so their number is bounded."""
        if peer not in self._peers and len(self._peers) >= PEER_COUNT_MAX:
            return OTHER_PEERS
        self._peers[peer] = self._peers_noted_at
        return peer

    def note_peers(self, known: Iterable[str], now: float) -> None:
        """The peers that there are. One that has been gone for long has no series any more."""
        self._peers_noted_at = now
        present = {"", *known}  # what this server computes itself is of no peer
        for peer, at in list(self._peers.items()):
            seen_at = now if peer in present else min(at, now)
            self._peers[peer] = seen_at
            if now > seen_at + GONE_PEER_KEPT_S:
                del self._peers[peer]
                for instrument in self._instruments_of_peers:
                    instrument.retire("peer", peer)

    # ---- what is -----------------------------------------------------------------------------

    def measure_rate(self, now: float) -> None:
        """Called at a steady pace: the output rate since the call before becomes gen_throughput."""
        before, count = self._rate_basis
        if now > before:
            self._throughput = (self._generated_count - count) / (now - before)
        self._rate_basis = (now, self._generated_count)

    @property
    def throughput(self) -> float:
        """Output tokens per second, as measured last."""
        return self._throughput

    @property
    def intervals_s(self) -> list[float]:
        """Between tokens of requests, the latest INTERVAL_COUNT."""
        return list(self._intervals_s)

    @property
    def handed_over_nbytes(self) -> int:
        """Cache bytes sent or received since start."""
        return self._handed_over_nbytes

    @property
    def hit_rate(self) -> float:
        """Share of the latest prompts' tokens whose cache was there already."""
        return sum(hit for hit, _ in self._prompts) / max(1, sum(all_ for _, all_ in self._prompts))

    def expose(self, snapshot: Snapshot) -> bytes:
        """The whole exposition, with the gauges of `snapshot`."""
        self._exposition.snapshot = snapshot
        return generate_latest(self._registry)


def _is_transferred(trace: RequestTrace) -> bool:
    """Also of no bytes: a decode server may have the cache of a whole prompt."""
    return trace.peer != "" or trace.transfer.nbytes > 0


def _flag(is_set: bool) -> str:
    return "true" if is_set else "false"
