"""A random story of clients and accidents for one seed, and the judgement at its end."""

from __future__ import annotations

import random

from common.config import HandOver, Verify
from common.layout.component import SLOT, Live, LiveKind
from common.request import Bootstrap
from tests.sim.world import BUDGET_S, GRACE_S, Client, Node, World

QUIET_AT = 20.0  # accidents stop here; what is left must end by itself
# What the servers of a story want; those of one story can agree.
HAND_OVERS = (
    (HandOver.DIRECT,),
    (HandOver.LANDING,),
    (HandOver.DIRECT, HandOver.AUTO),
    (HandOver.LANDING, HandOver.AUTO),
)
DAMAGE_RATE = 0.03
ACCIDENTS = (
    *("crash", "crash", "linger", "freeze", "stop worker", "stop worker", "stop server"),
    *("cut", "cut", "slow", "abort storm", "frozen writer", "frozen writer"),
)
BUDGETS_S = (BUDGET_S, BUDGET_S, BUDGET_S, 4.0, 1.0)
WINDOWS = (0, 1, 3, 4, 9, 20)
OTHER_LIVES = (
    SLOT,
    Live(LiveKind.TAIL, 4, 4),
    Live(LiveKind.TAIL, 5),
    Live(LiveKind.BLOCK, 3),
    Live(LiveKind.BLOCK, 16),
)
# A self-test may be under way at any moment.
SELF_TEST_MAX_S = 1.0
END_AT = 75.0  # later than any deadline and grace


# Requests of a hungry story that all grow far beyond what admission leaves free.
HUNGRY_SHARE = 0.2
HUNGRY_TOKENS = (60, 120)


def run_story(
    seed: int,
    *,
    has_accidents: bool = True,
    is_verified: bool = True,
    log: list[str] | None = None,
) -> World:
    """Run the story of a seed to its end and judge it. Raises: AssertionError.

    is_verified: whether servers may compare caches, which hides whose fault a wrong one is.
    log: where to tell what happens.
    """
    world = World(seed)
    world.log = log
    world.is_honest = True
    world.is_hurried = has_accidents
    rng = random.Random(seed ^ 0x5EED)
    prefills = [
        world.add(f"p{i}", "prefill", rng.choice((4, 8)), rng.randint(40, 90))
        for i in range(rng.randint(1, 2))
    ]
    decodes = [
        world.add(f"d{i}", "decode", rng.choice((4, 8)), rng.randint(30, 80))
        for i in range(rng.randint(1, 2))
    ]
    _choose_lives(world, seed)
    modes = random.Random(seed ^ 0xCAFE)
    world.transport = modes.choice(("posix", "tcp"))
    one_of = modes.choice(HAND_OVERS)
    for node in world.nodes.values():
        node.hand_over = modes.choice(one_of)
    if is_verified:
        _choose_verify(world, seed)
    fallback = random.Random(seed ^ 0xFA11)
    for decode in decodes:
        decode.may_fall_back = fallback.random() < 0.3
        decode.links = [f"{prefill.name}:1" for prefill in prefills]
    for node in world.nodes.values():
        world.after(rng.uniform(0.0, 0.5), node.boot)
    world.start_ticks()
    shared = [rng.randint(10, 900) for _ in range(24)]
    is_hungry = has_accidents and random.Random(seed ^ 0x40C6).random() < HUNGRY_SHARE
    for _ in range(rng.randint(10, 40)):
        _plan_request(world, rng, prefills, decodes, shared, is_hungry=is_hungry)
    if has_accidents:
        for _ in range(rng.randint(0, 6)):
            _plan_accident(world, rng)
    world.after(QUIET_AT, lambda: _repair(world))
    world.run(END_AT)
    while world.now < END_AT + SELF_TEST_MAX_S and not _is_at_rest(world):
        world.run(world.now + 0.1)
    judge(world)
    return world


