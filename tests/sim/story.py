"""A random story of clients and accidents for one seed, and the judgement at its end."""

from __future__ import annotations

import random
from collections.abc import Callable

from common.config import TransferMode, Verify
from common.layout.component import SLOT, Live, LiveKind
from common.prefix_digests import DIGEST_NBYTES
from common.request import Bootstrap
from common.scheduling.in_flight import IN_FLIGHT_MAX
from decode_server.scheduler import DecodeScheduler
from tests.sim.accidents import (
    plan_accident,
    plan_breaks,
    plan_outage,
    plan_stopped_frontends,
    repair,
)
from tests.sim.client import BUDGET_S, Client
from tests.sim.invariants import forgotten_transfers
from tests.sim.node import Node
from tests.sim.promises import check_rooms
from tests.sim.world import GRACE_S, TICK_S, World

QUIET_AT = 15.0  # accidents stop here; what is left must end by itself
# How long a story goes on in which nothing is left to happen.
REST_S = 1.0
ACCIDENT_COUNT_MAX = 8
# How long a word about a transfer may be on its way when nothing goes wrong.
FORGOTTEN_MAX_S = 2.0
# What the servers of a story want; those of one story can agree.
TRANSFER_MODES = (
    (TransferMode.DIRECT,),
    (TransferMode.STAGED,),
    (TransferMode.DIRECT, TransferMode.AUTO),
    (TransferMode.STAGED, TransferMode.AUTO),
)
TRANSPORTS_LIKE = {"posix": ("cuda_ipc", "cuda_ipc,tcp"), "tcp": ("rc_mlx5", "cuda_copy,tcp")}
DAMAGE_RATE = 0.03
SLOW_STEP_RATES = (0.0, 0.0, 0.02, 0.2)
SELF_TEST_INTERVALS_S = (0.0, 2.0, 30.0)
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


# Routed requests whose prefill server is asked first, and how long that holds what it computed:
# some accidents happen before it gives that up, and some after.
TWO_STEP_SHARE = 0.35
HOLD_S = 6.0
POLL_S = 0.01

# Stories in which no prefill server is there for more than ten seconds.
OUTAGE_SHARE = 0.15

# Routed requests whose first half comes late.
LATE_HALF_SHARE = 0.2
LATE_HALF_S = (0.3, 2.0)

# Sessions of a story, how long their prompts may become, and when no new turn begins any more.
SESSION_COUNT_MAX = 4
SESSION_TOKENS_MAX = 200
TURNS_UNTIL = 10.0

# Requests that come at once and begin alike, in stories whose prefixes are cached.
BURST_COUNT_MAX = 3
BURST_SIZES = (2, 6)
SHARED_TOKENS = (4, 80)

# What prefill servers take at a time; some have less room than requests come at once.
QUEUE_MAXES = (64, 64, 4)

# Requests of a hungry story that all grow far beyond what admission leaves free.
HUNGRY_SHARE = 0.2
HUNGRY_TOKENS = (60, 120)


