"""Samples that are submitted together: each is told of until all have ended, and then no more."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.errors import RequestError
from common.frontend.bodies.sample import Sample, TextOptions
from common.frontend.requests.generation import Continuation, SampleGroup
from common.protocol.frontend import Tokens
from common.request import FinishKind, FinishReason, SamplingParams
from tests.frontend.frontend_rig import Rig, run_with_rig

END = FinishReason(FinishKind.LENGTH)


def sample(index: int, *stops: str) -> Sample:
    sampling = SamplingParams(max_new_tokens=3, seed=0)
    return Sample(index, f"r{index}", "", [5], sampling, TextOptions(stops=stops))


async def submit(rig: Rig, *samples: Sample) -> SampleGroup:
    """A group whose tokens the test sends itself."""
    rig.scheduler.holds = True
    group = SampleGroup(rig.context, samples, "")
    group.submit(is_streaming=True)
    rids = {one.rid for one in samples}
    await rig.until(lambda scheduler: rids <= {one.origin.rid for one in scheduler.submits})
    return group


def say(rig: Rig, rid: str, token_ids: list[int], finish: FinishReason | None = None) -> None:
    (submitted,) = [one for one in rig.scheduler.submits if one.origin.rid == rid]
    rig.scheduler.send(Tokens(submitted.request_id, token_ids, finish=finish))


async def grown(one: Continuation, token_count: int) -> None:
    while len(one.token_ids) < token_count:
        await asyncio.sleep(0)


def test_a_sample_that_ends_while_another_is_told_of_is_counted_once(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        async with await submit(rig, sample(0), sample(1)) as group:
            first, second = group.continuations
            say(rig, "r0", [10])
            say(rig, "r1", [10])
            await grown(second, 1)
            changes = group.changes()
            assert await anext(changes) == [first, second]
            say(rig, "r1", [11], END)  # while whoever reads is busy with those
            await grown(second, 2)
            assert await anext(changes) == [second] and not group.is_over
            say(rig, "r0", [11, 12], END)
            assert await anext(changes) == [first] and group.is_over
            with pytest.raises(StopAsyncIteration):
                await anext(changes)
            assert first.token_ids == [10, 11, 12]

    run_with_rig(tmp_path, story)


def test_a_stop_string_stops_the_engine_though_nobody_reads(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        text = rig.context.tokenizer.decode([40])
        async with await submit(rig, sample(0, text)):
            say(rig, "r0", [40])
            await rig.until(lambda scheduler: bool(scheduler.cancels))
            assert rig.scheduler.cancels[0].reason == "a stop string matched"

    run_with_rig(tmp_path, story)


def test_what_can_not_be_read_fails_its_body_and_nobody_else(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        async with await submit(rig, sample(0)) as group:
            submitted = rig.scheduler.submits[0]
            rig.scheduler.send(Tokens(submitted.request_id, [10], prompt_logprobs=[b"\xc1"]))
            with pytest.raises(RequestError, match="from the prefill server"):
                await anext(group.changes())
        async with await submit(rig, sample(1)) as group:
            say(rig, "r1", [10], END)
            (ended,) = [grown async for grown in group.changes()]
            assert [one.token_ids for one in ended] == [[10]]

    run_with_rig(tmp_path, story)


@contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_samples_are_freed_with_their_last_reader_and_need_no_collector(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        async with await submit(rig, sample(0)) as group:
            say(rig, "r0", [10], END)
            async for _ in group.changes():
                pass
        is_alive = weakref.ref(group)
        assert is_alive() is group
        del group
        assert is_alive() is None

    with without_collector():
        run_with_rig(tmp_path, story)
