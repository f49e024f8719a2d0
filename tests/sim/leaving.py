"""Schedulers that end as planned: they drain for a while, then what is left is cut off.

What the loop around a core does, in virtual time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from common.runtime.scheduler_loop import ANSWERS_TIMEOUT_S, SETTLE_TIMEOUT_S
from common.scheduling.events import DrainEnded, Stopping
from tests.sim.node import Node

POLL_S = 0.01
# Some of the requests that are open take longer.
DRAIN_S = (0.05, 3.0)
PATIENT_DRAIN_S = 30.0  # as long as any request takes


def drain_s_of(node: Node, rng: random.Random) -> float:
    return rng.uniform(*DRAIN_S) if node.world.is_hurried else PATIENT_DRAIN_S


def drain_and_stop(
    node: Node, drain_s: float, then: Callable[[bool], None], *, settles: bool = False
) -> None:
    """Once its requests have ended, or at the end of its time, the scheduler says its last words.
    then: goes on from there; it is told whether requests were cut off. settles: its workers live
    on, so its transfers end before that. Nothing comes of it if the server ends in another way
    meanwhile."""
    world, life = node.world, node.life
    node.drain()

    def is_over() -> bool:
        return not node.is_up or node.life != life

    def wait(is_busy: Callable[[], bool], until: float, go_on: Callable[[], None]) -> None:
        if is_over():
            return
        if node.is_frozen or (is_busy() and world.now < until):
            world.after(POLL_S, partial(wait, is_busy, until, go_on))
        else:
            go_on()

    def cut_off() -> None:
        is_cut_off = not node.core.is_idle
        stop = partial(say_last_words, is_cut_off)
        if not settles:
            stop()
            return
        node.feed(DrainEnded())
        until = world.now + SETTLE_TIMEOUT_S
        wait(lambda: not node.core.transfers.is_settled, until, stop)

    def say_last_words(is_cut_off: bool) -> None:
        node.feed(Stopping())
        until = world.now + ANSWERS_TIMEOUT_S
        wait(lambda: settles and node.core.transfers.has_peers, until, partial(end, is_cut_off))

    def end(is_cut_off: bool) -> None:
        node.lose_clients(may_follow=False)
        then(is_cut_off)

    wait(lambda: not node.core.is_idle, world.now + drain_s, cut_off)