def _choose_verify(world: World, seed: int) -> None:
    """How much is compared; where all of it is, hand-overs are damaged as well."""
    rng = random.Random(seed ^ 0xD16E57)
    strictest = rng.choice(tuple(Verify))
    for node in world.nodes.values():
        node.verify = strictest if node.role == "decode" else rng.choice(tuple(Verify))
    if strictest is Verify.FULL:
        world.damage_rate = DAMAGE_RATE


def _choose_lives(world: World, seed: int) -> None:
    """What the model of all servers sees; pools that hold a few windows, and slots for some
    requests or for all."""
    rng = random.Random(seed ^ 0x817D)
    window = rng.choice(WINDOWS)
    if window:
        world.lives += (Live(LiveKind.WINDOW, window),)
        for node in world.nodes.values():
            per_request = (window + node.page_size - 2) // node.page_size + 1
            node.page_counts += (per_request * rng.randint(2, 10),)
    rng = random.Random(seed ^ 0x51075)
    if rng.random() < 0.5:
        others = rng.sample(OTHER_LIVES, rng.randint(1, 3))
        world.lives += tuple(others)
        for node in world.nodes.values():
            node.page_counts += tuple(_page_count(node, live, rng) for live in others)
    for node in world.nodes.values():
        node.has_bare_stage = rng.random() < 0.3


