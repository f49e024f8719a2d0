"""Servers of two releases in one story, and what the first one lacks."""

from __future__ import annotations

import pytest

from tests.protocol.test_recorded import lines_of
from tests.sim.releases import FIRST, LATER_FIELDS, LATER_KINDS
from tests.sim.story import run_story


def test_nothing_that_the_first_release_said_is_taken_for_later() -> None:
    later = {kind.__name__: fields for kind, fields in LATER_FIELDS.items()}
    for line in lines_of(FIRST):
        name, fields = str(line["message"]), line["fields"]
        assert isinstance(fields, dict) and not fields.keys() & {*later.get(name, ())}
        assert name not in {kind.__name__ for kind in LATER_KINDS}


@pytest.mark.parametrize("seed", range(10))
def test_an_upgrade_without_accidents_fails_no_plain_request(seed: int) -> None:
    """Servers of two releases answer right, and one that is upgraded drains first. Who asks while
    no server of a role is there is refused at once."""
    world = run_story(seed, has_accidents=False, upgrade_share=1.0)
    assert world.tally["with servers of two releases"]
    plain = [client for client in world.clients.values() if client.room is None]
    failed = [one.failure for one in plain if one.failure and not one.is_cancelled]
    assert failed == []
