"""A random story of clients and accidents for one seed, and the judgement at its end."""

from __future__ import annotations

import random

from common.config import HandOver, Verify
from common.layout.component import SLOT, Live, LiveKind
from common.request import Bootstrap
from tests.sim.world import Client, Node, World

QUIET_AT = 20.0  # accidents stop here; what is left must end by itself
# What the servers of a story want; those of one story can agree.
HAND_OVERS = (
    (HandOver.DIRECT,),
    (HandOver.LANDING,),
    (HandOver.DIRECT, HandOver.AUTO),
    (HandOver.LANDING, HandOver.AUTO),
)
DAMAGE_RATE = 0.03
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


def run_story(seed: int, *, has_accidents: bool = True, is_verified: bool = True) -> World:
    """Run the story of a seed to its end and judge it. Raises: AssertionError.

    is_verified: whether servers may compare caches, which hides whose fault a wrong one is.
    """
    world = World(seed)
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
    for _ in range(rng.randint(10, 40)):
        _plan_request(world, rng, prefills, decodes, shared)
    if has_accidents:
        for _ in range(rng.randint(0, 5)):
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
) -> None:
    prompt = shared[: rng.choice((0, 8, 16, 24))]
    prompt = prompt + [rng.randint(10, 900) for _ in range(rng.randint(1, 60))]
    max_new_tokens = rng.randint(1, 40)
    decode, prefill = rng.choice(decodes), rng.choice(prefills)
    is_routed = rng.random() < 0.4
    at = rng.uniform(0.5, 12.0)
    held: list[Client] = []

    is_orphan = is_routed and rng.random() < 0.1

    def submit_decode(room: Bootstrap | None) -> None:
        held.append(world.submit(decode, prompt, max_new_tokens, room))
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
    match rng.choice(("crash", "freeze", "cut", "stall")):
        case "crash":
            world.after(at, lambda: node.is_up and node.crash())
            world.after(at + rng.uniform(0.1, 3.0), lambda: node.is_up or node.boot())
        case "freeze":
            world.after(at, lambda: _freeze(node))
            world.after(at + rng.uniform(0.5, 4.0), lambda: node.is_up and node.thaw())
        case "stall":
            world.after(at, lambda: _stall(node))
            world.after(at + rng.uniform(0.5, 6.0), lambda: node.is_up and node.worker.thaw())
        case "cut":
            pair = frozenset((node.name, other.name))
            world.after(at, lambda: world.cut.add(pair))
            world.after(at + rng.uniform(0.2, 4.0), lambda: world.cut.discard(pair))


def _freeze(node: Node) -> None:
    if node.is_up:
        node.is_frozen = True


def _stall(node: Node) -> None:
    """The workers stand still, and their scheduler does not."""
    if node.is_up:
        node.worker.is_stalled = True


def _repair(world: World) -> None:
    world.cut.clear()
    for node in world.nodes.values():
        if not node.is_up:
            node.boot()
        elif node.is_frozen:
            node.thaw()
        node.worker.thaw()


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
        is_routed_half = world.nodes[client.node].role == "prefill"
        expected = client.expected(world.lives)[: 1 if is_routed_half else None]
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
