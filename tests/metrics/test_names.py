"""One measurement, several names: what is counted once shows alike under SGLang's and vLLM's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.config import EngineType, MetricsNames
from common.metrics.recorded import RECORDED
from common.metrics.seen import COUNTERS, QUEUES, SEEN
from common.metrics.server import (
    GONE_PEER_KEPT_S,
    OTHER_PEERS,
    PEER_COUNT_MAX,
    ServerMetrics,
)
from common.metrics.snapshot import PageCounts, PeerGauge, Snapshot
from common.request import CachedTokens, FinishKind, RequestTrace, TransferTrace

# What the published dashboards ask for, as Prometheus stores it.
SGLANG_DASHBOARD = (
    "sglang:e2e_request_latency_seconds_bucket",
    "sglang:e2e_request_latency_seconds_sum",
    "sglang:e2e_request_latency_seconds_count",
    "sglang:time_to_first_token_seconds_bucket",
    "sglang:time_to_first_token_seconds_sum",
    "sglang:time_to_first_token_seconds_count",
    "sglang:num_running_reqs",
    "sglang:gen_throughput",
    "sglang:cache_hit_rate",
    "sglang:num_queue_reqs",
)
VLLM_DASHBOARD = (
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_inference_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_bucket",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
)
SNAPSHOT = Snapshot(
    is_up=True,
    page_size=16,
    queues={"running": 3, "waiting": 2},
    counters={"retracted": 4.0, "retried": 5.0},
    pages=[PageCounts("full", 64.0, 1024, free=6, cached=1, used=2, quarantined=1)],
    peers=[PeerGauge("p:1", True, 1, is_self_test_failing=True)],
    hit_rate=0.25,
)

Samples = dict[str, list[tuple[dict[str, str], float]]]


def trace(output_count: int = 3, peer: str = "p:1", status: str = "ok") -> RequestTrace:
    """1 s reserved, 2 queued, 3 computed, 4 transferred, 5 until the first token, 6 decoded."""
    transfer = TransferTrace(queue_s=2, prefill_s=3, transfer_s=4, nbytes=100, cached_token_count=8)
    return RequestTrace(
        request_id=1,
        peer=peer,
        status=status,
        prompt_token_count=32,
        output_token_count=output_count,
        cached=CachedTokens(prefill=8),
        reserve_s=1,
        transfer=transfer,
        first_token_s=5,
        ttft_s=15,
        decode_s=6,
        e2e_s=21,
    )


def measured(names: MetricsNames) -> tuple[ServerMetrics, Samples]:
    """A decode server's metrics after four requests."""
    metrics = ServerMetrics("tiny", EngineType.DECODE, names)
    metrics.observe_tokens(1, None, is_streaming=True)
    metrics.observe_tokens(2, 3.0, is_streaming=True)
    metrics.observe_end(trace(), is_streaming=True, finish=FinishKind.LENGTH)
    metrics.observe_end(trace(), is_streaming=False, finish=FinishKind.STOP)
    metrics.observe_end(trace(status="aborted"), is_streaming=False)
    metrics.observe_failure("queue_full", is_streaming=False)
    return metrics, exposed(metrics)


