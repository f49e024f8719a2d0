"""Spans of a request: who is whose parent, what is passed on, and what is not traced."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import msgspec
import pytest

from common.config import Role, ServerConfig
from common.errors import ConfigError
from common.frontend.apis import openai_api, sglang_api
from common.frontend.requests.request_log import LoggedRequest
from common.frontend.requests.spans import (
    Span,
    decode_spans,
    name_request,
    new_trace,
    parse_trace_parent,
    prefill_spans,
    trace_parent_of,
)
from common.frontend.requests.tracing import open_tracing
from common.request import CachedTokens, Origin, RequestTrace, TransferTrace
from tests.e2e.collector import collector
from tests.frontend.frontend_rig import Rig, decode_config, run_with_rig

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
TRACE_PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
TRANSFER = TransferTrace(
    queue_s=1.0, prefill_s=2.0, transfer_s=3.0, nbytes=64, chunk_ends_s=[0.5, 2.0], chunk_count=2
)
ENDED = RequestTrace(
    request_id=1,
    peer="p:1",
    prompt_token_count=5,
    output_token_count=2,
    cached=CachedTokens(prefill=2, decode=3),
    reserve_s=0.5,
    transfer=TRANSFER,
    first_token_s=0.25,
    ttft_s=6.75,
    decode_s=4.0,
    e2e_s=10.75,
    origin=Origin("r1", TRACE_PARENT),
)
LOGGED = LoggedRequest(ENDED, started_wall_s=50.0)
WHICH = ("", "prefill_", "decode_")


def tree(spans: list[Span]) -> dict[str, str]:
    """Name of each span's parent, by its own."""
    names = {span.ids.span_id: span.name for span in spans}
    return {span.name: names.get(span.parent_id, span.parent_id) for span in spans}


def test_both_servers_spans_make_one_tree() -> None:
    ids = name_request(TRACE_PARENT)
    here = decode_spans(ENDED, 100.0, ids)
    parent = parse_trace_parent(ids.remote_prefill.trace_parent)
    assert parent is not None
    there = prefill_spans(ENDED, 200.0, parent)
    assert tree(here + there) == {
        "request": PARENT_ID,
        "reserve": "request",
        "remote_prefill": "request",
        "decode": "request",
        "prefill_request": "remote_prefill",
        "queue": "prefill_request",
        "prefill": "prefill_request",
        "chunk 0": "prefill",
        "chunk 1": "prefill",
        "transfer": "prefill_request",
    }
    assert {span.ids.trace_id for span in here + there} == {TRACE_ID}
    assert len({span.ids.span_id for span in here + there}) == len(here + there)
    times = {span.name: (span.start_s, span.end_s) for span in here}
    assert times["request"] == (100.0, 110.75)
    assert times["remote_prefill"] == (100.5, 106.75) and times["decode"] == (106.75, 110.75)
    told = next(span.attributes for span in here if span.name == "remote_prefill")
    assert (told["baton.bytes"], told["baton.peer"], told["baton.transfer_s"]) == (64, "p:1", 3.0)


def test_the_span_of_a_request_tells_what_was_cached_on_which_server() -> None:
    ids = name_request(TRACE_PARENT)
    for request, *_ in (decode_spans(ENDED, 0.0, ids), prefill_spans(ENDED, 0.0, ids.request)):
        told = [request.attributes[f"baton.cached_{which}tokens"] for which in WHICH]
        assert told == [3, 2, 3]


def test_a_prompt_computed_here_has_no_transfer() -> None:
    here = msgspec.structs.replace(
        ENDED, peer="", transfer=TransferTrace(prefill_s=6.0), first_token_s=0.25
    )
    spans = decode_spans(here, 0.0, name_request(""))
    assert [span.name for span in spans] == [
        "request",
        "reserve",
        "prefill",
        "first_token",
        "decode",
    ]
    assert spans[0].parent_id == ""


def test_errors_are_told_and_clients_that_went_are_none() -> None:
    for status, error in (("timed_out", "too late"), ("aborted", "")):
        ended = msgspec.structs.replace(ENDED, status=status, message="too late")
        assert decode_spans(ended, 0.0, name_request(""))[0].error == error


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"01-{TRACE_ID}-{PARENT_ID}-01",
        f"00-{TRACE_ID.upper()}-{PARENT_ID}-01",
        f"{TRACE_PARENT}-more",
        f"{TRACE_PARENT}\n",
    ],
)
def test_a_parent_that_is_none_begins_a_trace_of_its_own(text: str) -> None:
    assert parse_trace_parent(text) is None
    ids = name_request(text)
    assert ids.parent_id == "" and ids.request.is_sampled
    assert trace_parent_of([text] if text != f"{TRACE_PARENT}\n" else [text, text]) == ""


