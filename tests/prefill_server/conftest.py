"""What the tests of a prefill server's core begin with."""

from __future__ import annotations

import pytest

from tests.sim.world import World, connected_pair


@pytest.fixture
def world() -> World:
    """A connected pair at rest, at time 3."""
    return connected_pair()
