"""What Prometheus is told after some requests: the stages of the transfer add up to the time to
first token, every metric is explained, and dashboards made for SGLang find their names."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from demo.facts import make_question
from tests.e2e.collector import Collector, Received, collector
from tests.e2e.fleet import Body, Fleet, Node, wait_until
from tests.e2e.prometheus import RATE_WINDOW, prometheus
from tests.metrics.dashboards import DASHBOARDS, alerts, queries
from tests.metrics.test_names import SGLANG_DASHBOARD, VLLM_DASHBOARD

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

REQUEST_COUNT = 12
STAGES = {"reserve", "queue", "prefill", "transfer", "first_token"}
SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'([a-z_]+)="([^"]*)"')

BOTH = [
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "sglang:cache_config_info",
    "sglang:gen_throughput",
    "sglang:cache_hit_rate",
    "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total",
    "sglang:num_requests_total",
    "sglang:num_aborted_requests_total",
    "sglang:num_retracted_requests_total",
    "sglang:queue_time_seconds_bucket",
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_prefill_inflight_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
    "sglang:num_bootstrap_failed_reqs_total",
    "sglang:num_transfer_failed_reqs_total",
]
ON_PREFILL = [
    "sglang:kv_transfer_bootstrap_ms_bucket",
    "sglang:kv_transfer_latency_ms_bucket",
    "sglang:kv_transfer_total_mb_bucket",
    "sglang:kv_transfer_speed_gb_s_bucket",
    "sglang:per_stage_req_latency_seconds_bucket",
]
ON_DECODE = [
    "sglang:cached_tokens_total",
    "sglang:generation_tokens_histogram_bucket",
    "sglang:prompt_tokens_histogram_bucket",
    "sglang:time_to_first_token_seconds_bucket",
    "sglang:inter_token_latency_seconds_bucket",
    "sglang:request_time_per_output_token_seconds_bucket",
    "sglang:e2e_request_latency_seconds_bucket",
    "sglang:kv_transfer_alloc_ms_bucket",
    "sglang:per_stage_req_latency_seconds_bucket",
    "baton:transfer_stage_seconds_bucket",
]


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


def scrape(node: Node) -> list[Sample]:
    """Every sample of /metrics; each line must be a comment or a sample."""
    found = []
    for line in node.get("/metrics").text.splitlines():
        if line and not line.startswith("#"):
            match = SAMPLE.match(line)
            assert match is not None, line
            labels = dict(LABEL.findall(match[2] or ""))
            found.append(Sample(match[1], labels, float(match[3])))
    return found


def total(samples: list[Sample], name: str, **labels: str) -> float:
    """Sum over the samples of a name that have these labels; there must be one."""
    values = [
        sample.value
        for sample in samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert values, f"{name} {labels} is missing"
    return sum(values)


@dataclass
class Measured:
    """A pair after REQUEST_COUNT requests, half of them streamed. traces: its spans come here."""

    prefill: Node
    decode: Node
    traces: Collector
    output_count: int
    ttft_s: float


@pytest.fixture(scope="module")
def traces() -> Iterator[Collector]:
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def measured(traces: Collector, fleet: Fleet) -> Measured:
    traced = ("--otlp-traces-endpoint", traces.url)
    prefill = fleet.prefill("--chunked-prefill-size", "32", *traced)
    decode = fleet.decode([prefill], "--metrics-names", "both", *traced)
    fleet.wait_ready()
    replies = []
    for index in range(REQUEST_COUNT):
        sampling: Body = {"temperature": 0, "max_new_tokens": 32}
        question = make_question(970 + index, 8)
        body: Body = {"text": question.prompt, "sampling_params": sampling}
        if index % 2:
            replies.append(decode.generate(body))
        else:
            with decode.stream(body) as events:
                replies.append(list(events)[-1])
    fleet.wait_at_rest()
    output_count = sum(reply.meta_info.completion_tokens for reply in replies)
    ttft_s = sum(reply.timeline.ttft_s for reply in replies)
    return Measured(prefill, decode, traces, output_count, ttft_s)


def test_the_stages_of_the_transfer_add_up_to_the_time_to_first_token(measured: Measured) -> None:
    samples = scrape(measured.decode)
    name = "baton:transfer_stage_seconds"
    stages = {s.labels["stage"] for s in samples if s.name == f"{name}_sum"}
    assert stages == STAGES | {"decode"}
    for stage in STAGES:
        assert total(samples, f"{name}_count", stage=stage) == REQUEST_COUNT
    ttft_s = total(samples, "sglang:time_to_first_token_seconds_sum")
    explained_s = sum(total(samples, f"{name}_sum", stage=stage) for stage in STAGES)
    assert explained_s == pytest.approx(ttft_s, rel=0.01)
    assert total(samples, f"{name}_count", peer=measured.prefill.bootstrap) == 6 * REQUEST_COUNT
    assert ttft_s == pytest.approx(measured.ttft_s)
    assert total(samples, f"{name}_sum", stage="prefill") > 0
    # Bytes that left while the rest was computed cost no time of their own, but some on the wire.
    assert total(samples, f"{name}_sum", stage="transfer") >= 0
    assert total(scrape(measured.prefill), "sglang:kv_transfer_latency_ms_sum") > 0


def test_requests_and_tokens_are_counted(measured: Measured) -> None:
    samples = scrape(measured.decode)
    for flag in ("true", "false"):
        half = total(samples, "sglang:num_requests_total", is_streaming=flag)
        assert half == REQUEST_COUNT / 2
    assert total(samples, "sglang:generation_tokens_total") == measured.output_count
    assert total(samples, "sglang:e2e_request_latency_seconds_count") == REQUEST_COUNT
    between = total(samples, "sglang:inter_token_latency_seconds_count")
    assert between == measured.output_count - REQUEST_COUNT


def test_both_servers_count_the_same_bytes(measured: Measured) -> None:
    name = "baton:transfer_bytes_total"
    sent, received = (total(scrape(n), name) for n in (measured.prefill, measured.decode))
    assert sent == received > 0
    transfers = total(scrape(measured.prefill), "sglang:kv_transfer_total_mb_count")
    assert transfers == REQUEST_COUNT


def test_every_metric_is_explained_and_labelled(measured: Measured) -> None:
    for node, role in ((measured.prefill, "prefill"), (measured.decode, "decode")):
        text = node.get("/metrics").text
        helped = set(re.findall(r"^# HELP (\S+) \S.*$", text, re.MULTILINE))
        typed = set(re.findall(r"^# TYPE (\S+) (?:counter|gauge|histogram)$", text, re.MULTILINE))
        assert helped == typed
        for sample in scrape(node):
            family = re.sub(r"_(bucket|sum|count)$", "", sample.name)
            assert family in helped or sample.name in helped, sample.name
            assert sample.labels["model_name"] == "checkpoint"
            assert sample.labels["engine_type"] == role


def test_the_names_of_sglang_are_there(measured: Measured) -> None:
    for node, own in ((measured.prefill, ON_PREFILL), (measured.decode, ON_DECODE)):
        names = {sample.name for sample in scrape(node)}
        assert set(BOTH + own) - names == set()


def test_a_server_at_rest_shows_all_pages_free(measured: Measured) -> None:
    for node in (measured.prefill, measured.decode):
        samples = scrape(node)
        pages = {
            state: total(samples, "baton:pages", state=state)
            for state in ("free", "cached", "used", "quarantined")
        }
        assert (pages["used"], pages["quarantined"]) == (0, 0)
        assert pages["free"] + pages["cached"] == total(samples, "sglang:num_pages")
        assert total(samples, "sglang:token_usage") == 0
        assert total(samples, "baton:ready") == 1


def test_both_servers_tell_of_the_same_requests(measured: Measured) -> None:
    there, here = (
        {one["rid"]: one for one in node.get("/requests").json()["requests"]}
        for node in (measured.prefill, measured.decode)
    )
    assert set(there) == set(here) and len(here) == REQUEST_COUNT
    for rid, told in here.items():
        assert told["bytes"] == there[rid]["bytes"] > 0
        spans = measured.decode.get(f"/requests/{rid}/timeline").json()["spans"]
        assert sum(span["duration_s"] for span in spans) == pytest.approx(told["e2e_s"], rel=0.01)
        prefill = next(span for span in spans if span["name"] == "prefill")
        chunks_s = sum(chunk["duration_s"] for chunk in prefill["chunks"])
        assert len(prefill["chunks"]) > 1
        assert chunks_s == pytest.approx(prefill["duration_s"], rel=0.01)
    assert len(measured.decode.get("/trace").json()["traceEvents"]) > 5 * REQUEST_COUNT


TREE = {
    "request": "00f067aa0ba902b7",
    "reserve": "request",
    "remote_prefill": "request",
    "decode": "request",
    "prefill_request": "remote_prefill",
    "queue": "prefill_request",
    "prefill": "prefill_request",
    "transfer": "prefill_request",
}


@pytest.mark.parametrize("is_routed", [False, True])
def test_the_spans_of_both_servers_make_one_trace(measured: Measured, is_routed: bool) -> None:
    # given
    trace_id = f"{0x4BF9 + is_routed:032x}"
    headers = {"traceparent": f"00-{trace_id}-{TREE['request']}-01"}
    sampling: Body = {"temperature": 0, "max_new_tokens": 3}
    body: Body = {"text": make_question(71, 8).prompt, "sampling_params": sampling}
    nodes = [measured.decode]
    if is_routed:
        body |= {"bootstrap_host": "127.0.0.1", "bootstrap_room": 4711}
        body["bootstrap_port"] = measured.prefill.bootstrap_port
        nodes.append(measured.prefill)

    # when
    def post(node: Node) -> int:
        return httpx.post(f"{node.url}/generate", json=body, headers=headers).status_code

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(post, nodes)) == [200] * len(nodes)
    names = set(TREE)
    wait_until(
        "the spans of both servers",
        lambda: names <= {span.name for span in measured.traces.of_trace(trace_id)},
        30.0,
    )

    # then
    spans = [s for s in measured.traces.of_trace(trace_id) if not s.name.startswith("chunk")]
    by_id = {span.span_id: span for span in spans}
    parents = {
        s.name: by_id[s.parent_id].name if s.parent_id in by_id else s.parent_id for s in spans
    }
    assert parents == TREE
    there = {span.name for span in spans if span.service == "baton-prefill"}
    assert there == {"prefill_request", "queue", "prefill", "transfer"}
    assert len(spans) == len(parents), "each of them once"
    check_attributes({span.name: span for span in spans}, measured.prefill.bootstrap)


def check_attributes(spans: dict[str, Received], peer: str) -> None:
    """What the transfer's two sides tell is the same."""
    here, there = spans["remote_prefill"].attributes, spans["prefill_request"].attributes
    assert here["baton.peer"] == peer
    for name in ("baton.bytes", "baton.tokens", "baton.prefill_s"):
        assert here[name] == pytest.approx(there[name]) and here[name], name
    assert spans["request"].attributes["gen_ai.usage.completion_tokens"] == 3
    assert spans["remote_prefill"].duration_s <= spans["request"].duration_s


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)"
)
def test_a_prometheus_answers_every_query_of_the_dashboards(
    measured: Measured, tmp_path: Path
) -> None:
    with prometheus(tmp_path, [measured.prefill, measured.decode]) as server:
        # given: a request and two scrapes of both servers after it
        sampling: Body = {"temperature": 0, "max_new_tokens": 2}
        question = make_question(5, 8)
        measured.decode.generate({"text": question.prompt, "sampling_params": sampling})
        scraped = f"count_over_time(baton:peer_transfer_bytes_total[{RATE_WINDOW}]) > 1"
        wait_until("two scrapes of both", lambda: len(server.query(scraped)) == 2, 30.0)
        wait_until("rules", lambda: "unknown" not in server.rule_health().values(), 30.0)

        # then
        assert server.rule_health() == dict.fromkeys(alerts(), "ok")
        for path in DASHBOARDS:
            for name, expression in queries(path).items():
                expression = expression.replace("$model_name", "checkpoint")
                expression = expression.replace("$__rate_interval", RATE_WINDOW)
                server.wait_found(expression, f"{path.name}, {name}")
        for name in (*SGLANG_DASHBOARD, *VLLM_DASHBOARD):
            server.wait_found(name, "a published dashboard")
        assert server.query('ALERTS{alertstate="firing"}') == []
