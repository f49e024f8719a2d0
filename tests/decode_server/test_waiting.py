"""Whose turn it is: first come, first served, and those that had begun before all others."""

from __future__ import annotations

import pytest

from common.prefix_digests import DIGEST_NBYTES
from common.scheduling.prefix_cache import Match, PrefixCache
from decode_server.admission import VAIN_COUNT_MAX
from decode_server.scheduler import DecodeScheduler
from tests.decode_server.asked import prompts_asked_for
from tests.sim.world import connected_pair


def test_requests_of_a_lost_server_are_asked_for_again_in_their_order() -> None:
    world = connected_pair(decode_page_count=256)
    asked = prompts_asked_for(world)
    prefill = world.nodes["p0"]
    for index in range(6):
        world.submit(world.nodes["d0"], list(range(20 + index, 60)), 1)
    prefill.crash()
    prefill.boot()
    world.run(world.now + 3.0)
    assert [first for first in asked if first] == [*range(20, 26), *range(20, 26)]


def test_a_round_ends_however_long_the_queue_is(monkeypatch: pytest.MonkeyPatch) -> None:
    world = connected_pair(decode_page_count=64)
    match, looks = PrefixCache.match, [0]

    def count_match(self: PrefixCache, *arguments: object) -> Match:
        looks[0] += 1
        return match(self, *arguments)  # type: ignore[arg-type]

    node = world.nodes["d0"]
    clients = [
        world.submit(
            node, list(range(20 + index, 60 + index)), 4, seed=bytes([index] * DIGEST_NBYTES)
        )
        for index in range(60)
    ]
    core = node.core
    assert isinstance(core, DecodeScheduler) and len(core.requests.queue) > 40
    monkeypatch.setattr(PrefixCache, "match", count_match)
    core.schedule(world.now)
    # Looked for what is here to go on from, and for what need not be sent.
    assert 0 < looks[0] <= 2 * VAIN_COUNT_MAX
    monkeypatch.undo()
    world.run(world.now + 60.0)
    assert all(client.finals == ["finished"] for client in clients)
