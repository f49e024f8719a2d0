"""Requests that change servers: they go on at another one, or at the one that follows a crash.

As frontends do it: a request is taken from its scheduler before another one begins with it, and
what its client has had goes along. Knows nothing of what else goes wrong.
"""

from __future__ import annotations

import random
from functools import partial

from common.prefix_digests import extend_digests
from common.protocol.frontend import Cancel, Submit
from common.request import SamplingParams
from common.scheduling.events import FromFrontend
from tests.sim import wire
from tests.sim.client import DIGEST_TOKENS, Client, can_follow
from tests.sim.node import Node
from tests.sim.world import World

MOVE_COUNTS = (1, 4)
FIRST_AT, LAST_AT = 0.8, 9.0
POLL_S = 0.01


def plan_moves(world: World, rng: random.Random) -> None:
    """Now and then a server has all of its requests go on elsewhere, as one that drains."""
    world.follows_crashes = True
    world.follow = partial(follow, world)
    decodes = [node for node in world.nodes.values() if node.role == "decode"]
    for _ in range(rng.randint(*MOVE_COUNTS)):
        at = rng.uniform(FIRST_AT, LAST_AT)
        world.after(at, partial(_move_all, world, rng, rng.choice(decodes), decodes))


def _move_all(world: World, rng: random.Random, source: Node, decodes: list[Node]) -> None:
    targets = [
        node for node in decodes if node is not source and node.is_up and node.role == "decode"
    ]
    if not targets or not source.is_up:
        return
    for client in list(world.clients.values()):
        target = rng.choice(targets)
        if client.node == source.name and can_follow(client) and _fits(client, target):
            cancel = Cancel(client.request_id, "goes on elsewhere", is_moved=True)
            client.node, client.is_moved = target.name, True  # what the source says now is late
            source.feed(FromFrontend(wire.from_frontend(cancel)))
            world.tally["requests that moved"] += 1
            world.tally["streams that moved"] += bool(client.output)
            go_on(world, client, target)


def _fits(client: Client, node: Node) -> bool:
    return len(client.prompt) + client.max_new_tokens <= node.request_token_max


def go_on(world: World, client: Client, node: Node) -> None:
    """Ask a server for what is left of a request, in what is left of its time."""
    client.budget_s = max(0.0, client.submitted_at + client.budget_s - world.now)
    client.submitted_at, client.node = world.now, node.name
    client.token_max = node.request_token_max
    submit = Submit(
        client.request_id,
        list(client.prompt),
        SamplingParams(max_new_tokens=client.max_new_tokens, seed=client.sample_seed),
        client.budget_s,
        prefix_digests=extend_digests(client.seed, client.prompt, DIGEST_TOKENS),
        output_ids=list(client.output),
    )
    node.feed(FromFrontend(wire.from_frontend(submit)))


def follow(world: World, node: Node) -> None:
    """A server has come back: it is asked for what was open when it crashed."""
    for client in world.clients.values():
        if client.node == node.name and client.is_waiting_for_server:
            client.is_waiting_for_server = False
            client.is_moved = True
            world.tally["requests that followed a crash"] += 1
            go_on(world, client, node)
