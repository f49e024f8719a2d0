"""A scheduler that ends and comes back under its frontend: every open request goes on.

Over a real local channel, which keeps what was sent to nobody for whoever listens next.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from common.clock import ManualClock
from common.frontend.requests.request_handle import Asked, RequestHandle, SampleId
from common.protocol.frontend import Cancel, Drain, Failed, Submit, Tokens
from common.request import Bootstrap, SamplingParams
from tests.frontend.frontend_rig import Rig, run_with_rig
from tests.frontend.generate_rig import counted_up
from tests.frontend.scripted_scheduler import INFO, ScriptedScheduler

PROMPT = [5, 6]
COUNT = 9


def hold(scheduler: ScriptedScheduler) -> None:
    scheduler.holds = True
    scheduler.info = msgspec.structs.replace(INFO, incarnation="first")


def submit(rig: Rig, rid: str = "r", bootstrap: Bootstrap | None = None) -> RequestHandle:
    sampling = SamplingParams(max_new_tokens=COUNT, seed=1)
    return rig.context.submit(PROMPT, sampling, rid=rid, bootstrap=bootstrap)


async def end(rig: Rig) -> None:
    """The first scheduler ends without a word."""
    await asyncio.to_thread(rig.scheduler.__exit__, None, None, None)


@asynccontextmanager
async def successor(rig: Rig, incarnation: str = "second") -> AsyncIterator[ScriptedScheduler]:
    """Another one at its place, which answers what it is asked."""
    info = msgspec.structs.replace(INFO, incarnation=incarnation)
    with ScriptedScheduler(Path(rig.context.config.frontend_ipc_path), info=info) as scheduler:
        client = rig.context.scheduler
        while client.server_info is None or client.server_info.incarnation != incarnation:
            await client.watch_once()
        yield scheduler


async def have(handle: RequestHandle, count: int) -> None:
    while len(handle.output_ids) < count:
        await asyncio.sleep(0)


async def tokens_of(handle: RequestHandle) -> list[int]:
    messages = [message async for message in handle]
    assert all(isinstance(message, Tokens) for message in messages), messages
    return [token for one in messages if isinstance(one, Tokens) for token in one.token_ids]


async def seen(scheduler: ScriptedScheduler, found: Callable[[ScriptedScheduler], bool]) -> None:
    await asyncio.to_thread(scheduler.wait_for, found)


def test_a_stream_goes_on_behind_its_last_token(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        handle = submit(rig)
        await rig.until(lambda s: bool(s.held))
        rig.scheduler.send(Tokens(handle.request_id, counted_up(PROMPT, 2)))
        await have(handle, 2)
        await end(rig)
        async with successor(rig) as second:
            assert await tokens_of(handle) == counted_up(PROMPT, COUNT)
            (again,) = second.submits
            assert again.output_ids == counted_up(PROMPT, 2) and again.token_ids == PROMPT
            assert rig.context.scheduler.open_request_count == 0

    run_with_rig(tmp_path, story, prepare=hold)


def test_samples_of_one_body_go_again_together_but_for_those_that_have_begun(
    tmp_path: Path,
) -> None:
    async def story(rig: Rig) -> None:
        asked = Asked(PROMPT, SamplingParams(max_new_tokens=COUNT, seed=1), 60.0)
        samples = [SampleId(f"r{seed}", seed) for seed in range(4)]
        handles = rig.context.scheduler.submit_samples(asked, samples)
        await rig.until(lambda s: len(s.held) == 4)
        rig.scheduler.send(Tokens(handles[1].request_id, counted_up(PROMPT, 1)))
        await have(handles[1], 1)
        await end(rig)
        async with successor(rig) as second:
            for handle in handles:
                assert await tokens_of(handle) == counted_up(PROMPT, COUNT)
            known = {one.origin.rid: one for one in second.submits}
            assert {rid: one.sampling.seed for rid, one in known.items()} == {
                f"r{seed}": seed for seed in range(4)
            }
            together = {rid for rid, one in known.items() if one.siblings}
            assert together == {"r0", "r2", "r3"}

    run_with_rig(tmp_path, story, prepare=hold)


def test_a_room_is_named_again_until_something_has_come(tmp_path: Path) -> None:
    room = Bootstrap("host", 8998, 77)

    async def story(rig: Rig) -> None:
        new, begun = submit(rig, "new", room), submit(rig, "begun", room)
        await rig.until(lambda s: len(s.held) == 2)
        rig.scheduler.send(Tokens(begun.request_id, counted_up(PROMPT, 1)))
        await have(begun, 1)
        await end(rig)
        async with successor(rig) as second:
            for handle in (new, begun):
                await tokens_of(handle)
            rooms = {one.origin.rid: one.bootstrap for one in second.submits}
            assert rooms == {"new": room, "begun": None}

    run_with_rig(tmp_path, story, prepare=hold)


def test_who_was_cancelled_is_answered_and_not_asked_for_again(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        left, stopped, stays = (submit(rig, rid) for rid in ("left", "stopped", "stays"))
        await rig.until(lambda s: len(s.held) == 3)
        await end(rig)
        left.cancel("has had enough")
        stopped.stop("a stop string matched")
        async with successor(rig) as second:
            assert await tokens_of(stays) == counted_up(PROMPT, COUNT)
            for handle, reason in ((left, "has had enough"), (stopped, "a stop string matched")):
                (last,) = [message async for message in handle]
                assert isinstance(last, Failed) and (last.kind, last.message) == ("aborted", reason)
            assert {one.origin.rid for one in second.submits} == {"stays"}

    run_with_rig(tmp_path, story, prepare=hold)


def test_what_was_sent_to_nobody_is_withdrawn_before_it_is_asked_again(tmp_path: Path) -> None:
    """The channel keeps it for whoever listens next, which may have begun by then."""

    async def story(rig: Rig) -> None:
        await end(rig)
        handle = submit(rig)
        first_id = handle.request_id
        async with successor(rig) as second:
            assert await tokens_of(handle) == counted_up(PROMPT, COUNT)
            kinds = [(type(m), m.request_id) for m in second.seen if isinstance(m, Submit | Cancel)]
            ids = [number for kind, number in kinds if kind is Submit]
            assert handle.request_id != first_id and ids[-1] == handle.request_id
            if first_id in ids:
                withdrawn = kinds.index((Cancel, first_id))
                assert kinds.index((Submit, first_id)) < withdrawn
                assert withdrawn < kinds.index((Submit, handle.request_id))

    run_with_rig(tmp_path, story, prepare=hold)


def test_late_output_under_an_old_number_reaches_nobody(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        handle = submit(rig)
        await rig.until(lambda s: bool(s.held))
        first_id = handle.request_id
        await end(rig)
        async with successor(rig) as second:
            second.holds = True
            await seen(second, lambda s: bool(s.submits))
            second.send(Tokens(first_id, [299]))
            withdrawn = Cancel(first_id, "already answered")
            await seen(second, lambda s: withdrawn in s.cancels)
            assert not handle.is_ended or await tokens_of(handle) == counted_up(PROMPT, COUNT)
            assert 299 not in handle.output_ids

    run_with_rig(tmp_path, story, prepare=hold)


def test_it_has_as_much_time_as_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.frontend.requests.scheduler_client.WATCH_INTERVAL_S", 1e6)
    clock = ManualClock(100.0)

    async def story(rig: Rig) -> None:
        handle = submit(rig)
        await rig.until(lambda s: bool(s.held))
        await end(rig)
        clock.advance(2.0)
        async with successor(rig) as second:
            await tokens_of(handle)
            assert [one.budget_s for one in second.submits] == [58.0]

    run_with_rig(tmp_path, story, prepare=hold, clock=clock)


def test_a_server_that_drains_tells_its_new_scheduler_so(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        client = rig.context.scheduler
        client.begin_drain()
        await rig.until(lambda s: Drain() in s.seen)
        await end(rig)
        async with successor(rig) as second:
            await seen(second, lambda s: Drain() in s.seen)

    run_with_rig(tmp_path, story, prepare=hold)


def test_the_same_scheduler_that_says_again_who_it_is_changes_nothing(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        handle = submit(rig)
        await rig.until(lambda s: bool(s.held))
        rig.scheduler.send(rig.scheduler.info)
        await rig.context.scheduler.get_state()
        rig.scheduler.release()
        assert await tokens_of(handle) == counted_up(PROMPT, COUNT)
        assert len(rig.scheduler.submits) == 1

    run_with_rig(tmp_path, story, prepare=hold)
