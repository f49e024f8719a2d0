"""What the servers of a story are: their model, pools, transport and settings, drawn from a seed.

Knows nothing of requests, nor of what goes wrong.
"""

from __future__ import annotations

import random

from common.config import TransferMode, Verify
from common.layout.component import SLOT, Live, LiveKind
from common.scheduling.in_flight import IN_FLIGHT_MAX
from tests.sim.node import Node
from tests.sim.world import World

# What the servers of a story want; those of one story can agree.
# Stories in which caches of turns that have ended go back to prefill servers.
RETURN_SHARE = 0.4
# Stories in which servers have a tier in host memory, and how large it is against their pools.
TIER_SHARE = 0.4
HOST_SHARES = (0.0, 0.2, 1.0, 3.0)
CHANGED_RATES = (0.0, 0.0, 0.2)
# How prefill servers are for the decode servers of those: most can be reached.
WAYS_BACK = ("", "", "", "", "refused", "silent")
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
WINDOWS = (0, 1, 3, 4, 9, 20)
# Models that have slots beside what grows, and nothing else: steps keep states inside chunks.
HYBRID_SHARE = 0.2
OTHER_LIVES = (
    SLOT,
    Live(LiveKind.TAIL, 4, 4),
    Live(LiveKind.TAIL, 5),
    Live(LiveKind.BLOCK, 3),
    Live(LiveKind.BLOCK, 16),
)

# What prefill servers take at a time; some have less room than requests come at once.
QUEUE_MAXES = (64, 64, 4)

# As measured at a server's start. Its steps take about 10 ms, with 24 tokens or one.
PROMPT_TOKEN_S = (0.0, 0.0002, 0.002)

# Tokens of a pool. The longest prompts and answers just fit.
CROWDED_TOKENS = (120, 200)


def add_servers(
    world: World, rng: random.Random, seed: int, *, is_crowded: bool, is_verified: bool
) -> None:
    """is_crowded: two of each role with small pools, and all keep prefixes. is_verified: whether
    they may compare caches."""
    for role, counts in (("prefill", (40, 90)), ("decode", (30, 80))):
        for index in range(2 if is_crowded else rng.randint(1, 2)):
            page_size = rng.choice((4, 8))
            pages = rng.randint(*counts)
            if is_crowded:
                pages = rng.randint(*CROWDED_TOKENS) // page_size
            world.add(f"{role[0]}{index}", role, page_size, pages)
    nodes = list(world.nodes.values())
    _choose_lives(world, seed)
    modes = random.Random(seed ^ 0xCAFE)
    _choose_transport(world, seed, modes.choice(("posix", "tcp")))
    one_of = modes.choice(TRANSFER_MODES)
    for node in nodes:
        node.transfer_mode = modes.choice(one_of)
    if is_verified:
        _choose_verify(world, seed)
    world.slow_step_rate = modes.choice(SLOW_STEP_RATES)
    self_test_interval_s = modes.choice(SELF_TEST_INTERVALS_S)
    ahead = random.Random(seed ^ 0xA4EAD)
    fallback = random.Random(seed ^ 0xFA11)
    tight = random.Random(seed ^ 0xC4ED17)
    for node in nodes:
        node.self_test_interval_s = self_test_interval_s
        node.in_flight_max = ahead.choice((1, IN_FLIGHT_MAX, IN_FLIGHT_MAX))
        if node.role == "decode":
            node.may_fall_back = fallback.random() < 0.3
            node.links = [f"{one.name}:1" for one in nodes if one.role == "prefill"]
        elif world.is_hurried:
            node.queue_max = tight.choice(QUEUE_MAXES)
    _choose_caches(world, seed, is_crowded=is_crowded)
    _choose_returns(world, seed)
    _choose_tiers(world, seed)


def _choose_transport(world: World, seed: int, kind: str) -> None:
    """kind: "posix" or "tcp", or what works like it. Some networks are between two machines, where
    nobody sees the other's processes."""
    rng = random.Random(seed ^ 0xF0CE)
    world.transport = rng.choice((kind, kind, *TRANSPORTS_LIKE[kind]))
    if kind == "tcp" and rng.random() < 0.5:
        world.tally["between machines"] += 1
        for node in world.nodes.values():
            node.host_ids = (node.role,)


def count_traits(world: World) -> None:
    nodes = list(world.nodes.values())
    traits = {f"over {world.transport}"}
    traits |= {f"with a {live.kind}" for live in world.lives}
    traits |= {f"by {node.transfer_mode}" for node in nodes}
    is_ahead = {node.in_flight_max > 1 for node in nodes}
    traits |= {"with steps sent ahead" if one else "with one step at a time" for one in is_ahead}
    traits |= {f"verified {node.verify}" for node in nodes if node.role == "decode"}
    traits |= {"with a bare stage" for node in nodes if node.has_bare_stage}
    traits |= {"without a way back" for node in nodes if node.unreachable_peers}
    if len({node.page_size for node in nodes}) > 1:
        traits.add("with page sizes that differ")
    for trait in traits:
        world.tally[trait] += 1


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
    is_hybrid = random.Random(seed ^ 0x4B1D).random() < HYBRID_SHARE
    if window and not is_hybrid:
        world.lives += (Live(LiveKind.WINDOW, window),)
        for node in world.nodes.values():
            per_request = (window + node.page_size - 2) // node.page_size + 1
            node.page_counts += (per_request * rng.randint(2, 10),)
    rng = random.Random(seed ^ 0x51075)
    if is_hybrid or rng.random() < 0.5:
        others = [SLOT] if is_hybrid else rng.sample(OTHER_LIVES, rng.randint(1, 3))
        world.lives += tuple(others)
        for node in world.nodes.values():
            node.page_counts += tuple(_page_count(node, live, rng) for live in others)
    for node in world.nodes.values():
        node.has_bare_stage = rng.random() < 0.3


def _choose_caches(world: World, seed: int, *, is_crowded: bool) -> None:
    """Who keeps prefixes, with how many checkpoints, and who computes rests."""
    rng = random.Random(seed ^ 0xCAC4E)
    for node in world.nodes.values():
        node.has_prefix_cache = is_crowded or rng.random() < 0.85
        node.checkpoint_max = rng.choice((0, 1, 3, 16))
        node.computes_rests = rng.random() < 0.5
        node.prompt_token_s = rng.choice(PROMPT_TOKEN_S)


def _choose_returns(world: World, seed: int) -> None:
    """Whether caches of ended turns go back, if both servers want that."""
    rng = random.Random(seed ^ 0x2E702)
    if rng.random() < RETURN_SHARE:
        for node in world.nodes.values():
            node.returns_caches = rng.random() < 0.9
        for node in world.nodes.values():
            if node.role == "decode":
                node.unreachable_peers = rng.choice(WAYS_BACK)


def _choose_tiers(world: World, seed: int) -> None:
    """Who has a tier in host memory."""
    rng = random.Random(seed ^ 0x71E2)
    if rng.random() < TIER_SHARE:
        for node in world.nodes.values():
            node.host_share = rng.choice(HOST_SHARES)
            node.changed_rate = rng.choice(CHANGED_RATES)


def _page_count(node: Node, live: Live, rng: random.Random) -> int:
    if not live.is_paged:
        return rng.choice((1, 2, 5, 16))
    items = max(1, node.page_size // live.size)
    return -(-node.pages * node.page_size // (live.size * items))
