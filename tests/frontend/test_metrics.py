"""What /metrics shows: SGLang's names and types, stages that add up, gauges of the moment."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from common.clock import ManualClock
from common.config import Role
from common.metrics.server import GONE_PEER_KEPT_S
from common.protocol.frontend import Failed, Outputs, Tokens, Traced
from common.request import RequestTrace, SamplingParams, TransferTrace
from tests.frontend.frontend_rig import Rig, run_with_rig
from tests.frontend.scripted_scheduler import PEER, ScriptedScheduler, count_up, trace_of

Families = dict[str, Metric]

EXPECTED_TYPES = {
    "sglang:time_to_first_token_seconds": "histogram",
    "sglang:inter_token_latency_seconds": "histogram",
    "sglang:request_time_per_output_token_seconds": "histogram",
    "sglang:e2e_request_latency_seconds": "histogram",
    "sglang:queue_time_seconds": "histogram",
    "sglang:per_stage_req_latency_seconds": "histogram",
    "sglang:prompt_tokens_histogram": "histogram",
    "sglang:generation_tokens_histogram": "histogram",
    "sglang:kv_transfer_latency_ms": "histogram",
    "sglang:kv_transfer_total_mb": "histogram",
    "sglang:kv_transfer_speed_gb_s": "histogram",
    "sglang:kv_transfer_alloc_ms": "histogram",
    "sglang:prompt_tokens": "counter",
    "sglang:generation_tokens": "counter",
    "sglang:cached_tokens": "counter",
    "sglang:num_requests": "counter",
    "sglang:num_aborted_requests": "counter",
    "sglang:num_retracted_requests": "counter",
    "sglang:num_transfer_failed_reqs": "counter",
    "sglang:num_bootstrap_failed_reqs": "counter",
    "sglang:num_running_reqs": "gauge",
    "sglang:num_queue_reqs": "gauge",
    "sglang:num_used_tokens": "gauge",
    "sglang:token_usage": "gauge",
    "sglang:gen_throughput": "gauge",
    "sglang:max_total_num_tokens": "gauge",
    "sglang:cache_config_info": "gauge",
    "sglang:num_prefill_bootstrap_queue_reqs": "gauge",
    "sglang:num_prefill_inflight_queue_reqs": "gauge",
    "sglang:num_decode_prealloc_queue_reqs": "gauge",
    "sglang:num_decode_transfer_queue_reqs": "gauge",
    "baton:transfer_stage_seconds": "histogram",
    "baton:pages": "gauge",
    "baton:pool_pages": "gauge",
    "baton:page_bytes": "gauge",
    "baton:token_bytes": "gauge",
    "baton:queue_depth": "gauge",
    "baton:peer_connected": "gauge",
    "baton:up": "gauge",
}


async def scrape(http: httpx.AsyncClient) -> Families:
    text = (await http.get("/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: Families, sample: str, **labels: str) -> float:
    """The one sample of that name with at least these labels."""
    found = [
        s.value
        for family in families.values()
        for s in family.samples
        if s.name == sample and labels.items() <= s.labels.items()
    ]
    assert len(found) == 1, (sample, labels, found)
    return found[0]


async def generate(rig: Rig, count: int, *, is_streaming: bool = False, rid: str = "r") -> None:
    sampling = SamplingParams(max_new_tokens=count, seed=0)
    with rig.context.submit([3, 4, 5], sampling, rid=rid, is_streaming=is_streaming) as handle:
        async for _ in handle:
            pass


def test_every_metric_has_its_name_type_help_and_base_labels(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await generate(rig, 3)
        families = await scrape(rig.http)
        assert {n: families[n].type for n in EXPECTED_TYPES if n in families} == EXPECTED_TYPES
        for name, family in families.items():
            assert family.documentation.endswith("."), name
            for sample in family.samples:
                assert sample.labels["model_name"] == "tiny", name
                assert sample.labels["engine_type"] == "decode", name

    run_with_rig(tmp_path, story)


def test_the_exposition_is_text_for_get_and_headers_alone_for_head(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        got = await rig.http.get("/metrics")
        head = await rig.http.head("/metrics")
        assert got.headers["content-type"].startswith("text/plain; version=")
        assert got.text.endswith("\n") and got.status_code == head.status_code == 200

    run_with_rig(tmp_path, story)


def test_the_stages_of_a_transfer_add_up_to_the_time_to_first_token(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for index in range(3):
            await generate(rig, 2, rid=f"r{index}")
        families = await scrape(rig.http)
        sums = {
            stage: value(families, "baton:transfer_stage_seconds_sum", stage=stage)
            for stage in ("reserve", "queue", "prefill", "transfer", "first_token")
        }
        assert sums == pytest.approx(
            {
                "reserve": 0.003,
                "queue": 0.006,
                "prefill": 0.012,
                "transfer": 0.024,
                "first_token": 0.048,
            }
        )
        ttft = value(families, "sglang:time_to_first_token_seconds_sum", is_streaming="false")
        assert sum(sums.values()) == pytest.approx(ttft) and ttft > 0
        assert value(families, "baton:transfer_bytes_total") == 30_000_000
        assert value(families, "baton:transfer_runs_total") == 9
        assert value(families, "baton:transfer_exposed_bytes_total") == 1_500_000

    run_with_rig(tmp_path, story)


def test_requests_and_tokens_are_counted_by_streaming(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await generate(rig, 4, is_streaming=True)
        await generate(rig, 1)
        families = await scrape(rig.http)
        for name, streamed, plain in (
            ("sglang:num_requests_total", 1, 1),
            ("sglang:prompt_tokens_total", 3, 3),
            ("sglang:generation_tokens_total", 4, 1),
            ("sglang:time_to_first_token_seconds_count", 1, 1),
            ("sglang:e2e_request_latency_seconds_count", 1, 1),
        ):
            assert value(families, name, is_streaming="true") == streamed, name
            assert value(families, name, is_streaming="false") == plain, name
        tpot = "sglang:request_time_per_output_token_seconds"
        assert value(families, f"{tpot}_sum", is_streaming="true") == pytest.approx(0.01)
        assert value(families, f"{tpot}_count", is_streaming="true") == 1
        assert "is_streaming" not in str(families["sglang:queue_time_seconds"].samples)

    run_with_rig(tmp_path, story)


def test_tokens_that_came_together_share_the_time_since_the_last(tmp_path: Path) -> None:
    clock = ManualClock(50.0)

    def hold(scheduler: ScriptedScheduler) -> None:
        scheduler.holds = True

    async def story(rig: Rig) -> None:
        client = rig.context.scheduler
        handle = rig.context.submit([3], SamplingParams(max_new_tokens=9, seed=0), rid="r")
        client.handle(Outputs([Tokens(handle.request_id, [1])]))
        clock.advance(0.3)
        client.handle(Outputs([Tokens(handle.request_id, [2, 3, 4], offset=1)]))
        families = await scrape(rig.http)
        assert value(families, "sglang:inter_token_latency_seconds_count") == 3
        assert value(families, "sglang:inter_token_latency_seconds_sum") == pytest.approx(0.3)
        assert value(families, "sglang:inter_token_latency_seconds_bucket", le="0.1") == 3
        assert value(families, "sglang:inter_token_latency_seconds_bucket", le="0.08") == 0

    run_with_rig(tmp_path, story, clock=clock, prepare=hold)


def test_throughput_is_what_came_between_two_looks(tmp_path: Path) -> None:
    clock = ManualClock(50.0)

    async def story(rig: Rig) -> None:
        await rig.context.scheduler.watch_once()
        await generate(rig, 12)
        clock.advance(2.0)
        await rig.context.scheduler.watch_once()
        assert value(await scrape(rig.http), "sglang:gen_throughput") == 6.0

    run_with_rig(tmp_path, story, clock=clock)


def test_a_peer_that_is_gone_has_no_series_after_a_while(tmp_path: Path) -> None:
    clock = ManualClock(50.0)

    async def story(rig: Rig) -> None:
        client = rig.context.scheduler
        await generate(rig, 2)
        await client.watch_once()
        rig.scheduler.peers = []
        await client.watch_once()
        families = await scrape(rig.http)
        assert value(families, "baton:peer_transfer_bytes_total", peer=PEER.address) == 1e7
        clock.advance(GONE_PEER_KEPT_S + 1.0)
        await client.watch_once()
        families = await scrape(rig.http)
        assert families["baton:peer_transfer_bytes"].samples == []
        assert value(families, "baton:transfer_bytes_total") == 1e7

    run_with_rig(tmp_path, story, clock=clock)


def test_aborts_and_failures_are_counted_apart_and_not_as_latencies(tmp_path: Path) -> None:
    def script(scheduler: ScriptedScheduler) -> None:
        endings = iter(
            [
                ("aborted", 499, True),
                ("queue_full", 503, False),
                ("transfer_failed", 500, True),
                ("transfer_failed", 500, True),
            ]
        )

        def fail(submit: object) -> list[Failed]:
            kind, status, is_traced = next(endings)
            request = scheduler.submits[-1]
            trace = trace_of(request, 0, status=kind) if is_traced else None
            return [Failed(request.request_id, status, kind, "no", trace)]

        scheduler.answer = lambda submit: list(fail(submit))

    async def story(rig: Rig) -> None:
        for index in range(4):
            await generate(rig, 2, rid=f"r{index}")
        families = await scrape(rig.http)
        assert value(families, "sglang:num_requests_total", is_streaming="false") == 4
        assert value(families, "sglang:num_aborted_requests_total") == 1
        assert value(families, "baton:failed_requests_total", kind="queue_full") == 1
        assert value(families, "baton:failed_requests_total", kind="transfer_failed") == 2
        assert families["sglang:time_to_first_token_seconds"].samples == []
        assert families["baton:transfer_stage_seconds"].samples == []

    run_with_rig(tmp_path, story, prepare=script)


def test_gauges_are_the_scheduler_s_at_the_moment_of_the_scrape(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.queues = {"running": 9, "waiting": 8, "prealloc": 7, "transfer": 6}
        rig.scheduler.counters = {"retracted": 5.0, "transfer_failed": 4.0, "odd_event": 3.0}
        families = await scrape(rig.http)
        assert value(families, "baton:up") == 1
        assert value(families, "sglang:num_running_reqs") == 9
        assert value(families, "sglang:num_queue_reqs") == 8
        assert value(families, "sglang:num_decode_prealloc_queue_reqs") == 7
        assert value(families, "sglang:num_decode_transfer_queue_reqs") == 6
        assert value(families, "sglang:num_prefill_inflight_queue_reqs") == 0
        assert value(families, "sglang:num_retracted_requests_total") == 5
        assert value(families, "sglang:num_transfer_failed_reqs_total") == 4
        assert value(families, "baton:events_total", event="odd_event") == 3
        assert value(families, "baton:prefix_cache_tokens") == 960
        assert value(families, "baton:checkpoints") == 2
        assert value(families, "baton:peer_connected", peer="127.0.0.1:8998") == 1

    run_with_rig(tmp_path, story)


def test_the_states_of_a_group_s_pages_add_up_to_its_pool(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        families = await scrape(rig.http)
        pages = {s.labels["state"]: s.value for s in families["baton:pages"].samples}
        assert pages == {"free": 180, "cached": 20, "used": 50, "quarantined": 6}
        assert value(families, "baton:pool_pages", group="full") == sum(pages.values())
        assert value(families, "baton:page_bytes", group="full") == 4096
        assert value(families, "baton:token_bytes", group="full") == 4096 / 16
        assert value(families, "sglang:token_usage") == pytest.approx(56 / 256)
        assert value(families, "sglang:max_total_num_tokens") == 4096
        assert value(families, "sglang:cache_config_info", page_size="16", num_pages="256") == 1

    run_with_rig(tmp_path, story)


def test_a_silent_scheduler_shows_as_down_with_the_gauges_heard_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.frontend.requests.scrape.SCRAPE_TIMEOUT_S", 0.01)

    async def story(rig: Rig) -> None:
        rig.scheduler.is_silent = True
        families = await scrape(rig.http)
        assert value(families, "baton:up") == 0
        assert value(families, "sglang:num_running_reqs") == 1

    run_with_rig(tmp_path, story)


def test_a_prefill_server_measures_what_it_sent_and_no_client_latency(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await generate(rig, 1)  # a router's request
        rig.context.scheduler.handle(  # a plain one, which only the decode server's client sees
            Traced(RequestTrace(7, transfer=TransferTrace(nbytes=500_000, wire_s=0.0, run_count=1)))
        )
        families = await scrape(rig.http)
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
            assert families[f"sglang:{name}"].samples == [], name
        assert value(families, "sglang:kv_transfer_latency_ms_sum") == pytest.approx(10.0)
        assert value(families, "sglang:kv_transfer_latency_ms_count") == 2
        assert value(families, "sglang:kv_transfer_total_mb_sum") == pytest.approx(10.5)
        assert value(families, "sglang:kv_transfer_speed_gb_s_sum") == pytest.approx(1.0)
        assert value(families, "sglang:kv_transfer_speed_gb_s_count") == 1, "0 s has no speed"
        per_stage = "sglang:per_stage_req_latency_seconds_sum"
        assert value(families, per_stage, stage="prefill_forward") == pytest.approx(0.004)
        assert value(families, "baton:transfer_bytes_total") == 10_500_000
        labels = {s.labels["engine_type"] for f in families.values() for s in f.samples}
        assert labels == {"prefill"}

    run_with_rig(tmp_path, story, role=Role.PREFILL, prefill=())


def test_a_tiny_model_does_not_land_in_one_bucket(tmp_path: Path) -> None:
    """Tokens after 1.5, 15 and 150 ms are told apart."""
    ttfts = iter([0.0015, 0.015, 0.15])

    def script(scheduler: ScriptedScheduler) -> None:
        def answer(submit: object) -> list[Tokens]:
            (message,) = count_up(scheduler.submits[-1])
            assert isinstance(message, Tokens)
            trace = RequestTrace(message.request_id, output_token_count=1, ttft_s=next(ttfts))
            return [Tokens(message.request_id, [1], finish=message.finish, trace=trace)]

        scheduler.answer = lambda submit: list(answer(submit))

    async def story(rig: Rig) -> None:
        for index in range(3):
            await generate(rig, 1, rid=f"r{index}")
        family = (await scrape(rig.http))["sglang:time_to_first_token_seconds"]
        counts = {s.value for s in family.samples if s.name.endswith("_bucket")}
        assert counts == {0, 1, 2, 3}

    run_with_rig(tmp_path, story, prepare=script)
