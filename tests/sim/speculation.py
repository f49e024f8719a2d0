"""Stories whose decode servers verify several tokens in a step, and what their workers propose.

Workers guess right as often as a story says, which they can tell, for the model is a digest. They
never stop at the end of an output by themselves.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

from common.layout.component import LiveKind
from tests.sim.oracle import VOCAB_SIZE, next_token
from tests.sim.sim_cache import Known, SimCache

if TYPE_CHECKING:
    from tests.sim.world import World

SPECULATION_SHARE = 0.3
PROPOSAL_MAXES = (1, 2, 4, 7)
RIGHT_RATES = (0.2, 0.6, 0.9, 0.98)


def choose_speculation(world: World, seed: int, share: float) -> None:
    """For some decode servers of some stories. A server that takes on that role later does as well,
    if it was chosen."""
    rng = random.Random(seed ^ 0x59EC)
    if rng.random() >= share:
        return
    world.tally["with proposals"] += 1
    for node in world.nodes.values():
        node.proposal_max = rng.choice(PROPOSAL_MAXES)
        node.right_rate = rng.choice(RIGHT_RATES)


def decode(
    cache: SimCache, known: Known, proposal_max: int, right_rate: float, tally: Counter[str]
) -> tuple[int, list[int]]:
    """Compute the latest token and what is proposed behind it, and draw for as long as that is
    right. Returns: the number of proposals, and what was drawn."""
    first = len(known.tokens) - 1
    proposed = _propose(cache, known, min(proposal_max, _taken_back_max(cache, first)), right_rate)
    ahead = Known([*known.tokens, *proposed], known.pages, known.seed)
    # All rows are written before any is read; a state is kept behind each of them.
    states: list[list[tuple[int, int]]] = []
    for position in range(first, len(ahead.tokens)):
        cache.write(ahead, position)
        states.append(cache.states(ahead))
    drawn: list[int] = []
    for depth in range(len(states)):
        cache.take_states(ahead, states[depth])
        drawn.append(cache.sample(ahead, first + 1 + depth))
        if drawn[depth:] != proposed[depth : depth + 1]:
            break
    tally["proposals accepted"] += len(drawn) - 1
    tally["proposals taken back"] += len(proposed) - len(drawn) + 1
    return len(proposed), drawn


def _propose(cache: SimCache, known: Known, count: int, right_rate: float) -> list[int]:
    rng = _rng_of(known)
    count = rng.randint(min(1, count), count)
    return continuation(cache, known, count, right_rate, rng)


def _rng_of(known: Known) -> random.Random:
    return random.Random(f"{known.seed} {len(known.tokens)} {known.tokens[-1]}")


def continuation(
    cache: SimCache,
    known: Known,
    count: int,
    right_rate: float,
    rng: random.Random | None = None,
) -> list[int]:
    """What is guessed to follow."""
    rng = rng or _rng_of(known)
    tokens = list(known.tokens)
    for _ in range(count):
        right = next_token(tokens, cache.lives, known.seed)
        tokens.append(right if rng.random() < right_rate else rng.randrange(VOCAB_SIZE))
    return tokens[len(known.tokens) :]


def _taken_back_max(cache: SimCache, first: int) -> int:
    """Of tails, as the real workers have it: what is overwritten must not be read any more."""
    tails = [live.size for live in cache.lives if live.kind is LiveKind.TAIL]
    return min((size - 1 - first % size for size in tails), default=VOCAB_SIZE)
