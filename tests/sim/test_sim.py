"""The pair under a virtual clock: every request ends once and right, every page comes back."""

from __future__ import annotations

import pytest

from tests.sim.story import run_story


@pytest.mark.parametrize("seed", range(20))
def test_without_accidents_every_request_is_answered_right(seed: int) -> None:
    world = run_story(seed, has_accidents=False)
    uncancelled = [
        c
        for c in world.clients.values()
        if not c.is_cancelled and world.nodes[c.node].role == "decode"
    ]
    paired = [c for c in uncancelled if "rendezvous" not in c.failure]
    assert [c.failure for c in paired if c.finals != ["finished"]] == []


@pytest.mark.parametrize("seed", range(100))
def test_whatever_breaks_every_request_ends_once_and_no_page_is_lost(seed: int) -> None:
    run_story(seed)
