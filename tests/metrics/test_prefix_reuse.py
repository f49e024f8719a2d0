"""What was not computed or not sent, as metrics tell of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from common.config import EngineType, MetricsNames
from common.metrics.server import ServerMetrics
from common.metrics.snapshot import PrefixCounts, Snapshot
from common.request import CachedTokens, FinishKind, RequestTrace, TransferTrace

ENDED = RequestTrace(
    request_id=1,
    peer="p:1",
    prompt_token_count=100,
    output_token_count=3,
    transfer=TransferTrace(queue_s=1, prefill_s=2, transfer_s=3, wire_s=1, nbytes=10),
    e2e_s=10,
)
NOTHING = Snapshot()
SERVERS = ("prefill", "decode", "both")
# What a scheduler counts -> what /metrics shows.
COUNTED = {
    "waited_for_equal": "baton:waited_for_equal_prompts_total",
    "local_prefills": "baton:local_prefills_total",
    "transfer_tokens_spared": "baton:transfer_tokens_spared_total",
    "transfer_nbytes_spared": "baton:transfer_bytes_spared_total",
    "prefix_evicted_tokens": "baton:prefix_evicted_tokens_total",
    "checkpoints_made": "baton:checkpoints_made_total",
    "checkpoints_used": "baton:checkpoints_used_total",
    "checkpoints_evicted": "baton:checkpoints_evicted_total",
}


def ended(prefill: int, decode: int, status: str = "ok") -> RequestTrace:
    return structs.replace(ENDED, cached=CachedTokens(prefill, decode), status=status)


def values(metrics: ServerMetrics, snapshot: Snapshot = NOTHING) -> dict[str, float]:
    """name or name{server} -> value, over all other labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.expose(snapshot).decode()):
        for sample in family.samples:
            server = sample.labels.get("server")
            name = sample.name if server is None else f"{sample.name}{{{server}}}"
            found[name] = found.get(name, 0.0) + sample.value
    return found


def decode_metrics() -> ServerMetrics:
    return ServerMetrics("tiny", EngineType.DECODE, MetricsNames.BOTH)


def test_cached_tokens_are_counted_once_and_by_who_had_them() -> None:
    metrics = decode_metrics()
    for trace in (ended(48, 32), ended(0, 16), ended(64, 0), ended(16, 80)):
        metrics.observe_end(trace, is_streaming=False, finish=FinishKind.STOP)
    found = values(metrics)
    servers = [found[f"baton:cached_tokens_total{{{one}}}"] for one in SERVERS]
    assert servers == [16 + 64, 16 + 64, 32 + 16]
    for name in ("sglang:cached_tokens_total", "vllm:prefix_cache_hits_total"):
        assert found[name] == sum(servers) == 48 + 16 + 64 + 80


def test_who_had_them_is_known_before_the_first_request() -> None:
    found = values(decode_metrics())
    assert [found[f"baton:cached_tokens_total{{{one}}}"] for one in SERVERS] == [0, 0, 0]


parts = st.integers(0, ENDED.prompt_token_count)


@settings(deadline=None)
@given(
    traces=st.lists(
        st.builds(ended, parts, parts, st.sampled_from(["ok", "aborted", "timed_out"]))
    ),
    kind=st.sampled_from(EngineType),
)
def test_hits_are_never_more_than_queries(traces: list[RequestTrace], kind: EngineType) -> None:
    metrics = ServerMetrics("tiny", kind, MetricsNames.BOTH)
    for trace in traces:
        metrics.observe_end(trace, is_streaming=False, finish=FinishKind.STOP)
    found = values(metrics)
    asked = found["vllm:prefix_cache_queries_total"]
    assert found["vllm:prefix_cache_hits_total"] <= asked == 100 * len(traces)
    assert found["sglang:cached_tokens_total"] == found["vllm:prefix_cache_hits_total"]
    assert 0 <= metrics.hit_rate <= 1


@pytest.mark.parametrize("kind", [EngineType.PREFILL, EngineType.DECODE])
def test_a_transfer_that_had_nothing_left_to_send_is_measured_too(kind: EngineType) -> None:
    """A decode server may have the cache of a whole prompt."""
    metrics = ServerMetrics("tiny", kind, MetricsNames.BOTH)
    spared = structs.replace(
        ended(100, 100), transfer=TransferTrace(queue_s=1, cached_token_count=100)
    )
    metrics.observe_end(spared, is_streaming=False, finish=FinishKind.LENGTH)
    found = values(metrics)
    mode = "bootstrap" if kind is EngineType.PREFILL else "alloc"
    assert found[f"sglang:kv_transfer_{mode}_ms_count"] == 1
    assert found["baton:transfer_bytes_total"] == 0
    assert metrics.hit_rate == 1


def test_a_prompt_that_was_computed_where_it_is_needed_is_no_transfer() -> None:
    metrics = decode_metrics()
    here = structs.replace(ended(0, 96), peer="", transfer=TransferTrace(prefill_s=1))
    metrics.observe_end(here, is_streaming=False, finish=FinishKind.LENGTH)
    assert values(metrics)["sglang:kv_transfer_alloc_ms_count"] == 0
    assert metrics.hit_rate == 96 / 100


def test_what_the_scheduler_counts_and_keeps_has_a_metric_each() -> None:
    counters = {name: float(number) for number, name in enumerate(COUNTED, 1)}
    kept = PrefixCounts(token_count=960, node_count=7, checkpoint_count=2, checkpoint_max=8)
    found = values(decode_metrics(), Snapshot(counters=counters, prefixes=kept))
    assert {name: found[shown] for name, shown in COUNTED.items()} == counters
    assert found["baton:prefix_cache_tokens"] == 960 and found["baton:prefix_cache_nodes"] == 7
    assert (found["baton:checkpoints"], found["baton:checkpoint_max"]) == (2, 8)