def run_story(
    seed: int,
    *,
    has_accidents: bool = True,
    is_verified: bool = True,
    has_two_steps: bool = False,
    log: list[str] | None = None,
) -> World:
    """Run the story of a seed to its end and judge it. Raises: AssertionError.

    is_verified: whether servers may compare caches, which hides whose fault a wrong one is.
    has_two_steps: whether some requests are computed before their decode server asks.
    log: where to tell what happens.
    """
    world = World(seed)
    world.log = log
    world.is_honest = True
    world.is_hurried = has_accidents
    if has_accidents:
        world.hold_s = HOLD_S
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
    _choose_transport(world, seed, modes.choice(("posix", "tcp")))
    one_of = modes.choice(TRANSFER_MODES)
    for node in world.nodes.values():
        node.transfer_mode = modes.choice(one_of)
    if is_verified:
        _choose_verify(world, seed)
    world.slow_step_rate = modes.choice(SLOW_STEP_RATES)
    self_test_interval_s = modes.choice(SELF_TEST_INTERVALS_S)
    for node in world.nodes.values():
        node.self_test_interval_s = self_test_interval_s
    ahead = random.Random(seed ^ 0xA4EAD)
    for node in world.nodes.values():
        node.in_flight_max = ahead.choice((1, IN_FLIGHT_MAX, IN_FLIGHT_MAX))
    fallback = random.Random(seed ^ 0xFA11)
    for decode in decodes:
        decode.may_fall_back = fallback.random() < 0.3
        decode.links = [f"{prefill.name}:1" for prefill in prefills]
    _choose_caches(world, seed)
    for node in world.nodes.values():
        world.after(rng.uniform(0.0, 0.5), node.boot)
    world.start_ticks()
    shared = [rng.randint(10, 900) for _ in range(24)]
    tight = random.Random(seed ^ 0xC4ED17)
    for prefill in prefills:
        prefill.queue_max = tight.choice(QUEUE_MAXES) if has_accidents else prefill.queue_max
    is_hungry = has_accidents and random.Random(seed ^ 0x40C6).random() < HUNGRY_SHARE
    for decode in decodes:
        decode.expects_short_outputs = is_hungry
    for _ in range(rng.randint(10, 40)):
        _plan_request(
            world,
            rng,
            prefills,
            decodes,
            shared,
            is_hungry=is_hungry,
            two_step_share=TWO_STEP_SHARE if has_two_steps else 0.0,
        )
    _plan_bursts(world, random.Random(seed ^ 0xB0257), decodes)
    _plan_turns(world, random.Random(seed ^ 0x7423), decodes)
    if has_accidents:
        for _ in range(rng.randint(0, ACCIDENT_COUNT_MAX)):
            plan_accident(world, rng)
        outage = random.Random(seed ^ 0x0FF)
        if outage.random() < OUTAGE_SHARE:
            plan_outage(world, outage)
        plan_stopped_frontends(world, random.Random(seed ^ 0xF407))
        plan_breaks(world, random.Random(seed ^ 0xB2EA))
    world.run(QUIET_AT)
    repair(world)
    _run_to_rest(world)
    judge(world)
    for node in world.nodes.values():
        node.harvest()
    _count_traits(world)
    return world


def _choose_transport(world: World, seed: int, kind: str) -> None:
    """kind: "posix" or "tcp", or what works like it. Some networks are between two machines, where
    nobody sees the other's processes."""
    rng = random.Random(seed ^ 0xF0CE)
    world.transport = rng.choice((kind, kind, *TRANSPORTS_LIKE[kind]))
    if kind == "tcp" and rng.random() < 0.5:
        world.tally["between machines"] += 1
        for node in world.nodes.values():
            node.host_ids = (node.role,)


def _count_traits(world: World) -> None:
    nodes = list(world.nodes.values())
    traits = {f"over {world.transport}"}
    traits |= {f"with a {live.kind}" for live in world.lives}
    traits |= {f"by {node.transfer_mode}" for node in nodes}
    is_ahead = {node.in_flight_max > 1 for node in nodes}
    traits |= {"with steps sent ahead" if one else "with one step at a time" for one in is_ahead}
    traits |= {f"verified {node.verify}" for node in nodes if node.role == "decode"}
    traits |= {"with a bare stage" for node in nodes if node.has_bare_stage}
    if len({node.page_size for node in nodes}) > 1:
        traits.add("with page sizes that differ")
    for trait in traits:
        world.tally[trait] += 1


def _run_to_rest(world: World) -> None:
    """Until all that was planned has happened, everybody is answered and every page is back. Who is
    never at rest goes on past every deadline and grace."""
    world.run(world.last_due_at + TICK_S / 2)  # self-tests begin with a tick
    rest_s = 0.0
    waiting_since: dict[int, float] = {}
    while rest_s < REST_S and world.now < (END_AT if rest_s else END_AT + SELF_TEST_MAX_S):
        world.run(world.now + TICK_S)
        rest_s = rest_s + TICK_S if _is_at_rest(world) else 0.0
        _look_for_forgotten(world, waiting_since)


def _look_for_forgotten(world: World, waiting_since: dict[int, float]) -> None:
    """A transfer that its writer does not know of waits in vain, unless a word is on its way."""
    cores = {node.facts.incarnation: node.core for node in world.nodes.values()}
    in_vain: set[int] = set()
    for core in cores.values():
        if isinstance(core, DecodeScheduler):
            in_vain |= forgotten_transfers(core, cores)
    for transfer_id in list(waiting_since):
        if transfer_id not in in_vain:
            del waiting_since[transfer_id]
    for transfer_id in in_vain:
        waited_s = world.now - waiting_since.setdefault(transfer_id, world.now)
        assert waited_s < FORGOTTEN_MAX_S, f"transfer_id={transfer_id} waits for nobody"


def _choose_verify(world: World, seed: int) -> None:
    """How much is compared; where all of it is, transfers are damaged as well."""
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


