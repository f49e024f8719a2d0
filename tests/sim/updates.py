"""Servers whose workers take on other weights, one server after the other.

What the loop around a core does then, in virtual time: all stands still, what is on its way arrives
or is cut off, and another scheduler takes the workers on. The caches of two versions differ in
every value (`SimCache.version`), so one that is read under the other gives another token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from common.protocol.frontend import Pause
from common.runtime.scheduler_loop import ANSWERS_TIMEOUT_S, SETTLE_TIMEOUT_S
from common.scheduling.events import DrainEnded, FromFrontend, Stopping
from tests.sim import wire
from tests.sim.leaving import POLL_S
from tests.sim.moves import follow
from tests.sim.node import Node
from tests.sim.succession import START_S, hand_over
from tests.sim.world import World

ROUND_COUNTS = (1, 2)
FIRST_AT, LAST_AT = 0.8, 6.0
# Between two servers of a round.
GAPS_S = (0.0, 1.5)
CATCH_UP_AT = 15.5  # when nothing goes wrong any more
CAUGHT_UP_AT = 25.0  # the longest hand-over, and connections made anew


def plan_updates(world: World, rng: random.Random) -> None:
    """All servers get the same versions, in any order; some are paused meanwhile."""
    world.follows_crashes = True
    world.follow = partial(follow, world)
    nodes = list(world.nodes.values())
    at = rng.uniform(FIRST_AT, LAST_AT)
    world.calm_until = min(world.calm_until, at)  # what a scheduler knew of rooms goes with it
    for version in range(1, 1 + rng.randint(*ROUND_COUNTS)):
        is_paused = rng.random() < 0.5
        for node in rng.sample(nodes, len(nodes)):
            if is_paused:
                world.after(at - 0.05, node.pause)
            world.after(at, partial(update, node, version, rng.uniform(*START_S)))
            at += rng.uniform(*GAPS_S)
        at += 1.0
        for node in nodes:
            world.after(at, node.go_on)
    world.after(CATCH_UP_AT, partial(_catch_up, nodes))
    world.after(CAUGHT_UP_AT, lambda: None)


def _catch_up(nodes: list[Node]) -> None:
    """Those that could not be updated when it was their turn."""
    for node in nodes:
        if node.is_up and node.weight_version != node.next_weight_version:
            update(node, node.next_weight_version, START_S[0])


def update(node: Node, version: int, start_s: float) -> None:
    """Nothing comes of it if the server ends in another way meanwhile; it is made good then."""
    node.next_weight_version = version
    if not node.is_up or node.is_frozen:
        return
    world, life = node.world, node.life
    world.tally["weights updated"] += 1

    def wait(is_busy: Callable[[], bool], until: float, go_on: Callable[[], None]) -> None:
        if not node.is_up or node.life != life:
            return
        if node.is_frozen or (is_busy() and world.now < until):
            world.after(POLL_S, partial(wait, is_busy, until, go_on))
        else:
            go_on()

    def is_unsettled() -> bool:
        return not node.core.transfers.is_settled

    def cut_off() -> None:
        node.is_cut_off = True
        node.feed(DrainEnded())
        wait(is_unsettled, world.now + SETTLE_TIMEOUT_S, say_last_words)

    def say_last_words() -> None:
        node.feed(Stopping())
        until = world.now + ANSWERS_TIMEOUT_S
        wait(lambda: node.core.transfers.has_peers, until, leave)

    def leave() -> None:
        is_quiet = node.core.transfers.is_quiet
        world.tally["updates with pages not quiet"] += not is_quiet
        node.lose_clients()
        hand_over(node, start_s, is_quiet=is_quiet)

    node.feed(FromFrontend(wire.from_frontend(Pause(0))))
    wait(is_unsettled, world.now + SETTLE_TIMEOUT_S, cut_off)