def exposed(metrics: ServerMetrics) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(metrics.expose(SNAPSHOT).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def one(samples: Samples, name: str, **labels: str) -> float:
    (value,) = [v for found, v in samples[name] if labels.items() <= found.items()]
    return value


@pytest.mark.parametrize(
    ("names", "families"),
    [
        (MetricsNames.SGLANG, {"baton", "sglang"}),
        (MetricsNames.VLLM, {"baton", "vllm"}),
        (MetricsNames.BOTH, {"baton", "sglang", "vllm"}),
    ],
)
def test_only_the_names_that_were_asked_for_are_shown(
    names: MetricsNames, families: set[str]
) -> None:
    _, samples = measured(names)
    assert {name.partition(":")[0] for name in samples} == families


def test_the_published_dashboards_find_every_name() -> None:
    _, samples = measured(MetricsNames.BOTH)
    missing = [name for name in (*SGLANG_DASHBOARD, *VLLM_DASHBOARD) if not samples.get(name)]
    assert missing == []


def test_what_ended_is_told_in_each_server_s_words() -> None:
    _, samples = measured(MetricsNames.BOTH)
    assert one(samples, "sglang:num_requests_total", is_streaming="true") == 1
    assert one(samples, "sglang:num_requests_total", is_streaming="false") == 3
    assert one(samples, "sglang:num_aborted_requests_total") == 1
    reasons = {
        labels["finished_reason"]: value for labels, value in samples["vllm:request_success_total"]
    }
    assert reasons == {"stop": 1, "length": 1, "abort": 1, "error": 1}
    assert one(samples, "baton:failed_requests_total", kind="queue_full") == 1


def test_a_view_sums_over_the_labels_it_leaves_out() -> None:
    _, samples = measured(MetricsNames.BOTH)
    for suffix, value in (("_count", 2), ("_sum", 30)):
        halves = [v for _, v in samples[f"sglang:time_to_first_token_seconds{suffix}"]]
        assert sum(halves) == one(samples, f"vllm:time_to_first_token_seconds{suffix}") == value
    bucket = "vllm:time_to_first_token_seconds_bucket"
    assert one(samples, bucket, le="20.0") == 2 and one(samples, bucket, le="10.0") == 0
    assert one(samples, "vllm:request_prefill_time_seconds_sum") == 6
    assert one(samples, "vllm:request_decode_time_seconds_sum") == 12
    assert one(samples, "vllm:request_queue_time_seconds_sum") == 6
    assert one(samples, "vllm:request_inference_time_seconds_sum") == 2 * (21 - 3)


def test_state_has_the_same_value_under_all_names() -> None:
    _, samples = measured(MetricsNames.BOTH)
    for sglang, vllm, value in (
        ("num_running_reqs", "num_requests_running", 3),
        ("num_queue_reqs", "num_requests_waiting", 2),
        ("token_usage", "kv_cache_usage_perc", 0.3),
        ("num_retracted_requests_total", "num_preemptions_total", 4),
        ("cached_tokens_total", "prefix_cache_hits_total", 24),
    ):
        assert one(samples, f"sglang:{sglang}") == one(samples, f"vllm:{vllm}") == value
    assert one(samples, "vllm:prefix_cache_queries_total") == 3 * 32
    assert one(samples, "vllm:cache_config_info", block_size="16", num_gpu_blocks="10") == 1
    assert one(samples, "sglang:cache_config_info", page_size="16", num_pages="10") == 1
    assert one(samples, "sglang:cache_hit_rate") == 0.25
    assert one(samples, "baton:transfer_retries_total") == 5
    assert one(samples, "baton:peer_self_test_failing", peer="p:1") == 1


def test_stages_are_told_per_peer_and_of_so_many_peers_only() -> None:
    metrics, samples = measured(MetricsNames.SGLANG)
    stages = {labels["stage"] for labels, _ in samples["baton:transfer_stage_seconds_sum"]}
    assert stages == {"reserve", "queue", "prefill", "transfer", "first_token", "decode"}
    for number in range(2, PEER_COUNT_MAX + 10):
        metrics.observe_end(trace(peer=f"p:{number}"), is_streaming=False)
    samples = exposed(metrics)
    peers = {labels["peer"] for labels, _ in samples["baton:transfer_stage_seconds_sum"]}
    assert len(peers) == PEER_COUNT_MAX + 1 and OTHER_PEERS in peers
    assert one(samples, "baton:peer_transfer_bytes_total", peer=OTHER_PEERS) == 900
    assert one(samples, "baton:transfer_bytes_total") == 100 * (PEER_COUNT_MAX + 10)


def peers_of(samples: Samples, name: str) -> set[str]:
    return {labels["peer"] for labels, _ in samples.get(name, [])}


def test_a_peer_that_is_gone_is_shown_for_a_while_and_stays_in_the_sums() -> None:
    metrics, _ = measured(MetricsNames.BOTH)
    metrics.observe_end(trace(peer="p:2"), is_streaming=False)
    metrics.observe_end(trace(peer=""), is_streaming=False)  # computed on this server itself
    metrics.note_peers(["p:1", "p:2"], now=1000.0)
    metrics.note_peers(["p:2"], now=1000.0 + GONE_PEER_KEPT_S)
    assert peers_of(exposed(metrics), "baton:peer_transfer_bytes_total") == {"p:1", "p:2", ""}
    metrics.note_peers(["p:2"], now=1001.0 + GONE_PEER_KEPT_S)
    samples = exposed(metrics)
    for name in ("peer_transfer_bytes_total", "transfer_stage_seconds_sum"):
        assert peers_of(samples, f"baton:{name}") == {"p:2", ""}
    assert one(samples, "baton:transfer_bytes_total") == 400
    assert one(samples, "vllm:request_decode_time_seconds_sum") == 24
    assert one(samples, "vllm:request_decode_time_seconds_bucket", le="10.0") == 4
    metrics.observe_end(trace(), is_streaming=False)
    samples = exposed(metrics)
    assert one(samples, "baton:peer_transfer_bytes_total", peer="p:1") == 100
    assert one(samples, "baton:transfer_bytes_total") == 500


def test_peers_that_come_and_go_are_all_told_apart() -> None:
    """As pods do, each of which has an address of its own."""
    metrics = ServerMetrics("tiny", EngineType.DECODE)
    for number in range(3 * PEER_COUNT_MAX):
        now = number * GONE_PEER_KEPT_S
        metrics.note_peers([f"p:{number}"], now)
        metrics.observe_end(trace(peer=f"p:{number}"), is_streaming=False)
        peers = peers_of(exposed(metrics), "baton:peer_transfer_bytes_total")
        assert f"p:{number}" in peers and len(peers) <= 3
    assert one(exposed(metrics), "baton:transfer_bytes_total") == 300 * PEER_COUNT_MAX


def test_a_peer_is_counted_also_before_anybody_has_said_which_there_are() -> None:
    metrics, _ = measured(MetricsNames.SGLANG)
    metrics.note_peers([], now=1000.0)
    assert peers_of(exposed(metrics), "baton:peer_transfer_bytes_total") == {"p:1"}
    metrics.note_peers([], now=1001.0 + GONE_PEER_KEPT_S)
    assert peers_of(exposed(metrics), "baton:peer_transfer_bytes_total") == set()


def test_the_hit_rate_is_of_prompts_that_were_computed() -> None:
    metrics, _ = measured(MetricsNames.SGLANG)
    assert metrics.hit_rate == 8 / 32
    assert ServerMetrics("tiny", EngineType.DECODE).hit_rate == 0


def test_no_two_metrics_share_a_key_or_a_name() -> None:
    for table in (RECORDED, SEEN, QUEUES, COUNTERS):
        assert len({metric.key for metric in table}) == len(table)
    names = [v.name for m in (*RECORDED, *SEEN, *QUEUES, *COUNTERS) for v in m.views]
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_the_reference_is_what_the_table_says() -> None:
    root = Path(__file__).parents[2]
    printed = subprocess.run(
        [sys.executable, "-m", "common.metrics.reference"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    told = (root / "deploy" / "METRICS.md").read_text()
    assert told == printed, "python -m common.metrics.reference > deploy/METRICS.md"


def test_requests_of_one_pace_count_together_as_they_do_one_by_one() -> None:
    together = ServerMetrics("tiny", EngineType.DECODE, MetricsNames.SGLANG)
    apart = ServerMetrics("tiny", EngineType.DECODE, MetricsNames.SGLANG)
    for interval_s in (None, 0.25):
        together.observe_tokens(2, interval_s, is_streaming=True, request_count=3)
        for _ in range(3):
            apart.observe_tokens(2, interval_s, is_streaming=True)
    assert exposed(together) == exposed(apart)
    assert together.intervals_s == apart.intervals_s == [0.125] * 6
    for metrics in (together, apart):
        metrics.measure_rate(1.0)
    assert together.throughput == apart.throughput == 12.0
