"""Requests that change servers in the midst of all that goes wrong."""

from __future__ import annotations

import pytest

from tests.sim.__main__ import has_moves
from tests.sim.story import run_story

pytestmark = pytest.mark.slow
SEEDS = [seed for seed in range(80) if has_moves(seed)]


@pytest.mark.parametrize("seed", SEEDS[6:12])
def test_whatever_breaks_who_moves_is_answered_once_and_right(seed: int) -> None:
    run_story(seed, has_moves=True)


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_without_accidents_who_moves_comes_to_its_end(seed: int) -> None:
    world = run_story(seed, has_accidents=False, has_moves=True)
    moved = [client for client in world.clients.values() if client.is_moved]
    wanted = [client for client in moved if not client.is_cancelled]
    assert [one.failure for one in wanted if one.finals != ["finished"]] == []
    assert not world.tally["requests that followed a crash"]
