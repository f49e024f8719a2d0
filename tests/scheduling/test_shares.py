"""What each prompt gets of a step: short ones pass a long one, which advances with every step."""

from __future__ import annotations

import random

import pytest

from common.scheduling.chunks import share_step
from tests.scheduling.test_steps_ahead import CHUNK_MAX, Rig

BUDGET = 100


def shares(*left: int, budget: int = BUDGET) -> list[int]:
    return share_step(left, left, budget)


def test_one_prompt_has_the_whole_step() -> None:
    assert shares(1000) == [BUDGET]
    assert shares(30) == [30]


def test_short_prompts_pass_a_long_one_within_half_of_the_step() -> None:
    assert shares(1000, 20) == [80, 20]
    assert shares(1000, 20, 30, 40) == [50, 20, 30, 0]
    assert shares(1000, 40, 30) == [50, 20, 30], "shortest first"


def test_prompts_of_about_the_same_length_are_computed_one_after_the_other() -> None:
    """To share the step between them would make the first one later and none earlier."""
    assert shares(200, 200, 150, 101) == [100, 0, 0, 0]
    assert shares(60, 60, 60) == [60, 40, 0]


def test_what_the_shorter_ones_leave_goes_by_age() -> None:
    assert shares(1000, 900, 10) == [90, 0, 10]
    assert shares(30, 900, 10) == [30, 60, 10]


def test_what_a_prompt_can_not_take_goes_to_the_next() -> None:
    assert share_step([1000, 1000, 300], [7, 20, 300], BUDGET) == [7, 20, 73]


@pytest.mark.parametrize("seed", range(20))
def test_a_step_is_full_and_the_oldest_has_half_of_it(seed: int) -> None:
    rng = random.Random(seed)
    left = [rng.choice((1, 5, 40, 300, 5000)) for _ in range(rng.randint(1, 12))]
    most = [rng.randint(1, count) for count in left]
    budget = rng.choice((1, 2, 7, 100, 8192))
    counts = share_step(left, most, budget)
    assert sum(counts) == min(budget, sum(most))
    assert all(0 <= count <= limit for count, limit in zip(counts, most, strict=True))
    assert counts[0] >= min(most[0], (budget + 1) // 2)


def test_a_long_prompt_ends_however_many_short_ones_keep_coming() -> None:
    """Twice as late as alone at most, and short ones wait no longer than their own load makes
    them: what comes with every step takes less than half of it."""
    long, short, coming = 100 * BUDGET, BUDGET // 5, 2
    waiting: list[tuple[int, int]] = []
    ended_at: list[int] = []
    step = 0
    while long:
        waiting += [(step, short)] * coming
        counts = share_step([long, *(left for _, left in waiting)],
                            [long, *(left for _, left in waiting)], BUDGET)  # fmt: skip
        long -= counts[0]
        rest = [
            (came_at, left - count)
            for (came_at, left), count in zip(waiting, counts[1:], strict=True)
        ]
        ended_at += [step - came_at for came_at, left in rest if not left]
        waiting = [entry for entry in rest if entry[1]]
        step += 1
    assert step <= 200
    assert max(ended_at) == 0, "each is computed in the step that it came to"
    assert len(ended_at) == coming * step


def test_a_batch_computes_a_short_prompt_beside_a_long_one() -> None:
    rig = Rig(is_prompt_only=True)
    rig.add(1, 10 * CHUNK_MAX)
    rig.plan()
    rig.add(2, 3)
    rig.end()
    while rig.sent:
        rig.end()
    step = rig.plan()
    assert step is not None
    chunks = {chunk.request_id: (chunk.stop - chunk.start, chunk.is_last) for chunk in step.chunks}
    assert chunks == {1: (CHUNK_MAX - 3, False), 2: (3, True)}
