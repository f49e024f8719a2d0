"""The port of a stream stores what is right, to the byte, and nothing of what is not."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.transport.stream_fuzz import World, frame, store, try_case, wait_idle

CASE_COUNT = 500


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


@pytest.mark.slow
def test_mutated_frames_store_what_the_slow_reader_stores(world: World) -> None:
    for seed in range(CASE_COUNT):
        try_case(world, seed)


def test_right_frames_are_stored_and_acknowledged(world: World) -> None:
    rng = random.Random(1)
    data = b"".join(frame(rng, index) for index in (1, 2, 3))
    expected = [region.copy() for region in world.regions()]
    assert store(data, expected) == 3
    assert world.ask(world.hello() + data) == [0, 1, 2, 3]
    wait_idle(world)
    assert all((a == b).all() for a, b in zip(world.regions(), expected, strict=True))


def test_the_secret_of_another_target_opens_nothing(world: World) -> None:
    other = World()
    try:
        assert world.ask(other.hello() + frame(random.Random(1), 1)) == []
    finally:
        other.close()


def test_frames_without_tls_are_nothing_where_it_is_asked_for() -> None:
    world = World(is_encrypted=True)
    try:
        before = [region.copy() for region in world.regions()]
        heard = world.ask(world.hello() + frame(random.Random(1), 1))
        assert 0 not in heard, "an alert at most"
        wait_idle(world)
        assert all((a == b).all() for a, b in zip(world.regions(), before, strict=True))
    finally:
        world.close()
