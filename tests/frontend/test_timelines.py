"""What became of the latest requests: lists, timelines that add up, rows for a trace viewer."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from common.clock import ManualClock
from common.config import Role
from common.frontend.requests.stages import chunks_of, stages_of
from common.protocol.frontend import Submit, Tokens, Traced
from common.request import Origin, RequestTrace, SamplingParams, TransferTrace
from tests.frontend.frontend_rig import Rig, run_with_rig
from tests.frontend.scripted_scheduler import ScriptedScheduler, ToldFrontend, count_up


def named(submit: Submit) -> list[ToldFrontend]:
    """The scripted continuation, its trace as a scheduler gives it: named, in three chunks."""
    messages = count_up(submit)
    last = messages[-1]
    assert isinstance(last, Tokens) and last.trace is not None
    transfer = msgspec.structs.replace(
        last.trace.transfer, chunk_ends_s=[0.001, 0.0015, 0.004], chunk_count=3
    )
    trace = msgspec.structs.replace(
        last.trace, arrived_s=99.0, transfer=transfer, origin=submit.origin
    )
    return [*messages[:-1], msgspec.structs.replace(last, trace=trace)]


def prepare(scheduler: ScriptedScheduler) -> None:
    scheduler.answer = named


async def generate(rig: Rig, rid: str, *, is_measured: bool = True) -> None:
    sampling = SamplingParams(max_new_tokens=3, seed=0)
    with rig.context.submit([3, 4], sampling, rid=rid, is_measured=is_measured) as handle:
        async for _ in handle:
            pass


def test_the_latest_requests_are_listed_newest_first_and_only_so_many(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for index in range(5):
            await generate(rig, f"r{index}")
        await generate(rig, "probe", is_measured=False)
        listed = (await rig.http.get("/requests")).json()["requests"]
        assert [one["rid"] for one in listed] == ["r4", "r3", "r2"]
        assert listed[0]["prompt_tokens"] == 2 and listed[0]["completion_tokens"] == 3
        assert listed[0]["started_at"] == 99.0, "it arrived a second before now"
        gone = await rig.http.get("/requests/r1/timeline")
        assert gone.status_code == 404
        assert "rid='r1': not among the latest 3 requests" in gone.text

    run_with_rig(tmp_path, story, prepare=prepare, clock=ManualClock(100.0), request_history=3)


def test_a_timeline_adds_up_and_says_whose_clock_it_is(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await generate(rig, "a/b c")
        told = (await rig.http.get("/requests/a/b c/timeline")).json()
        spans = told["spans"]
        assert [(span["name"], span["clock"]) for span in spans] == [
            ("reserve", "decode"),
            ("queue", "prefill"),
            ("prefill", "prefill"),
            ("transfer", "prefill"),
            ("first_token", "decode"),
            ("decode", "decode"),
        ]
        assert sum(span["duration_s"] for span in spans) == pytest.approx(told["e2e_s"])
        for before, after in itertools.pairwise(spans):
            assert before["start_s"] + before["duration_s"] == pytest.approx(after["start_s"])
        chunks = spans[2]["chunks"]
        assert [chunk["duration_s"] for chunk in chunks] == pytest.approx([0.001, 0.0005, 0.0025])
        assert chunks[0]["start_s"] == pytest.approx(spans[2]["start_s"])
        assert told["transfer"]["bytes"] == 10_000_000 and told["peer"] == "127.0.0.1:8998"
        assert "never compared" in told["clocks"]

    run_with_rig(tmp_path, story, prepare=prepare)


def test_the_trace_has_one_row_per_request_with_stages_inside(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for rid in ("first", "second"):
            await generate(rig, rid)
        document = (await rig.http.get("/trace")).json()
        events = document["traceEvents"]
        rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert rows == {1: "first", 2: "second"}
        for row in rows:
            spans = [e for e in events if e["ph"] == "X" and e["tid"] == row]
            whole = next(e for e in spans if e["name"] == "request")
            assert whole["ts"] == 99e6 and whole["args"]["rid"] == rows[row]
            assert {e["name"] for e in spans} >= {"queue", "prefill", "chunk 2", "decode"}
            end = whole["ts"] + whole["dur"]
            assert all(whole["ts"] <= e["ts"] <= e["ts"] + e["dur"] <= end + 1 for e in spans)
        assert document["displayTimeUnit"] == "ms"

    run_with_rig(tmp_path, story, prepare=prepare, clock=ManualClock(100.0))


def test_a_prefill_server_tells_of_transfers_that_no_client_of_its_own_asked_for(
    tmp_path: Path,
) -> None:
    async def story(rig: Rig) -> None:
        transfer = TransferTrace(queue_s=0.1, prefill_s=0.2, transfer_s=0.3)
        trace = RequestTrace(7, peer="inc-d", transfer=transfer, e2e_s=0.6, ttft_s=0.6)
        named = msgspec.structs.replace(trace, origin=Origin("theirs", ""), output_token_count=1)
        rig.context.scheduler.handle(Traced(named))
        told = (await rig.http.get("/requests/theirs/timeline")).json()
        assert [span["name"] for span in told["spans"]] == [
            "reserve",
            "queue",
            "prefill",
            "transfer",
        ]
        assert {span["clock"] for span in told["spans"]} == {"prefill"}

    run_with_rig(tmp_path, story, role=Role.PREFILL, prefill=())


def test_stages_tell_where_a_prompt_was_computed_and_what_never_came() -> None:
    here = RequestTrace(1, output_token_count=2, transfer=TransferTrace(prefill_s=2.0))
    assert {stage.clock for stage in stages_of(here, Role.DECODE)} == {Role.DECODE}
    at_once = TransferTrace(prefill_s=1.0)
    for role, peer in ((Role.PREFILL, "inc-d"), (Role.DECODE, "p:1")):
        whole = RequestTrace(1, peer=peer, output_token_count=1, transfer=at_once)
        names = [stage.name for stage in stages_of(whole, role)]
        assert names == ["reserve", "queue", "prefill", "transfer"], "also those that took no time"
    failed = RequestTrace(1, peer="p:1", status="timed_out", first_token_s=3.0, e2e_s=3.0)
    names = [stage.name for stage in stages_of(failed, Role.DECODE)]
    assert names == ["reserve", "unanswered"]
    single = TransferTrace(prefill_s=1.0, chunk_ends_s=[1.0])
    prefill = stages_of(RequestTrace(1, transfer=single), Role.PREFILL)[-1]
    assert chunks_of(RequestTrace(1, transfer=single), prefill) == []
