"""The pair under a virtual clock: every request ends once and right, every page comes back."""

from __future__ import annotations

import pytest

from tests.sim.story import run_story


@pytest.mark.parametrize("seed", range(20))
def test_without_accidents_every_request_is_answered_right(seed: int) -> None:
    world = run_story(seed, has_accidents=False)
    expected = [
        client
        for client in world.clients.values()
        if not client.is_cancelled
        and not client.is_orphan
        and world.nodes[client.node].role == "decode"
    ]
    assert [client.failure for client in expected if client.finals != ["finished"]] == []


@pytest.mark.parametrize("seed", range(100))
def test_whatever_breaks_every_request_ends_once_and_no_page_is_lost(seed: int) -> None:
    run_story(seed)
