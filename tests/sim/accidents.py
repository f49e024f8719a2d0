"""What goes wrong in a story: processes that end or stand still, links that fail, clients that go.

An accident is drawn when the story is planned, and ends before the story becomes quiet.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from common.scheduling.events import LinkBroke
from decode_server.scheduler import DecodeScheduler
from tests.sim.node import Node
from tests.sim.world import World

ACCIDENTS = (
    *("crash", "crash", "linger", "linger", "linger", "drain"),
    *("freeze", "stop worker", "stop server", "cut", "blink", "slow", "stall", "shaky", "echo"),
    *("abort storm", "frozen writer", "frozen writer", "frozen reader", "frozen reader"),
)
FIRST_AT = 1.0
LAST_AT = 9.5
# What is not mended by an accident is mended with the rest, 15 s after a story's begin.
OUTAGE_LAST_AT = 4.0
OUTAGE_REQUEST_COUNT = 8
OUTAGE_TOKENS = (100, 180)
STOPPED_FRONTEND_SHARE = 0.15
# How long, and how often, it is looked for a cache on its way back.
RETURN_PATIENCE_S = 3.0
RETURN_POLL_S = 0.002


def plan_accident(world: World, rng: random.Random, kinds: Sequence[str] = ACCIDENTS) -> None:
    """One of the kinds, at any time and place."""
    at = rng.uniform(FIRST_AT, LAST_AT)
    world.calm_until = min(world.calm_until, at)
    kind = rng.choice(kinds)
    nodes = list(world.nodes.values())
    node, other = rng.choice(nodes), rng.choice(nodes)
    world.tally[f"accident: {kind}"] += 1
    match kind:
        case "cut" | "slow" | "stall" | "shaky" | "echo":
            _plan_link(world, rng, kind, frozenset((node.name, other.name)), at)
        case "blink":
            _plan_blink(world, rng, at)
        case "frozen writer" | "frozen reader" | "abort storm":
            _plan_storm(world, rng, kind, node, at)
        case _:
            _plan_process(world, rng, kind, node, at)


def plan_stopped_frontends(world: World, rng: random.Random) -> None:
    """Now and then a frontend reads nothing for a while; for some that is too much to go on."""
    for node in world.nodes.values():
        if rng.random() < STOPPED_FRONTEND_SHARE:
            at, is_behind = rng.uniform(FIRST_AT, LAST_AT), rng.random() < 0.5
            world.after(at, partial(node.stop_frontend, is_behind=is_behind))
            world.after(at + rng.uniform(0.2, 4.0), node.resume_frontend)


def _plan_process(world: World, rng: random.Random, kind: str, node: Node, at: float) -> None:
    match kind:
        case "crash":
            world.after(at, lambda: node.is_up and node.crash())
            world.after(at + rng.uniform(0.1, 3.0), lambda: node.is_up or node.boot())
        case "linger":
            node = _rush(world, rng, at)
            world.after(at, lambda: node.is_up and node.worker.stop())
            crash_at = at + rng.choice((0.0, rng.uniform(0.0, 2.0)))
            linger_s = rng.uniform(0.5, 4.0)
            world.after(crash_at, lambda: node.is_up and node.crash(linger_s))
            world.after(crash_at + rng.uniform(0.05, 1.0), lambda: node.is_up or node.boot())
        case "drain":
            world.after(at, node.drain)
            ends_at = at + rng.uniform(0.2, 3.0)
            world.after(ends_at, lambda: node.is_up and node.is_draining and node.crash())
            world.after(ends_at + rng.uniform(0.1, 1.0), lambda: node.is_up or node.boot())
        case "freeze":
            world.after(at, node.freeze)
            world.after(at + rng.uniform(0.5, 4.0), lambda: node.is_up and node.thaw())
        case "stop worker":
            world.after(at, partial(stop_worker, world, node, rng.uniform(0.3, 5.0)))
        case "stop server":
            world.after(at, partial(stop_worker, world, node, rng.uniform(0.3, 5.0)))
            world.after(at, node.freeze)
            world.after(at + rng.uniform(0.5, 4.0), lambda: node.is_up and node.thaw())


def _plan_link(
    world: World, rng: random.Random, kind: str, pair: frozenset[str], at: float
) -> None:
    network, ends_at = world.network, at + rng.uniform(0.05, 4.0)
    match kind:
        case "cut":
            world.after(at, lambda: network.cut.add(pair))
            world.after(ends_at, lambda: _mend(world, pair))
        case "slow":
            delay_s = rng.choice((0.05, 0.3, 1.0))
            world.after(at, lambda: network.slow.update({pair: delay_s}))
            world.after(ends_at, lambda: network.slow.pop(pair, None))
        case "stall":
            world.after(at, lambda: network.stalled.update({pair: ends_at}))
            world.after(ends_at, lambda: network.stalled.pop(pair, None))
        case "shaky":
            world.after(at, lambda: network.shaky.add(pair))
            world.after(ends_at, lambda: network.shaky.discard(pair))
        case "echo":
            world.after(at, lambda: network.echoing.add(pair))
            world.after(ends_at, lambda: network.echoing.discard(pair))


def _plan_blink(world: World, rng: random.Random, at: float) -> None:
    """A busy server's connections break for less time than its silence takes to be noticed."""
    node = _rush(world, rng, at)
    ends_at = at + rng.uniform(0.01, 0.6)
    for other in world.nodes.values():
        if other.role != node.role:
            pair = frozenset((node.name, other.name))
            world.after(at, partial(world.network.cut.add, pair))
            world.after(ends_at, partial(_mend, world, pair))


