"""Schedulers that end under workers which live: another one takes them on, of the same role or of
the other.

Its workers end what the last one began, and keep their memory. Peers that were let in may go on
writing there until they have closed their end: whatever lands after the next scheduler believes
that nobody does any more is an error. Knows nothing of what else goes wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from common.transfers.writers import VERSION_OF_SUCCESSION
from tests.sim.node import Node
from tests.sim.world import World

SUCCESSION_SHARE = 0.4
COUNTS = (1, 3)
FIRST_AT, LAST_AT = 0.8, 9.0
# A process that starts, and binds its sockets.
START_S = (0.005, 0.5)
PATIENCE_S, POLL_S = 3.0, 0.003


def plan_successions(world: World, rng: random.Random) -> None:
    """In some stories schedulers crash, of any server."""
    if rng.random() >= SUCCESSION_SHARE:
        return
    for _ in range(rng.randint(*COUNTS)):
        node = rng.choice(list(world.nodes.values()))
        start_s, at = rng.uniform(*START_S), rng.uniform(FIRST_AT, LAST_AT)
        until = at + PATIENCE_S if rng.random() < 0.7 else at
        world.after(at, partial(_crash_when_busy, node, start_s, until))


def _crash_when_busy(node: Node, start_s: float, until: float) -> None:
    """Rather while something is written here."""
    world = node.world
    is_written = node.is_up and not node.core.transfers.incoming.is_quiet
    if is_written or world.now >= until:
        crash_scheduler(node, start_s)
    else:
        world.after(POLL_S, partial(_crash_when_busy, node, start_s, until))


def crash_scheduler(node: Node, start_s: float) -> None:
    """start_s: until the next one asks for the workers. In the first release none does: the whole
    server ends."""
    if not node.is_up or node.is_frozen:
        return
    if node.release < VERSION_OF_SUCCESSION:
        node.crash()
        node.world.after(start_s, lambda: node.is_up or node.boot())
        return
    node.world.tell(node.name, "its scheduler crashes")
    node.world.tally["schedulers crashed"] += 1
    node.lose_clients()
    hand_over(node, start_s)


def hand_over(
    node: Node,
    start_s: float,
    change: Callable[[], None] = lambda: None,
    *,
    is_quiet: bool = False,
) -> None:
    """The scheduler is gone, and after a while another one asks for the workers. change: makes the
    server what it is to be from then on. is_quiet: the last one said that no peer can write here
    any more."""
    world, worker = node.world, node.worker
    node.harvest()
    node.is_up = False
    worker.cache.owner = worker.tier.owner = None

    def awaits_fences() -> bool:
        is_next_there = node.is_up and node.worker is not worker
        return not is_next_there or bool(node.core.transfers.writers.trouble)

    def take_over() -> None:
        if node.is_up or node.worker is not worker or worker.process.is_dead:
            return  # the whole server was started anew meanwhile
        world.tally["schedulers that followed"] += 1
        change()
        node.boot(predecessor=worker)

    worker.transfers.awaits_fences = awaits_fences
    world.after(start_s, lambda: worker.end_session(take_over, is_quiet=is_quiet))