def test_several_headers_are_none_and_spaces_are_not_part_of_one() -> None:
    assert trace_parent_of([TRACE_PARENT, TRACE_PARENT]) == ""
    assert trace_parent_of([f" {TRACE_PARENT} "]) == TRACE_PARENT


def test_what_a_client_does_not_sample_is_passed_on_so() -> None:
    ids = name_request(f"00-{TRACE_ID}-{PARENT_ID}-00")
    assert not ids.request.is_sampled and ids.remote_prefill.trace_parent.endswith("-00")
    assert new_trace().trace_parent.endswith("-01")


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_client_s_parent_is_passed_on_where_nothing_is_traced(tmp_path: Path, path: str) -> None:
    async def story(rig: Rig) -> None:
        body = {"prompt" if path.startswith("/v1") else "input_ids": [5, 6]}
        for headers in ({"traceparent": TRACE_PARENT}, {}):
            assert (await rig.http.post(path, json=body, headers=headers)).status_code == 200
        passed = [submit.origin.trace_parent for submit in rig.scheduler.submits]
        assert passed == [TRACE_PARENT, ""]

    parts = (sglang_api.build_router, openai_api.build_router)
    run_with_rig(tmp_path, story, parts=parts)


def traced(tmp_path: Path, endpoint: str, role: Role = Role.DECODE) -> ServerConfig:
    return decode_config(tmp_path, role=role, otlp_traces_endpoint=f"{endpoint}/v1/traces")


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans leave before `close` returns, however slow the machine is."""
    monkeypatch.setattr("common.frontend.requests.tracing.CLOSE_TIMEOUT_S", 60.0)
    monkeypatch.setattr("common.frontend.requests.tracing.EXPORT_TIMEOUT_S", 60)


@pytest.mark.slow
@pytest.mark.usefixtures("patience")
def test_a_collector_is_sent_what_is_sampled(tmp_path: Path) -> None:
    with collector() as found:
        tracing = open_tracing(traced(tmp_path, found.url))
        tracing.end(LOGGED, tracing.begin(TRACE_PARENT))
        tracing.end(LOGGED, tracing.begin(TRACE_PARENT[:-1] + "0"))
        failed = msgspec.structs.replace(ENDED, status="timed_out", message="too late")
        tracing.end(LoggedRequest(failed, 50.0), tracing.begin(""))
        tracing.close()
    mine = found.of_trace(TRACE_ID)
    assert sorted(span.name for span in mine) == ["decode", "remote_prefill", "request", "reserve"]
    assert {span.service for span in mine} == {"baton-decode"}
    assert [span.name for span in mine if span.is_entry] == ["request"]
    (request,) = [span for span in mine if span.name == "request"]
    assert request.parent_id == PARENT_ID and request.duration_s == pytest.approx(10.75)
    assert request.attributes["gen_ai.request.id"] == "r1" and not request.is_error
    others = [span for span in found.spans if span.trace_id != TRACE_ID]
    assert [span.is_error for span in others if span.name == "request"] == [True]


@pytest.mark.usefixtures("patience")
def test_a_prefill_server_joins_the_trace_it_is_told_of(tmp_path: Path) -> None:
    with collector() as found:
        tracing = open_tracing(traced(tmp_path, found.url, Role.PREFILL))
        assert tracing.begin(TRACE_PARENT) is None, "its parent is known with the reservation"
        tracing.end(LOGGED, None)
        unasked = msgspec.structs.replace(ENDED, origin=Origin("r2", ""))
        tracing.end(LoggedRequest(unasked, 50.0), None)
        tracing.close()
    (request,) = [span for span in found.spans if span.is_entry]
    assert request.name == "prefill_request"
    assert (request.trace_id, request.parent_id) == (TRACE_ID, PARENT_ID)


@pytest.mark.slow
def test_a_collector_that_is_not_there_costs_spans_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.frontend.requests.tracing.CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr("common.frontend.requests.tracing.QUEUED_SPAN_COUNT_MAX", 512)
    tracing = open_tracing(traced(tmp_path, "http://127.0.0.1:9"))
    for _ in range(400):  # four spans each: more than the queue holds
        tracing.end(LOGGED, tracing.begin(""))
    tracing.close()


def test_without_the_extra_the_start_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"needs the extra `trace`: pip install 'baton\[trace\]'"):
        open_tracing(traced(tmp_path, "http://127.0.0.1:9"))


def test_nothing_is_traced_unless_asked_for(tmp_path: Path) -> None:
    config = decode_config(tmp_path)
    assert config.trace_endpoint == ""
    assert open_tracing(config).begin(TRACE_PARENT) is None
    enabled = msgspec.structs.replace(config, enable_trace=True)
    assert httpx.URL(enabled.trace_endpoint).port == 4318
