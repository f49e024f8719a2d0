"""Servers of the first release beside those of this one, and upgrades of one after the other.

A server that is upgraded drains, ends, and comes back as this release. Some never are. Knows
nothing of what the releases say to each other.
"""

from __future__ import annotations

import random
from functools import partial

from common.protocol.peer import PROTOCOL_VERSION
from tests.sim import releases
from tests.sim.leaving import POLL_S, drain_and_stop, drain_s_of
from tests.sim.node import Node
from tests.sim.world import World

UPGRADE_SHARE = 0.3
# Stories in which one server after the other is upgraded.
ROLLING_SHARE = 0.7
FIRST_AT, LAST_AT = 0.8, 10.0
# A server is away for so long, and the next one waits for so long.
LAST_WORDS_S = 0.05
AWAY_S = (0.01, 0.6)
PAUSE_S = (0.0, 1.0)


def plan_upgrades(world: World, rng: random.Random, share: float) -> None:
    if rng.random() >= share:
        return
    world.tally["with servers of two releases"] += 1
    nodes = list(world.nodes.values())
    role = rng.choice(("prefill", "decode", ""))
    for node in nodes:
        is_old = rng.random() < 0.5 if not role else node.role == role
        node.release = releases.FIRST if is_old else PROTOCOL_VERSION
    if rng.random() < ROLLING_SHARE:
        rng.shuffle(nodes)
        world.knows_who_leaves = True
        at = rng.uniform(FIRST_AT, LAST_AT / 2)
        world.calm_until = min(world.calm_until, at)
        world.after(at, partial(_upgrade_next, world, rng, nodes))


def _upgrade_next(world: World, rng: random.Random, nodes: list[Node]) -> None:
    """nodes: that are to be looked at, in this order."""
    left = [node for node in nodes if node.release == releases.FIRST]
    if not left or (world.now > LAST_AT and world.is_hurried):
        return
    node, life = left[0], left[0].life
    if not node.is_up:
        node.release = PROTOCOL_VERSION  # as that it comes back
    else:
        drain_and_stop(node, drain_s_of(node, rng), partial(_end, node, rng.uniform(*AWAY_S)))
    pause_s = rng.uniform(*PAUSE_S)

    def look() -> None:
        if node.life == life and node.is_up:
            world.after(POLL_S, look)
        else:
            world.after(pause_s, partial(_upgrade_next, world, rng, left))

    look()


def _end(node: Node, away_s: float, is_cut_off: bool) -> None:
    """Its processes end once their last words have left."""
    world, life = node.world, node.life
    world.tally["servers upgraded"] += 1
    world.tally["upgrades that cut requests off"] += is_cut_off
    node.is_frozen = True

    def crash() -> None:
        if node.is_up and node.life == life:
            node.crash()
            node.release = PROTOCOL_VERSION

    world.after(LAST_WORDS_S, crash)
    world.after(LAST_WORDS_S + away_s, lambda: node.is_up or node.boot())
