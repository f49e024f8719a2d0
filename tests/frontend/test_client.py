"""The scheduler client over a real channel: every request ends once, nothing is lost in silence."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec import structs

from common.clock import ManualClock
from common.errors import RequestError
from common.frontend.requests.request_handle import RequestHandle
from common.frontend.requests.scheduler_health import (
    GONE_AFTER_S,
    JUST_HEARD_S,
    SILENCE_MAX_S,
    STALL_MAX_S,
    SchedulerHealth,
)
from common.protocol.codec import encode
from common.protocol.frontend import Cancel, Failed, GetState, Outputs, State, Tokens
from common.request import Bootstrap, FinishKind, FinishReason, SamplingParams
from tests.frontend.frontend_rig import Rig, listen, run_with_rig
from tests.frontend.scripted_scheduler import INFO, ScriptedScheduler, count_up


def sampling(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, seed=1)


async def read(handle: RequestHandle) -> list[Tokens | Failed]:
    return [message async for message in handle]


def submit(rig: Rig, rid: str = "r", count: int = 3) -> RequestHandle:
    return rig.context.submit([5, 6], sampling(count), rid=rid)


def test_tokens_come_in_order_and_end_with_the_finish(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        with submit(rig, count=200) as handle:
            messages = await read(handle)
        assert all(isinstance(message, Tokens) for message in messages)
        tokens = [t for m in messages if isinstance(m, Tokens) for t in m.token_ids]
        assert tokens == [1 + (6 + i) % (INFO.vocab_size - 1) for i in range(200)]
        assert isinstance(messages[-1], Tokens)
        assert messages[-1].finish == FinishReason(FinishKind.LENGTH)
        assert rig.context.scheduler.open_request_count == 0
        assert rig.scheduler.cancels == []

    run_with_rig(tmp_path, story)


def test_the_submit_carries_the_budget_and_the_room(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        room = Bootstrap("host", 8998, 2**63 - 1)
        with rig.context.submit([7], sampling(1), rid="r", bootstrap=room) as handle:
            await read(handle)
        sent = rig.scheduler.submits[0]
        assert (sent.token_ids, sent.bootstrap, sent.budget_s) == ([7], room, 60.0)

    run_with_rig(tmp_path, story)


def test_many_requests_at_once_each_get_their_own_tokens(tmp_path: Path) -> None:
    async def one(rig: Rig, index: int) -> None:
        with rig.context.submit([index + 1], sampling(5), rid=f"r{index}") as handle:
            messages = await read(handle)
        tokens = [t for m in messages if isinstance(m, Tokens) for t in m.token_ids]
        assert tokens == [1 + (index + 1 + i) % (INFO.vocab_size - 1) for i in range(5)]

    async def story(rig: Rig) -> None:
        await asyncio.gather(*(one(rig, index) for index in range(300)))

    run_with_rig(tmp_path, story)


def test_a_late_reader_gets_everything_in_one_message(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        with submit(rig, count=50) as handle:
            while not handle.is_ended:
                await rig.context.scheduler.get_state()
            messages = await read(handle)
        assert len(messages) == 1 and isinstance(messages[0], Tokens)
        assert len(messages[0].token_ids) == 50 and messages[0].trace is not None

    run_with_rig(tmp_path, story)


def test_tokens_before_a_failure_are_read_before_it(tmp_path: Path) -> None:
    def break_off(scheduler: ScriptedScheduler) -> None:
        scheduler.answer = lambda s: [
            *count_up(s)[:2],
            Failed(s.request_id, 500, "transfer_failed", "peer lost"),
        ]

    async def story(rig: Rig) -> None:
        with submit(rig, count=9) as handle:
            while not handle.is_ended:
                await rig.context.scheduler.get_state()
            messages = await read(handle)
        assert isinstance(messages[0], Tokens) and messages[0].token_ids == [7, 8]
        assert isinstance(messages[1], Failed) and messages[1].message == "peer lost"

    run_with_rig(tmp_path, story, prepare=break_off)


def hold(scheduler: ScriptedScheduler) -> None:
    scheduler.holds = True


def test_leaving_before_the_end_cancels_once(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        with submit(rig) as handle:
            handle.cancel("first reason")
        await rig.until(lambda s: bool(s.cancels))
        (end,) = await read(handle)
        assert isinstance(end, Failed) and (end.status, end.message) == (499, "first reason")
        await rig.context.scheduler.get_state()
        assert rig.scheduler.cancels == [Cancel(handle.request_id, "first reason")]
        assert rig.context.scheduler.open_request_count == 0

    run_with_rig(tmp_path, story, prepare=hold)


def test_a_rid_that_is_open_is_refused_and_free_again_after_its_cancel(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        first = submit(rig, "same")
        with pytest.raises(RequestError, match="'same'") as caught:
            submit(rig, "same")
        assert (caught.value.status, caught.value.field) == (400, "rid")
        first.cancel()
        second = submit(rig, "same")
        await read(first)
        with pytest.raises(RequestError):
            submit(rig, "same")
        await rig.until(lambda s: len(s.submits) == 2)
        rig.scheduler.release(second.request_id)
        await read(second)
        submit(rig, "same").cancel()

    run_with_rig(tmp_path, story, prepare=hold)


def test_cancel_matching_takes_the_rids_with_the_prefix_only(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        handles = {rid: submit(rig, rid) for rid in ("a-0", "a-1", "b-0")}
        await rig.until(lambda s: len(s.held) == 3)
        assert rig.context.scheduler.cancel_matching("a-") == 2
        assert rig.context.scheduler.cancel_matching("a-") == 2  # asked again, cancelled once
        for rid in ("a-0", "a-1"):
            assert isinstance((await read(handles[rid]))[0], Failed)
        assert not handles["b-0"].is_ended
        assert rig.context.scheduler.cancel_matching("") == 1
        await read(handles["b-0"])
        assert len(rig.scheduler.cancels) == 3

    run_with_rig(tmp_path, story, prepare=hold)


def test_a_closed_channel_answers_every_open_request_and_takes_no_more(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        handles = [submit(rig, f"r{i}") for i in range(4)]
        rig.context.scheduler.lose("the scheduler is gone")
        for handle in handles:
            (end,) = await read(handle)
            assert isinstance(end, Failed)
            assert (end.status, end.kind) == (500, "scheduler_lost")
        with pytest.raises(RequestError, match="gone") as caught:
            submit(rig, "new")
        assert caught.value.status == 503

    run_with_rig(tmp_path, story, prepare=hold)


@pytest.mark.parametrize("offset", [0, 2])
def test_output_with_a_gap_ends_its_request_here_and_at_the_scheduler(
    tmp_path: Path, offset: int
) -> None:
    """It never happens; if it does, no client takes what is left for the whole answer."""

    async def story(rig: Rig) -> None:
        torn, whole = submit(rig, "torn"), submit(rig, "whole")
        await rig.until(lambda s: len(s.held) == 2)
        for at in (0, offset):
            told = [Tokens(torn.request_id, [5 + at], offset=at)]
            rig.scheduler.send_raw(encode(Outputs([*told])))
        *_, end = await read(torn)
        assert isinstance(end, Failed) and (end.status, end.kind) == (500, "output_lost")
        assert f"token {offset}, 1 have come" in end.message
        await rig.until(lambda s: [c.request_id for c in s.cancels] == [torn.request_id])
        rig.scheduler.release(whole.request_id)
        assert isinstance((await read(whole))[-1], Tokens)

    run_with_rig(tmp_path, story, prepare=hold)


def test_a_request_that_the_scheduler_has_forgotten_ends_soon_after_its_time(
    tmp_path: Path,
) -> None:
    clock = ManualClock(100.0)

    async def story(rig: Rig) -> None:
        client = rig.context.scheduler
        forgotten = submit(rig)
        await rig.until(lambda s: bool(s.held))
        clock.advance(60.0 + GONE_AFTER_S - 1.0)
        later = submit(rig, "later")
        await rig.until(lambda s: len(s.held) == 2)
        await client.watch_once()
        assert not forgotten.is_ended
        clock.advance(2.0)
        await client.watch_once()
        (end,) = await read(forgotten)
        assert isinstance(end, Failed) and (end.status, end.kind) == (500, "output_lost")
        await rig.until(lambda s: [c.request_id for c in s.cancels] == [forgotten.request_id])
        assert not later.is_ended

    run_with_rig(tmp_path, story, prepare=hold, clock=clock)


def test_a_frontend_that_was_stopped_itself_blames_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the scheduler said meanwhile lies in the socket: it is not gone, and goes on."""
    monkeypatch.setattr("common.frontend.requests.scheduler_client.WATCH_INTERVAL_S", 1e6)
    clock = ManualClock(100.0)

    async def story(rig: Rig) -> None:
        client = rig.context.scheduler
        handle = submit(rig)
        await rig.until(lambda s: bool(s.held))
        await client.get_state()
        rig.scheduler.is_silent = True  # the answer to the next look is late
        clock.advance(55.0)
        await client.watch_once(timeout_s=0.01)
        assert client.trouble() == "" and not handle.is_ended
        rig.scheduler.is_silent = False
        rig.scheduler.release()
        assert isinstance((await read(handle))[-1], Tokens)

    run_with_rig(tmp_path, story, prepare=hold, clock=clock)


