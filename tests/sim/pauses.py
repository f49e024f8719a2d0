"""Servers that are told to stand still for a while, and to go on. Knows nothing of what goes wrong
meanwhile."""

from __future__ import annotations

import random
from functools import partial

from tests.sim.node import Node
from tests.sim.world import World

COUNTS = (1, 3)
FIRST_AT, LAST_AT = 0.8, 8.0
PAUSE_S = (0.05, 4.0)
# Of pauses, how many are of all servers at once.
TOGETHER_SHARE = 0.3


def plan_pauses(world: World, rng: random.Random) -> None:
    nodes = list(world.nodes.values())
    for _ in range(rng.randint(*COUNTS)):
        at, seconds = rng.uniform(FIRST_AT, LAST_AT), rng.uniform(*PAUSE_S)
        chosen = nodes if rng.random() < TOGETHER_SHARE else [rng.choice(nodes)]
        for node in chosen:
            begin = partial(node.pause, retracts=rng.random() < 0.5)
            world.after(at + rng.uniform(0.0, 0.1), begin)
            world.after(at + seconds + rng.uniform(0.1, 0.2), node.go_on)


def pause(node: Node, *, retracts: bool = False) -> None:
    node.pause(retracts=retracts)


def go_on(node: Node) -> None:
    node.go_on()
