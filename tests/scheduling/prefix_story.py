"""A story of prompts that share beginnings, told again from its number, and cut short.

    python -m tests.scheduling.prefix_story 1234     tells what is left of a failing story

A story is a number for its server and one for each of its operations. Knows nothing of what they
do.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass, replace

from tests.scheduling.prefix_world import World

OPERATION_COUNT = 400


@dataclass(frozen=True, slots=True)
class Story:
    """has_draft: whether rows of the cache depend on the next token."""

    server: int
    operations: tuple[int, ...]
    has_draft: bool = False


def story_of(seed: int, *, has_draft: bool = False) -> Story:
    rng = random.Random(seed)
    count = rng.randint(10, OPERATION_COUNT)
    operations = tuple(rng.getrandbits(32) for _ in range(count + 1))
    return Story(operations[0], operations[1:], has_draft)


def run_story(story: Story) -> Counter[str]:
    """What happened. Raises: AssertionError for any promise that is broken."""
    world = World(random.Random(story.server), has_draft=story.has_draft)
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
            if problem_of(replace(story, operations=tuple(fewer))):
                operations = fewer
            else:
                at += size
        size //= 2
    return replace(story, operations=tuple(operations))


if __name__ == "__main__":
    shortest = shortened(story_of(int(sys.argv[1])))
    print(problem_of(shortest))
    print(shortest)
    run_story(shortest)
