"""Prompts that begin alike: bursts that come at once, and sessions that go on turn by turn.

Knows nothing of what goes wrong meanwhile.
"""

from __future__ import annotations

import random

from common.prefix_digests import DIGEST_NBYTES
from tests.sim.client import Client
from tests.sim.node import Node
from tests.sim.world import World

# How long a session's prompts may become and begin, and when no new turn begins any more.
SESSION_TOKENS_MAX = 200
FIRST_TOKENS = (6, 50, 50)
TURNS_UNTIL = 10.0
# Clients of two salts have nothing in common, though they begin alike.
SALTS = (bytes(DIGEST_NBYTES), bytes([1]) * DIGEST_NBYTES)
OTHER_SALT_SHARE = 0.4
POLL_S = 0.01
# Whoever got no answer asks again, this much later.
AGAIN_S = 0.3

BURST_COUNT_MAX = 3
BURST_SIZES = (2, 6)
SHARED_TOKENS = (4, 80)
# Together, or some while the prompts of others are being computed.
BURST_S = (0.01, 0.1)


def plan_bursts(world: World, rng: random.Random, decodes: list[Node]) -> None:
    """Prompts of which some are equal, some end in their own way, and some are given up."""
    for _ in range(rng.randint(1, BURST_COUNT_MAX)):
        shared = [rng.randint(10, 900) for _ in range(rng.randint(*SHARED_TOKENS))]
        at, duration_s = rng.uniform(0.5, 8.0), rng.choice(BURST_S)
        for _ in range(rng.randint(*BURST_SIZES)):
            end = [rng.randint(10, 900) for _ in range(rng.choice((0, 0, 1, 20)))]
            begin_at = at + rng.uniform(0.0, duration_s)
            _plan_burst_request(world, rng, rng.choice(decodes), shared + end, begin_at)


def _plan_burst_request(
    world: World, rng: random.Random, decode: Node, prompt: list[int], at: float
) -> None:
    held: list[Client] = []
    max_new_tokens = rng.randint(1, 20)

    def submit() -> None:
        held.append(world.submit(decode, prompt, max_new_tokens))

    world.after(at, submit)
    if rng.random() < 0.3:
        world.after(at + rng.uniform(0.02, 0.3), lambda: held and world.cancel(held[0]))


def plan_sessions(
    world: World, rng: random.Random, decodes: list[Node], counts: tuple[int, int]
) -> None:
    """Each prompt goes on where the last answer ended, or where its prompt did. Some begin as one
    of another salt did. counts: how few and how many there may be."""
    for _ in range(rng.randint(*counts)):
        prompt = [rng.randint(10, 900) for _ in range(rng.randint(1, rng.choice(FIRST_TOKENS)))]
        at = world.now + rng.uniform(0.5, 6.0)
        _plan_turn(world, random.Random(f"{prompt}"), decodes, prompt, at, SALTS[0])
        if rng.random() < OTHER_SALT_SHARE:
            longer = [*prompt, *[rng.randint(10, 900) for _ in range(rng.randint(0, 3))]]
            at += rng.uniform(0.1, 1.0)
            _plan_turn(world, random.Random(f"{longer}"), decodes, longer, at, SALTS[1])


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
            if world.now >= TURNS_UNTIL:
                return
            if not client.finals:
                world.after(POLL_S, look)
            elif client.finals == ["finished"]:
                answer = client.output if rng.random() < 0.8 else []
                more = [rng.randint(10, 900) for _ in range(rng.choice((0, 1, 4, 9)))]
                longer = [*prompt, *answer, *more]
                if len(longer) < _prompt_max(world):
                    _plan_turn(world, rng, decodes, longer, world.now + POLL_S, seed)
            else:
                _plan_turn(world, rng, decodes, prompt, world.now + AGAIN_S, seed)

        look()

    world.after(at - world.now, submit)


def _prompt_max(world: World) -> int:
    """What every server takes."""
    taken = [node.core.request_token_max for node in world.nodes.values() if node.life]
    return min([SESSION_TOKENS_MAX, *taken])
