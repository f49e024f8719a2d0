"""What a server measures, in Prometheus' terms. Names, types and base labels follow SGLang's.

With `metrics_snapshot.py` the only importer of prometheus_client. Knows nothing of HTTP, messages
or who measured: it takes plain values and `RequestTrace`s, and lives in the frontend process.
What is true *now* comes as a `Snapshot` at scrape time; what happened is counted when it happens.
The `sglang:` names keep dashboards and routers working unchanged; what only this server has is
called `baton:`.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from common.config import EngineType
from common.metrics_names import (
    E2E_BUCKETS,
    INTER_TOKEN_BUCKETS,
    STAGE_BUCKETS,
    TOKEN_COUNT_BUCKETS,
    TRANSFER_MB_BUCKETS,
    TRANSFER_MS_BUCKETS,
    TRANSFER_SPEED_BUCKETS,
    TTFT_BUCKETS,
)
from common.metrics_snapshot import BASE_LABELS, Snapshot, SnapshotCollector
from common.request import HandOverTrace, RequestTrace

CONTENT_TYPE = CONTENT_TYPE_LATEST


class ServerMetrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str, engine_type: EngineType) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine_type": str(engine_type)}
        self._is_prefill = engine_type is EngineType.PREFILL
        self._now = SnapshotCollector(list(self._labels.values()))
        self._registry.register(self._now)
        self._generated_count = 0
        self._rate_basis = (0.0, 0)
        self._define_latencies()
        self._define_counters()
        self._define_hand_over()

    def _define_latencies(self) -> None:
        self._ttft = self._histogram(
            "sglang:time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            TTFT_BUCKETS,
            "is_streaming",
        )
        self._itl = self._histogram(
            "sglang:inter_token_latency_seconds",
            "Between two output tokens of a request; tokens that came together share their time.",
            INTER_TOKEN_BUCKETS,
        )
        self._tpot = self._histogram(
            "sglang:request_time_per_output_token_seconds",
            "Mean time per output token after a request's first.",
            INTER_TOKEN_BUCKETS,
            "is_streaming",
        )
        self._e2e = self._histogram(
            "sglang:e2e_request_latency_seconds",
            "From a request's arrival to its last token.",
            E2E_BUCKETS,
            "is_streaming",
        )
        self._queue_time = self._histogram(
            "sglang:queue_time_seconds",
            "Time in which a request waited for pages or for its turn to be computed.",
            TTFT_BUCKETS,
        )
        self._per_stage = self._histogram(
            "sglang:per_stage_req_latency_seconds",
            "Time in a stage that this server's engine or transport works in.",
            STAGE_BUCKETS,
            "stage",
        )
        self._prompt_lengths = self._histogram(
            "sglang:prompt_tokens_histogram", "Prompt tokens of a request.", TOKEN_COUNT_BUCKETS
        )
        self._output_lengths = self._histogram(
            "sglang:generation_tokens_histogram", "Output tokens of a request.", TOKEN_COUNT_BUCKETS
        )

    def _define_counters(self) -> None:
        self._requests = self._counter(
            "sglang:num_requests_total", "Requests that have ended.", "is_streaming"
        )
        self._aborted = self._counter(
            "sglang:num_aborted_requests_total", "Requests that their clients gave up."
        )
        self._failed = self._counter(
            "baton:failed_requests_total", "Requests that ended in an error, by its kind.", "kind"
        )
        self._prompt_tokens = self._counter(
            "sglang:prompt_tokens_total", "Prompt tokens of ended requests.", "is_streaming"
        )
        self._output_tokens = self._counter(
            "sglang:generation_tokens_total", "Output tokens, counted as they come.", "is_streaming"
        )
        self._cached_tokens = self._counter(
            "sglang:cached_tokens_total",
            "Prompt tokens whose cache was there already.",
            "cache_source",
        )

    def _define_hand_over(self) -> None:
        self._stages = self._histogram(
            "baton:hand_over_stage_seconds",
            "Parts of the time to first token, one after another: they add up to it.",
            STAGE_BUCKETS,
            "stage",
        )
        self._transfer_ms = self._histogram(
            "sglang:kv_transfer_latency_ms",
            "Time in which bytes of a hand-over were on the wire, in ms (sending server).",
            TRANSFER_MS_BUCKETS,
        )
        self._transfer_mb = self._histogram(
            "sglang:kv_transfer_total_mb",
            "Size of a hand-over in 10^6 bytes (sending server).",
            TRANSFER_MB_BUCKETS,
        )
        self._transfer_speed = self._histogram(
            "sglang:kv_transfer_speed_gb_s",
            "Bytes of a hand-over over its time on the wire, in 10^9 per second (sending server).",
            TRANSFER_SPEED_BUCKETS,
        )
        self._alloc_ms = self._histogram(
            "sglang:kv_transfer_alloc_ms",
            "From a request's arrival until its pages were reserved, in ms (receiving server).",
            TRANSFER_MS_BUCKETS,
        )
        self._hand_over_nbytes = self._counter(
            "baton:hand_over_bytes_total", "Cache bytes sent (prefill) or received (decode)."
        )
        self._hand_over_exposed_nbytes = self._counter(
            "baton:hand_over_exposed_bytes_total",
            "Those of them that were still to move when the last layer was computed.",
        )
        self._hand_over_runs = self._counter(
            "baton:hand_over_runs_total", "Contiguous runs that those bytes went in."
        )

    # ---- what happened -----------------------------------------------------------------------

    def observe_tokens(
        self, token_count: int, interval_s: float | None, *, is_streaming: bool
    ) -> None:
        """Output tokens came, `interval_s` after the ones before; None for a request's first."""
        self._generated_count += token_count
        self._output_tokens.labels(**self._labels, is_streaming=_flag(is_streaming)).inc(
            token_count
        )
        if interval_s is None or self._is_prefill:
            return
        itl = self._itl.labels(**self._labels)
        for _ in range(token_count):
            itl.observe(interval_s / token_count)

    def observe_end(self, trace: RequestTrace, *, is_streaming: bool) -> None:
        """A request of this server's clients has ended, well or not.

        A prefill server's clients are routers, which take the first token for themselves; what a
        client waits for is measured on the decode server alone, so that sums over both are right.
        """
        labels = {**self._labels, "is_streaming": _flag(is_streaming)}
        self._requests.labels(**labels).inc()
        self._prompt_tokens.labels(**labels).inc(trace.prompt_token_count)
        self._cached_tokens.labels(**self._labels, cache_source="device").inc(
            trace.cached_token_count
        )
        if self._is_prefill:
            self.observe_hand_over(trace)
        if trace.status != "ok":
            self._count_failure(trace.status)
            return
        self._prompt_lengths.labels(**self._labels).observe(trace.prompt_token_count)
        self._output_lengths.labels(**self._labels).observe(trace.output_token_count)
        if self._is_prefill:
            return
        self._e2e.labels(**labels).observe(trace.e2e_s)
        self._queue_time.labels(**self._labels).observe(trace.reserve_s + trace.hand_over.queue_s)
        if trace.output_token_count > 0:
            self._ttft.labels(**labels).observe(trace.ttft_s)
            self._observe_stages(trace)
        if trace.output_token_count > 1:
            self._tpot.labels(**labels).observe(trace.decode_s / (trace.output_token_count - 1))

    def observe_failure(self, kind: str, *, is_streaming: bool) -> None:
        """A request ended in an error before there was anything to trace."""
        self._requests.labels(**self._labels, is_streaming=_flag(is_streaming)).inc()
        self._count_failure(kind)

    def observe_hand_over(self, trace: RequestTrace) -> None:
        """A hand-over that this prefill server has sent has ended."""
        hand_over = trace.hand_over
        if trace.status == "ok" and hand_over.nbytes:
            self._queue_time.labels(**self._labels).observe(hand_over.queue_s)
            stage = self._per_stage
            stage.labels(**self._labels, stage="prefill_forward").observe(hand_over.prefill_s)
            stage.labels(**self._labels, stage="prefill_transfer_kv_cache").observe(
                hand_over.transfer_s
            )
            self._transfer_ms.labels(**self._labels).observe(hand_over.wire_s * 1e3)
            self._transfer_mb.labels(**self._labels).observe(hand_over.nbytes / 1e6)
            if hand_over.wire_s > 0:
                speed = hand_over.nbytes / 1e9 / hand_over.wire_s
                self._transfer_speed.labels(**self._labels).observe(speed)
        self._count_hand_over(hand_over)

    def _observe_stages(self, trace: RequestTrace) -> None:
        hand_over = trace.hand_over
        for stage, seconds in (
            ("reserve", trace.reserve_s),
            ("queue", hand_over.queue_s),
            ("prefill", hand_over.prefill_s),
            ("transfer", hand_over.transfer_s),
            ("first_token", trace.first_token_s),
        ):
            self._stages.labels(**self._labels, stage=stage).observe(seconds)
        if hand_over.nbytes:
            self._alloc_ms.labels(**self._labels).observe(trace.reserve_s * 1e3)
            self._count_hand_over(hand_over)

    def _count_hand_over(self, hand_over: HandOverTrace) -> None:
        self._hand_over_nbytes.labels(**self._labels).inc(hand_over.nbytes)
        self._hand_over_exposed_nbytes.labels(**self._labels).inc(hand_over.exposed_nbytes)
        self._hand_over_runs.labels(**self._labels).inc(hand_over.run_count)

    def _count_failure(self, kind: str) -> None:
        if kind == "aborted":
            self._aborted.labels(**self._labels).inc()
        else:
            self._failed.labels(**self._labels, kind=kind).inc()

    # ---- what is -----------------------------------------------------------------------------

    def measure_rate(self, now: float) -> None:
        """Called at a steady pace: the output rate since the call before becomes gen_throughput."""
        before, count = self._rate_basis
        if now > before:
            self._now.throughput = (self._generated_count - count) / (now - before)
        self._rate_basis = (now, self._generated_count)

    @property
    def throughput(self) -> float:
        """Output tokens per second, as measured last."""
        return self._now.throughput

    def expose(self, snapshot: Snapshot) -> bytes:
        """The whole exposition, with `snapshot` as what is true now."""
        self._now.snapshot = snapshot
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(
            name, text, (*BASE_LABELS, *labels), registry=self._registry, buckets=buckets
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        """A series whose labels are known beforehand starts at 0, so that a dashboard finds it and
        a rate over the first event is right."""
        counter = Counter(name, text, (*BASE_LABELS, *labels), registry=self._registry)
        if not labels:
            counter.labels(**self._labels)
        elif labels == ("is_streaming",):
            for flag in ("true", "false"):
                counter.labels(**self._labels, is_streaming=flag)
        return counter


def _flag(is_set: bool) -> str:
    return "true" if is_set else "false"
