"""A story of prompts that share beginnings, told again from its number, and cut short.

    python -m tests.scheduling.prefix_story 1234     tells what is left of a failing story

A story is a number for its server and one for each of its operations. Knows nothing of what they
do.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass

from tests.scheduling.prefix_world import World

OPERATION_COUNT = 400


@dataclass(frozen=True, slots=True)
class Story:
    server: int
    operations: tuple[int, ...]


def story_of(seed: int) -> Story:
    rng = random.Random(seed)
    count = rng.randint(10, OPERATION_COUNT)
    return Story(rng.getrandbits(32), tuple(rng.getrandbits(32) for _ in range(count)))


def run_story(story: Story) -> Counter[str]:
    """What happened. Raises: AssertionError for any promise that is broken."""
    world = World(random.Random(story.server))
    for number in story.operations:
        world.operate(number)
    world.rng = random.Random(story.server)
    world.finish()
    return world.tally


def problem_of(story: Story) -> str:
    try:
        run_story(story)
    except (AssertionError, LookupError, ValueError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


def shortened(story: Story) -> Story:
    """A failing story without the operations that its failure does without."""
    operations = list(story.operations)
    size = len(operations) // 2
    while size:
        at = 0
        while at < len(operations):
            fewer = operations[:at] + operations[at + size :]
            if problem_of(Story(story.server, tuple(fewer))):
                operations = fewer
            else:
                at += size
        size //= 2
    return Story(story.server, tuple(operations))


if __name__ == "__main__":
    shortest = shortened(story_of(int(sys.argv[1])))
    print(problem_of(shortest))
    print(shortest)
    run_story(shortest)