def _page_count(node: Node, live: Live, rng: random.Random) -> int:
    if not live.is_paged:
        return rng.choice((1, 2, 5, 16))
    items = max(1, node.page_size // live.size)
    return -(-node.pages * node.page_size // (live.size * items))


def _plan_request(
    world: World,
    rng: random.Random,
    prefills: list[Node],
    decodes: list[Node],
    shared: list[int],
    *,
    is_hungry: bool,
) -> None:
    prompt = shared[: rng.choice((0, 8, 16, 24))]
    prompt = prompt + [rng.randint(10, 900) for _ in range(rng.randint(1, 60))]
    max_new_tokens = rng.randint(1, 40)
    if is_hungry:
        max_new_tokens = rng.randint(*HUNGRY_TOKENS)
    budget_s = rng.choice(BUDGETS_S) if world.is_hurried else BUDGET_S
    decode, prefill = rng.choice(decodes), rng.choice(prefills)
    is_routed = rng.random() < 0.4
    at = rng.uniform(0.5, 5.0 if is_hungry else 12.0)
    held: list[Client] = []

    is_orphan = is_routed and rng.random() < 0.1

    def submit_decode(room: Bootstrap | None) -> None:
        held.append(world.submit(decode, prompt, max_new_tokens, room, budget_s))
        held[0].is_orphan = is_orphan

    if is_routed:
        room = Bootstrap(prefill.name, 1, rng.getrandbits(62))
        world.after(at + rng.uniform(0, 0.1), lambda: submit_decode(room))
        if not is_orphan:
            world.after(
                at + rng.uniform(0, 0.1),
                lambda: _submit_first_half(world, prefill, prompt, room),
            )
    else:
        world.after(at, lambda: submit_decode(None))
    if rng.random() < 0.25:
        world.after(at + rng.uniform(0.1, 1.5), lambda: held and world.cancel(held[0]))


def _submit_first_half(world: World, prefill: Node, prompt: list[int], room: Bootstrap) -> None:
    world.submit(prefill, prompt, 1, room)


def _plan_accident(world: World, rng: random.Random) -> None:
    node = rng.choice(list(world.nodes.values()))
    other = rng.choice(list(world.nodes.values()))
    at = rng.uniform(1.0, 14.0)
    pair = frozenset((node.name, other.name))
    match rng.choice(ACCIDENTS):
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
        case "freeze":
            world.after(at, node.freeze)
            world.after(at + rng.uniform(0.5, 4.0), lambda: node.is_up and node.thaw())
        case "stop worker" | "stop server" as what:
            world.after(at, lambda: _stop_worker(world, node, rng.uniform(0.3, 5.0)))
            if what == "stop server":
                world.after(at, node.freeze)
                world.after(at + rng.uniform(0.5, 4.0), lambda: node.is_up and node.thaw())
        case "frozen writer":
            writer = _rush(world, rng, at)
            world.after(at, lambda: _stop_worker(world, writer, rng.uniform(0.5, 5.0)))
            for decode in world.nodes.values():
                if decode.role == "decode":
                    world.after(at + 0.2, lambda node=decode: _abort_all(world, node))  # type: ignore[misc]
        case "cut":
            world.after(at, lambda: world.cut.add(pair))
            world.after(at + rng.uniform(0.05, 4.0), lambda: world.cut.discard(pair))
        case "slow":
            world.after(at, lambda: world.slow.update({pair: rng.choice((0.05, 0.3, 1.0))}))
            world.after(at + rng.uniform(0.5, 4.0), lambda: world.slow.pop(pair, None))
        case "abort storm":
            world.after(at, lambda: _abort_all(world, node))


def _rush(world: World, rng: random.Random, at: float) -> Node:
    """Many requests at once, so that whatever happens then happens in the midst of hand-overs.
    Returns a server that may be busy with them."""
    decodes = [node for node in world.nodes.values() if node.role == "decode"]
    for decode in decodes:
        for _ in range(6):
            prompt = [rng.randint(10, 900) for _ in range(rng.randint(20, 60))]
            when = at - rng.uniform(0.02, 0.1)
            world.after(when, lambda n=decode, p=prompt: world.submit(n, p, 8))  # type: ignore[misc]
    return rng.choice([node for node in world.nodes.values() if node.role == "prefill"])


def _stop_worker(world: World, node: Node, duration_s: float) -> None:
    """Its server's scheduler goes on, and so does what is under way in the network."""
    if node.is_up:
        worker = node.worker
        world.tell(node.name, f"worker stops for {duration_s:.2f} s")
        worker.stop()
        world.after(duration_s, worker.go_on)


def _abort_all(world: World, node: Node) -> None:
    for client in list(world.clients.values()):
        if node.is_up and client.node == node.name and not client.finals:
            world.cancel(client)


def _repair(world: World) -> None:
    world.cut.clear()
    world.slow.clear()
    for node in world.nodes.values():
        if not node.is_up:
            node.boot()
        elif node.is_frozen:
            node.thaw()
        node.worker.go_on()


def _is_at_rest(world: World) -> bool:
    return all(
        node.core.is_idle and node.core.account.pool.used_count(group) == _kept(node, group)
        for node in world.nodes.values()
        for group in range(len(node.core.account.pool.page_counts))
    )


def _kept(node: Node, group: int) -> int:
    """Pages that nobody has and that hold prefixes."""
    cache = node.core.account.cache
    return cache.node_count if cache is not None and group == 0 else 0


def judge(world: World) -> None:
    """Every request one final reply, right tokens, nothing left anywhere."""
    for client in world.clients.values():
        assert len(client.finals) == 1, f"request {client.request_id}: {client.finals}"
        node = world.nodes[client.node]
        is_routed_half = node.role == "prefill"
        token_max = node.core.request_token_max
        expected = client.expected(world.lives, token_max)[: 1 if is_routed_half else None]
        due_at = max(client.submitted_at + client.budget_s, node.thawed_at) + GRACE_S
        assert client.answered_at <= due_at, (
            f"request {client.request_id}: answered {client.answered_at - due_at:.1f} s late"
        )
        assert client.output == expected[: len(client.output)], (
            f"request {client.request_id} on {client.node}: wrong tokens"
        )
        if client.finals[0] == "finished":
            assert client.output == expected, f"request {client.request_id}: incomplete"
    for node in world.nodes.values():
        assert not node.given_up, f"{node.name} gave up: {node.given_up}"
        pool = node.core.account.pool
        assert node.core.is_idle, f"{node.name} still has requests"
        for group in range(len(pool.page_counts)):
            assert pool.quarantined_count(group) == 0, f"{node.name}: pages still in quarantine"
            assert pool.used_count(group) == _kept(node, group), f"{node.name}: pages lost"
