"""Stories of servers that are paused, and of servers that get other weights: whatever goes wrong
meanwhile, each request ends once, and none is answered from a cache of other weights."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim import settings
from tests.sim.node import Node
from tests.sim.story import run_story

PAUSE_SEEDS = range(8)
# 2086: a decode server whose transfer could not settle is refused by its writer for other weights.
UPDATE_SEEDS = (*range(100, 108), 2086)


@pytest.mark.parametrize("seed", PAUSE_SEEDS)
def test_pauses_lose_no_request_whatever_else_goes_wrong(seed: int) -> None:
    world = run_story(seed, has_pauses=True, has_two_steps=seed % 2 == 1, has_moves=seed % 4 == 2)
    assert world.tally["pauses"] > 0


@pytest.mark.parametrize("seed", range(4))
def test_without_accidents_a_pause_fails_nobody(seed: int) -> None:
    world = run_story(seed, has_accidents=False, has_pauses=True)
    failures = [
        client.failure
        for client in world.clients.values()
        if client.role == "decode" and not client.is_cancelled and not client.is_orphan
        if client.finals != ["finished"]
    ]
    assert [text for text in failures if not text.startswith("transfer_corrupted")] == []


@pytest.mark.parametrize("seed", UPDATE_SEEDS)
def test_no_cache_of_other_weights_is_read_whatever_else_goes_wrong(seed: int) -> None:
    world = run_story(
        seed, has_updates=True, has_pauses=seed % 2 == 1, upgrade_share=0.0, switch_share=0.0
    )
    assert world.tally["weights updated"] > 0
    assert len({node.weight_version for node in world.nodes.values()}) == 1


def test_servers_that_compare_no_versions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if weights were not part of the fingerprint."""

    def nameless(node: Node) -> dict[str, str]:
        return {"model": "sim"}

    monkeypatch.setattr(settings, "fingerprint_of", nameless)
    found: Counter[bool] = Counter()
    for seed in UPDATE_SEEDS:
        try:
            run_story(seed, has_accidents=False, has_updates=True)
        except AssertionError:
            found[True] += 1
            break
    assert found[True]
