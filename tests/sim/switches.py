"""Servers that take on the other role, over the same workers.

One drains and its scheduler ends; that of the other role takes the workers on, and some time later
the lists of decode servers name it, or do no more. Some servers switch back; where there is one of
each role, the two change places. Knows nothing of what goes wrong meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from common.transfers.writers import VERSION_OF_SUCCESSION
from tests.sim.accidents import stop_worker
from tests.sim.leaving import drain_and_stop, drain_s_of
from tests.sim.node import Node
from tests.sim.succession import PATIENCE_S, POLL_S, START_S, hand_over
from tests.sim.world import World

SWITCH_SHARE = 0.3
FIRST_AT, LAST_AT = 0.8, 8.0
BACK_S = (0.2, 3.0)
# How much later a decode server's list is another.
LISTED_S = (0.0, 1.5)
# Of decode servers that switch, how many in whose writers stand still meanwhile, and for how long.
STRUCK_SHARE = 0.4
STRUCK_S = (0.5, 5.0)
OTHER = {"prefill": "decode", "decode": "prefill"}


def plan_switches(world: World, rng: random.Random, share: float) -> None:
    if rng.random() >= share:
        return
    world.knows_who_leaves = True
    nodes = list(world.nodes.values())
    counts = {role: sum(node.role == role for node in nodes) for role in OTHER}
    at = rng.uniform(FIRST_AT, LAST_AT)
    world.calm_until = min(world.calm_until, at)
    if max(counts.values()) == 1:
        for node in nodes:
            world.after(at + rng.uniform(0.0, 0.3), partial(_switch, node, rng, is_alone=True))
        return
    chosen = rng.choice([node for node in nodes if counts[node.role] > 1])
    world.after(at, partial(_switch, chosen, rng))
    if rng.random() < 0.7:
        world.after(at + rng.uniform(*BACK_S), partial(_switch, chosen, rng))


def _switch(node: Node, rng: random.Random, *, is_alone: bool = False) -> None:
    """is_alone: though nobody else has its role."""
    world, role = node.world, OTHER[node.role]
    others = [other for other in world.nodes.values() if other is not node]
    has_others = any(other.is_open and other.role == node.role for other in others)
    is_able = node.is_open and node.release >= VERSION_OF_SUCCESSION
    if not is_able or not (has_others or is_alone):
        return
    world.tell(node.name, f"is to be a {role} server")

    def end(is_cut_off: bool) -> None:
        is_quiet = node.core.transfers.is_quiet
        world.tally["roles switched"] += 1
        world.tally["switches that cut requests off"] += is_cut_off
        world.tally["switches with pages not quiet"] += not is_quiet
        hand_over(node, rng.uniform(*START_S), change, is_quiet=is_quiet)
        node.is_unsettled = not is_quiet

    def change() -> None:
        node.role, node.wanted = role, None
        node.links = prefill_links(world)
        for other in others:
            world.after(rng.uniform(*LISTED_S), partial(_list_prefills, other))

    def begin() -> None:
        drain_and_stop(node, drain_s_of(node, rng), end, settles=True)

    if role == "prefill" and world.is_hurried and rng.random() < STRUCK_SHARE:
        _strike(node, others, rng, world.now + PATIENCE_S, begin)
    else:
        begin()


def _strike(
    node: Node, others: list[Node], rng: random.Random, until: float, then: Callable[[], None]
) -> None:
    """The writers of a decode server stand still in the midst of a transfer, if there is one."""
    world = node.world
    if node.is_up and node.core.transfers.incoming.is_quiet and world.now < until:
        world.after(POLL_S, partial(_strike, node, others, rng, until, then))
        return
    for other in others:
        stop_worker(world, other, rng.uniform(*STRUCK_S))
    if node.is_open:
        then()


def _list_prefills(node: Node) -> None:
    """A decode server is told which prefill servers there are now."""
    node.links = prefill_links(node.world)
    if node.role == "decode":
        node.want_all()


def prefill_links(world: World) -> list[str]:
    return [f"{node.name}:1" for node in world.nodes.values() if node.role == "prefill"]