def _mend(world: World, pair: frozenset[str]) -> None:
    """The connection is made anew, and its dialler sees that."""
    world.network.cut.discard(pair)
    for name in pair:
        node = world.nodes[name]
        for other in pair - {name}:
            if f"{other}:1" in node.links and f"{other}:1" not in node.hung_up:
                node.feed(LinkBroke(f"{other}:1", is_refused=False))


def _plan_storm(world: World, rng: random.Random, kind: str, node: Node, at: float) -> None:
    """Clients leave in the midst of transfers, while one of the two sides stands still."""
    if kind == "abort storm":
        world.after(at, lambda: _abort_all(world, node))
        return
    writer = _rush(world, rng, at)
    decodes = [other for other in world.nodes.values() if other.role == "decode"]
    stopped = writer if kind == "frozen writer" else rng.choice(decodes)
    world.after(at, partial(stop_worker, world, stopped, rng.uniform(0.5, 5.0)))
    for decode in decodes:
        world.after(at + 0.2, partial(_abort_all, world, decode))


def _rush(world: World, rng: random.Random, at: float) -> Node:
    """Many requests at once, so that whatever happens then happens in the midst of transfers.
    Returns a server that may be busy with them."""
    decodes = [node for node in world.nodes.values() if node.role == "decode"]
    for decode in decodes:
        for _ in range(6):
            prompt = [rng.randint(10, 900) for _ in range(rng.randint(20, 60))]
            world.after(at - rng.uniform(0.02, 0.1), partial(world.submit, decode, prompt, 8))
    return rng.choice([node for node in world.nodes.values() if node.role == "prefill"])


def plan_breaks(world: World, rng: random.Random) -> None:
    """In some stories data connections break in the midst of transfers, and nothing else does; or
    their readers stand still meanwhile, so that what was put is read long after it."""
    for _ in range(rng.choice((0, 0, 1, 2))):
        at = rng.uniform(FIRST_AT, LAST_AT)
        writer = _rush(world, rng, at)
        world.after(at, partial(_break_off, world, writer))
        if rng.random() < 0.5:
            for node in world.nodes.values():
                if node.role == "decode":
                    duration_s = rng.uniform(0.5, 3.0)
                    world.after(at - 0.005, partial(stop_worker, world, node, duration_s))


