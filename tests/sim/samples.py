"""Several samples of one prompt, plain and through routers, of which some are given up.

Knows nothing of what goes wrong meanwhile.
"""

from __future__ import annotations

import random

from common.request import Bootstrap
from tests.sim.client import Client
from tests.sim.node import Node
from tests.sim.world import World

PROMPT_COUNT_MAX = 4
SAMPLE_COUNTS = (2, 6)
ROUTED_SHARE = 0.4
# Of routed prompts, how many a prefill server hears of with fewer samples than the decode server.
FEWER_SHARE = 0.4
GIVEN_UP_SHARE = 0.25
GIVEN_UP_S = (0.0, 1.0)
# Of those given up, how many at the moment when they have their first token.
BEGUN_SHARE = 0.5
LENGTHS = (1, 3, 20, 60)
POLL_S = 0.001


def plan_samples(
    world: World, rng: random.Random, prefills: list[Node], decodes: list[Node]
) -> None:
    for _ in range(rng.randint(1, PROMPT_COUNT_MAX)):
        _plan_prompt(world, rng, rng.choice(prefills), rng.choice(decodes))


def _plan_prompt(world: World, rng: random.Random, prefill: Node, decode: Node) -> None:
    prompt = [rng.randint(10, 900) for _ in range(rng.randint(1, rng.choice(LENGTHS)))]
    at, count = rng.uniform(0.5, 8.0), rng.randint(*SAMPLE_COUNTS)
    max_new_tokens = rng.randint(1, 25)
    room: Bootstrap | None = None
    if rng.random() < ROUTED_SHARE:
        room = Bootstrap(prefill.name, 1, rng.getrandbits(62))
        known_count = rng.randint(1, count) if rng.random() < FEWER_SHARE else count
        world.after(
            at + rng.uniform(0.0, 0.1),
            lambda: world.submit_samples(prefill, prompt, 1, known_count, room) and None,
        )
    clients: list[Client] = []

    def submit() -> None:
        clients.extend(world.submit_samples(decode, prompt, max_new_tokens, count, room))
        world.tally["prompts with samples"] += 1

    world.after(at + rng.uniform(0.0, 0.1), submit)
    for place in range(count):
        if rng.random() < GIVEN_UP_SHARE:
            is_begun = rng.random() < BEGUN_SHARE
            at_least = at + 0.1 + (0.0 if is_begun else rng.uniform(*GIVEN_UP_S))
            _give_up(world, clients, place, at_least, is_begun=is_begun)


def _give_up(
    world: World, clients: list[Client], place: int, after_s: float, *, is_begun: bool
) -> None:
    def look() -> None:
        if not clients or clients[place].finals:
            return
        if is_begun and not clients[place].output:
            world.after(POLL_S, look)
        else:
            world.cancel(clients[place])

    world.after(after_s, look)
