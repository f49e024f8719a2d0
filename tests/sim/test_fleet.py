"""A fleet under more load than it can carry: nobody is refused while there is room, and the work is
spread evenly over the prefill servers."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.fleet import (
    MIDDLE_SIZE,
    MIDDLE_WAITING_COUNT,
    STEP_S,
    Fleet,
    fleet_of,
    play,
)
from tests.sim.verdict import judge

SIZE = 8
QUEUE_MAX = 64
OVERLOAD = 3
LOAD_S = 2.5
BUDGET_S = 6.0
# Places in a queue that a message about them is on its way for.
ON_ITS_WAY_COUNT = 8


@pytest.mark.slow
def test_under_three_times_the_load_nobody_is_refused_while_there_is_room() -> None:
    fleet = Fleet(SIZE, QUEUE_MAX)
    before = fleet.finished_counts
    fleet.load(OVERLOAD, LOAD_S, BUDGET_S)
    fleet.world.run(fleet.world.now + BUDGET_S + 1.0)
    judge(fleet.world)
    failures = Counter(client.failure.partition(":")[0] for client in fleet.world.clients.values())
    assert set(failures) == {"", "queue_full"}
    assert fleet.refused.total() == failures["queue_full"] > 0
    assert min(fleet.refused) >= QUEUE_MAX - ON_ITS_WAY_COUNT, fleet.refused
    shares = [after - then for after, then in zip(fleet.finished_counts, before, strict=True)]
    mean = sum(shares) / SIZE
    assert 0.8 * mean <= min(shares) and max(shares) <= 1.2 * mean, shares
    assert mean >= 0.9 * LOAD_S / STEP_S, "no server was idle meanwhile"


@pytest.mark.slow
def test_many_that_come_at_once_are_spread_evenly_and_answered_in_time() -> None:
    """Half of them at one decode server. `python -m tests.sim --fleet` plays the largest one."""
    shares, failures = play(fleet_of(MIDDLE_SIZE), MIDDLE_WAITING_COUNT)
    mean = sum(shares) / MIDDLE_SIZE
    assert 0.8 * mean <= min(shares) and max(shares) <= 1.2 * mean, shares
    assert not failures
