"""What proves that a lost prefill server writes no more, and when its pages come back."""

from __future__ import annotations

import pytest

from tests.sim.node import Node
from tests.sim.world import World

PROMPT = list(range(20, 60))


def lose_a_writer(
    transport: str,
    hosts: tuple[str, ...] = ("here",),
    our_hosts: tuple[str, ...] = ("here",),
) -> tuple[World, Node]:
    """A prefill server dies in a transfer, and our workers have not closed its connection yet."""
    world = World(seed=1)
    world.transport = transport
    prefill = world.add("p0", "prefill", 4, 64)
    decode = world.add("d0", "decode", 4, 64)
    decode.links = ["p0:1"]
    prefill.host_ids, decode.host_ids = hosts, our_hosts
    prefill.boot()
    decode.boot()
    world.start_ticks()
    world.run(world.now + 1.0)
    world.submit(decode, PROMPT, 4)
    while not decode.core.account.pool.used_count(0):
        world.run(world.now + 0.001)
    decode.worker.stop()
    prefill.crash()
    world.run(world.now + 0.1)
    return world, decode


def test_over_tcp_the_end_of_a_process_frees_no_page_that_its_last_bytes_may_reach() -> None:
    world, decode = lose_a_writer("tcp")
    pool = decode.core.account.pool
    assert pool.quarantined_count(0) > 0
    decode.worker.go_on()
    world.run(world.now + 0.1)
    assert pool.quarantined_count(0) == 0


@pytest.mark.parametrize("transport", ["tcp", "posix"])
def test_pages_of_a_writer_that_is_gone_come_back_once_its_connection_is_closed(
    transport: str,
) -> None:
    world, decode = lose_a_writer(transport)
    decode.worker.go_on()
    world.run(world.now + 0.1)
    pool = decode.core.account.pool
    assert (pool.quarantined_count(0), pool.used_count(0)) == (0, 0)


@pytest.mark.parametrize("our_hosts", [("here",), ("here", "there")])
def test_the_end_of_those_ranks_that_can_be_watched_is_no_proof_for_those_that_cannot(
    our_hosts: tuple[str, ...],
) -> None:
    """A rank on another machine shares memory with ours there, if there is one."""
    world, decode = lose_a_writer("posix", ("here", "there"), our_hosts)
    decode.worker.go_on()
    world.run(world.now + 0.1)
    is_proved = our_hosts == ("here",)
    assert (decode.core.account.pool.quarantined_count(0) == 0) is is_proved
