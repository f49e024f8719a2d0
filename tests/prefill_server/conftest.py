"""What the tests of a prefill server's core begin with."""

from __future__ import annotations

import pytest

from tests.sim.world import World


@pytest.fixture
def world() -> World:
    """A connected pair at rest, at time 3."""
    world = World(seed=1)
    world.add("p0", "prefill", 4, 64)
    world.add("d0", "decode", 4, 64).links = ["p0:1"]
    for node in world.nodes.values():
        node.boot()
    world.start_ticks()
    world.run(3.0)
    return world