def _choose_caches(world: World, seed: int) -> None:
    """Who keeps prefixes, with how many checkpoints, and who computes rests."""
    rng = random.Random(seed ^ 0xCAC4E)
    for node in world.nodes.values():
        node.has_prefix_cache = rng.random() < 0.85
        node.checkpoint_max = rng.choice((0, 1, 3, 16))
        node.computes_rests = rng.random() < 0.5


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
    two_step_share: float,
) -> None:
    prompt = shared[: rng.choice((0, 8, 16, 24))]
    prompt = prompt + [rng.randint(10, 900) for _ in range(rng.randint(1, 60))]
    max_new_tokens = rng.randint(1, 40)
    if is_hungry:
        max_new_tokens = rng.randint(*HUNGRY_TOKENS)
    budget_s = rng.choice(BUDGETS_S) if world.is_hurried else BUDGET_S
    decode, prefill = rng.choice(decodes), rng.choice(prefills)
    is_routed = rng.random() < 0.4
    at = rng.uniform(0.5, 4.0 if is_hungry else 8.0)
    held: list[Client] = []

    is_orphan = is_routed and rng.random() < 0.1
    is_two_step = is_routed and rng_of(prompt).random() < two_step_share

    def submit_decode(room: Bootstrap | None) -> None:
        held.append(world.submit(decode, prompt, max_new_tokens, room, budget_s))
        held[0].is_orphan = is_orphan

    if is_two_step:
        world.after(at, lambda: ask_ahead(world, prefill, prompt, submit_decode, rng_of(prompt)))
    elif is_routed:
        room = Bootstrap(prefill.name, 1, rng.getrandbits(62))
        world.after(at + rng.uniform(0, 0.1), lambda: submit_decode(room))
        if not is_orphan:
            late_s = _late_s(prompt)
            world.after(
                at + rng.uniform(0, 0.1) + late_s,
                lambda: _submit_first_half(world, prefill, prompt, room),
            )
    else:
        world.after(at, lambda: submit_decode(None))
    if rng.random() < 0.25:
        world.after(at + rng.uniform(0.1, 1.5), lambda: held and world.cancel(held[0]))


def _late_s(prompt: list[int]) -> float:
    """How much later than its decode half a routed request's other one comes: most at once, some
    when that has gone."""
    rng = random.Random(f"late {prompt}")
    return rng.uniform(*LATE_HALF_S) if rng.random() < LATE_HALF_SHARE else 0.0


def _plan_bursts(world: World, rng: random.Random, decodes: list[Node]) -> None:
    """Prompts of which some are equal, some end in their own way, and some are given up."""
    for _ in range(rng.randint(1, BURST_COUNT_MAX)):
        shared = [rng.randint(10, 900) for _ in range(rng.randint(*SHARED_TOKENS))]
        at = rng.uniform(0.5, 8.0)
        for _ in range(rng.randint(*BURST_SIZES)):
            end = [rng.randint(10, 900) for _ in range(rng.choice((0, 0, 1, 20)))]
            _plan_burst_request(world, rng, rng.choice(decodes), shared + end, at)


def _plan_burst_request(
    world: World, rng: random.Random, decode: Node, prompt: list[int], at: float
) -> None:
    held: list[Client] = []
    max_new_tokens = rng.randint(1, 20)

    def submit() -> None:
        held.append(world.submit(decode, prompt, max_new_tokens))

    world.after(at + rng.uniform(0, 0.01), submit)
    if rng.random() < 0.3:
        world.after(at + rng.uniform(0.02, 0.3), lambda: held and world.cancel(held[0]))


def _plan_turns(world: World, rng: random.Random, decodes: list[Node]) -> None:
    """Sessions: each prompt goes on where the last answer ended, or where its prompt did."""
    for _ in range(rng.randint(0, SESSION_COUNT_MAX)):
        prompt = [rng.randint(10, 900) for _ in range(rng.randint(1, 50))]
        seed = bytes(DIGEST_NBYTES - 1) + bytes([rng.randint(0, 1)])
        _plan_turn(world, rng_of(prompt), decodes, prompt, rng.uniform(0.5, 6.0), seed)


def _plan_turn(
    world: World,
    rng: random.Random,
    decodes: list[Node],
    prompt: list[int],
    at: float,
    seed: bytes,
) -> None:
    count, decode = rng.randint(1, 25), rng.choice(decodes)

    def submit() -> None:
        client = world.submit(decode, prompt, count, seed=seed)
        world.tally["turns of sessions"] += 1

        def look() -> None:
            if not client.finals and world.now < QUIET_AT:
                world.after(POLL_S, look)
            elif client.finals == ["finished"] and world.now < TURNS_UNTIL:
                answer = client.output if rng.random() < 0.8 else []
                more = [rng.randint(10, 900) for _ in range(rng.choice((0, 1, 4, 9)))]
                longer = [*prompt, *answer, *more]
                if len(longer) < SESSION_TOKENS_MAX:
                    _plan_turn(world, rng, decodes, longer, world.now + POLL_S, seed)

        look()

    world.after(max(0.0, at - world.now), submit)