@contextmanager
def stopped_process() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # kill does not wait
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_scheduler_that_is_stopped_gets_nothing_new_once_it_is_silent(tmp_path: Path) -> None:
    clock = ManualClock(50.0)

    async def story(rig: Rig) -> None:
        client = rig.context.scheduler
        with stopped_process() as pid:
            client.handle(structs.replace(INFO, pid=pid))
            assert client.trouble() == "the scheduler's process is stopped", "health checks look"
            with submit(rig) as handle:  # what has just been said was said by a process that runs
                await read(handle)
            clock.advance(JUST_HEARD_S)
            with pytest.raises(RequestError, match="process is stopped") as refused:
                submit(rig)
            assert refused.value.status == 503

    run_with_rig(tmp_path, story, clock=clock)


def test_a_frozen_scheduler_is_unhealthy_then_given_up_and_stopped_when_it_thaws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client's own looks would be answers of a scheduler that the clock calls frozen.
    monkeypatch.setattr("common.frontend.requests.scheduler_client.WATCH_INTERVAL_S", 1e6)
    clock = ManualClock(100.0)

    async def story(rig: Rig) -> None:
        client = rig.context.scheduler
        handle = submit(rig)
        await rig.until(lambda s: bool(s.held))
        await client.get_state()  # the last thing that it says
        rig.scheduler.is_silent = True
        listen(client, clock, SILENCE_MAX_S + 1)
        assert "not answered" in client.trouble()
        assert not handle.is_ended
        listen(client, clock, GONE_AFTER_S)
        await client.watch_once(timeout_s=0.01)
        (end,) = await read(handle)
        assert isinstance(end, Failed) and end.status == 500
        rig.scheduler.is_silent = False
        rig.scheduler.send(Tokens(handle.request_id, [1]))
        await rig.until(lambda s: Cancel(handle.request_id, "already answered") in s.cancels)
        await client.get_state()
        assert client.trouble() == ""
        assert client.late_message_count >= 1

    run_with_rig(tmp_path, story, prepare=hold, clock=clock)