def _break_off(world: World, writer: Node) -> None:
    if writer.is_up:
        for node in world.nodes.values():
            if node.role != writer.role and node.life:
                writer.worker.transfers.break_off(node.facts.incarnation)


def plan_struck_returns(world: World, rng: random.Random) -> None:
    """Where caches go back, something goes wrong while one does."""
    if any(node.returns_caches for node in world.nodes.values()):
        for _ in range(rng.choice((0, 1, 2, 3))):
            at = rng.uniform(FIRST_AT, LAST_AT)
            world.after(at, partial(_await_return, world, rng, at + RETURN_PATIENCE_S))


def _await_return(world: World, rng: random.Random, until: float) -> None:
    for node in world.nodes.values():
        if node.is_up and isinstance(node.core, DecodeScheduler) and node.core.returns.lent:
            world.tally["returns struck"] += 1
            world.calm_until = min(world.calm_until, world.now)
            if rng.random() < 0.5:
                _break_when_under_way(world, node, world.now + RETURN_PATIENCE_S)
            else:
                world.after(rng.uniform(0.0, 0.015), partial(_strike_return, world, rng, node))
            return
    if world.now < until:
        world.after(RETURN_POLL_S, partial(_await_return, world, rng, until))


def _break_when_under_way(world: World, writer: Node, until: float) -> None:
    """Its connections break while the network carries something of it; later, if it never does."""
    if world.now >= until or writer.worker.transfers.has_bytes_under_way:
        _break_off(world, writer)
    else:
        world.after(RETURN_POLL_S, partial(_break_when_under_way, world, writer, until))


def _strike_return(world: World, rng: random.Random, writer: Node) -> None:
    """Either side stops or ends."""
    readers = [node for node in world.nodes.values() if node.role == "prefill"]
    struck = rng.choice([writer, *readers])
    if rng.random() < 0.5:
        stop_worker(world, struck, rng.uniform(0.3, 4.0))
    elif struck.is_up:
        struck.crash(rng.choice((0.0, 0.0, 1.0)))
        world.after(rng.uniform(0.1, 2.0), lambda: struck.is_up or struck.boot())


def stop_worker(world: World, node: Node, duration_s: float) -> None:
    """Its server's scheduler goes on, and so does what is under way in the network."""
    if node.is_up:
        worker = node.worker
        world.tell(node.name, f"worker stops for {duration_s:.2f} s")
        world.tally["stopped workers"] += 1
        worker.stop()
        world.after(duration_s, worker.go_on)


def _abort_all(world: World, node: Node) -> None:
    for client in list(world.clients.values()):
        if node.is_up and client.node == node.name and not client.finals:
            world.cancel(client)


def plan_outage(world: World, rng: random.Random) -> None:
    """Every prefill server ends and stays away for longer than requests wait for one, unless
    another accident brings one back. Requests that run by then grow until some are retracted."""
    world.tally["outages"] += 1
    at = rng.uniform(FIRST_AT, OUTAGE_LAST_AT)
    world.calm_until = min(world.calm_until, at)
    for node in world.nodes.values():
        if node.role == "prefill":
            world.after(at, partial(_end, node))
        for _ in range(OUTAGE_REQUEST_COUNT if node.role == "decode" else 0):
            prompt = [rng.randint(10, 900) for _ in range(rng.randint(1, 20))]
            count = rng.randint(*OUTAGE_TOKENS)
            before_s = rng.uniform(0.1, 1.0)
            world.after(at - before_s, partial(world.submit, node, prompt, count))


def _end(node: Node) -> None:
    if node.is_up:
        node.crash()


def repair(world: World) -> None:
    """From here on nothing goes wrong."""
    world.network.repair()
    for node in world.nodes.values():
        if not node.is_up:
            node.boot()
        elif node.is_frozen:
            node.thaw()
        if node.wanted is not None:
            node.want_all()
        node.resume_frontend()
        node.worker.go_on()