def rng_of(prompt: list[int]) -> random.Random:
    """Dice of one request's own."""
    return random.Random(repr(prompt))


def ask_ahead(
    world: World,
    prefill: Node,
    prompt: list[int],
    go_on: Callable[[Bootstrap | None], None],
    rng: random.Random,
) -> Client:
    """As a proxy does that goes to the prefill server first: once that has answered, perhaps after
    a while, go on with what it says. Some never do."""
    engine = prefill.facts.incarnation if prefill.life else "none"
    room = Bootstrap(prefill.name, 1, rng.getrandbits(62), engine)
    client = world.submit(prefill, prompt, 1, room)
    pause_s = rng.choice((0.0, 0.0, rng.uniform(0.0, 3.0), HOLD_S + rng.uniform(-1.0, 2.0)))
    is_forgotten = rng.random() < 0.1

    def look() -> None:
        if not client.finals:
            world.after(POLL_S, look)
        elif client.finals == ["finished"] and not is_forgotten:
            world.after(pause_s, lambda: go_on(room))

    look()
    return client


def _submit_first_half(world: World, prefill: Node, prompt: list[int], room: Bootstrap) -> None:
    world.submit(prefill, prompt, 1, room)


def _is_at_rest(world: World) -> bool:
    return all(client.finals for client in world.clients.values()) and all(
        node.core.is_idle and node.core.account.pool.used_count(group) == _kept(node, group)
        for node in world.nodes.values()
        for group in range(len(node.core.account.pool.page_counts))
    )


def _kept(node: Node, group: int) -> int:
    """Pages that nobody has and that hold prefixes."""
    cache = node.core.account.cache
    return cache.evictable_count(group) if cache is not None else 0


def check_cached(world: World, client: Client) -> None:
    """No more of a prompt is cached than others under its salt have begun with. Where accidents
    happen, it may be found because it was computed before."""
    if not client.cached_count:
        return
    assert client.cached_count <= len(client.prompt), "more is cached than the prompt has"
    others = [o for o in world.clients.values() if o.seed == client.seed and o is not client]
    known = max((_common(client.prompt, [*o.prompt, *o.output]) for o in others), default=0)
    if not world.is_hurried and client.retraction_count == 0:
        assert client.cached_count <= known, (
            f"request {client.request_id}: {client.cached_count} tokens are cached of {known}"
        )


def _common(ours: list[int], theirs: list[int]) -> int:
    count = 0
    for our, their in zip(ours, theirs, strict=False):
        if our != their:
            break
        count += 1
    return count


def judge(world: World) -> None:
    """Every request one final reply, right tokens, nothing left anywhere."""
    for client in world.clients.values():
        assert len(client.finals) == 1, f"request {client.request_id}: {client.finals}"
        node = world.nodes[client.node]
        is_finished = client.finals[0] == "finished"
        count = client.max_new_tokens if is_finished else len(client.output)
        if node.role == "prefill":
            count = min(1, count)
        expected = client.expected(world.lives, node.core.request_token_max, count)
        due_at = max(client.submitted_at + client.budget_s, node.thawed_at) + GRACE_S
        assert client.answered_at <= due_at, (
            f"request {client.request_id}: answered {client.answered_at - due_at:.1f} s late"
        )
        assert client.output == expected[: len(client.output)], (
            f"request {client.request_id} on {client.node}: wrong tokens"
        )
        check_cached(world, client)
        if is_finished:
            assert client.output == expected, f"request {client.request_id}: incomplete"
    check_rooms(world)
    for node in world.nodes.values():
        assert not node.given_up, f"{node.name} gave up: {node.given_up}"
        pool = node.core.account.pool
        assert node.core.is_idle, f"{node.name} still has requests"
        transfers = node.worker.transfers.transfers
        assert not transfers, f"{node.name}: workers still know the pages of {list(transfers)}"
        for group in range(len(pool.page_counts)):
            assert pool.quarantined_count(group) == 0, f"{node.name}: pages still in quarantine"
            assert pool.used_count(group) == _kept(node, group), f"{node.name}: pages lost"