def test_a_call_without_an_answer_is_a_503_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.is_silent = True
        with pytest.raises(RequestError, match=r"0\.01 s") as caught:
            await rig.context.scheduler.get_state(0.01)
        assert caught.value.status == 503
        rig.scheduler.is_silent = False
        assert (await rig.context.scheduler.calls.flush_cache()).is_done

    run_with_rig(tmp_path, story)


def test_concurrent_calls_get_their_own_answers(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        client = rig.context.scheduler
        states = await asyncio.gather(*(client.get_state() for _ in range(20)))
        assert len({state.call_id for state in states}) == 20
        asked = [m.call_id for m in rig.scheduler.seen if isinstance(m, GetState)]
        assert {state.call_id for state in states} <= set(asked)

    run_with_rig(tmp_path, story)


def test_a_start_is_noticed_at_once_and_not_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.frontend.requests.scheduler_client.WATCH_INTERVAL_S", 1e6)

    async def story(rig: Rig) -> None:
        looks = sum(isinstance(m, GetState) for m in rig.scheduler.seen)
        rig.scheduler.send(INFO)
        await rig.until(lambda s: sum(isinstance(m, GetState) for m in s.seen) > looks)

    run_with_rig(tmp_path, story)


def state(step_count: int, running: int) -> State:
    return State(1, True, {"running": running}, {}, [], [], step_count)


def test_an_engine_that_stands_still_while_it_has_work_is_trouble() -> None:
    liveness = SchedulerHealth(0.0)
    now = 0.0
    for _ in range(int(STALL_MAX_S) + 2):
        now += 1.0
        liveness.hear(now)
        liveness.hear_state(state(step_count=7, running=1), now)
    assert "has not finished a step" in liveness.trouble(now, is_started=True)
    liveness.hear_state(state(step_count=8, running=1), now)
    assert liveness.trouble(now, is_started=True) == ""


def test_an_engine_without_work_may_stand_still_for_ever() -> None:
    liveness = SchedulerHealth(0.0)
    liveness.hear_state(state(step_count=7, running=0), 0.0)
    for now in (1e3, 2e3, 3e3):
        liveness.hear(now)
        liveness.hear_state(state(step_count=7, running=0), now)
        assert liveness.trouble(now, is_started=True) == ""
    liveness.hear_state(state(step_count=7, running=1), 3e3)
    assert liveness.trouble(3e3, is_started=True) == "", "the clock starts with the work"


def test_worker_health_while_starting_is_no_trouble_and_the_first_reason_stays() -> None:
    liveness = SchedulerHealth(0.0)
    for now in range(60):
        assert liveness.trouble(now, is_started=False) == ""
    for now in range(60, 70):
        trouble = liveness.trouble(now, is_started=True)
    assert "not answered" in trouble
    liveness.lose("first")
    liveness.lose("second")
    assert liveness.trouble(0.0, is_started=False) == "first"
    assert liveness.is_gone(0.0)
