"""Who would wait longer than it may is told so at once, and when to come back."""

from __future__ import annotations

from common.protocol.frontend import Failed
from common.protocol.peer import Withdraw
from common.request import Bootstrap
from common.scheduling.events import Effect, ToFrontend, ToPeer
from decode_server.drain_rate import BEGUN_COUNT_MIN, WINDOW_S, DrainRate
from tests.sim.node import Node
from tests.sim.world import World

PROMPT = list(range(20, 30))


def drained(count: int, every_s: float, start: float = 100.0) -> DrainRate:
    """As many have begun, one after the other, while others waited all the time."""
    rate = DrainRate()
    rate.note(5, start)
    for number in range(1, count + 1):
        rate.note_begun(start + number * every_s)
    return rate


def test_what_waits_is_divided_by_the_rate_at_which_it_begins() -> None:
    rate = drained(10, 0.5)
    assert rate.wait_s(40, 105.0) == 20.0


def test_a_few_say_nothing_nor_does_a_queue_that_was_empty() -> None:
    rate = drained(BEGUN_COUNT_MIN - 1, 0.5)
    assert rate.wait_s(40, 104.0) is None
    rate.note_begun(104.0)
    assert rate.wait_s(40, 104.0) is not None
    rate.note(0, 104.0)
    rate.note(5, 104.5)
    assert rate.wait_s(40, 105.0) is None


def test_what_is_long_past_does_not_count() -> None:
    rate = drained(60, 1.0)
    assert rate.wait_s(30, 160.0) == 30 * WINDOW_S / 31
    assert rate.wait_s(30, 160.0 + WINDOW_S) is None, (
        "it stands still: its requests are told by time"
    )


def crowded_world() -> tuple[World, list[tuple[Node, Effect]]]:
    """A decode server that runs one request at a time, after seconds of more than it can do."""
    world = World(3)
    world.add("p0", "prefill", 4, 200)
    decode = world.add("d0", "decode", 8, 64)
    decode.links, decode.running_max = ["p0:1"], 1
    world.begin()
    told: list[tuple[Node, Effect]] = []
    world.watchers.append(lambda node, effect: told.append((node, effect)))
    for number in range(60):
        world.submit(decode, [number, *PROMPT], 20)
    world.run(world.now + 5.0)
    return world, told


def test_a_request_with_too_small_a_budget_is_refused_at_once() -> None:
    world, told = crowded_world()
    late = world.submit(world.nodes["d0"], PROMPT, 5, budget_s=1.0)
    patient = world.submit(world.nodes["d0"], PROMPT, 5, budget_s=500.0)
    world.run(world.now + 0.05)
    assert late.finals and "requests are waiting" in late.failure and not patient.finals
    (failed,) = [
        effect.message
        for _, effect in told
        if isinstance(effect, ToFrontend)
        and isinstance(effect.message, Failed)
        and effect.message.request_id == late.request_id
    ]
    assert (failed.status, failed.kind) == (503, "overloaded") and failed.retry_after_s > 1.0
    world.run(world.now + 30.0)
    assert patient.finals == ["finished"] and patient.output == patient.expected()


def test_the_other_half_of_who_is_refused_does_not_wait() -> None:
    world, told = crowded_world()
    place = Bootstrap("p0", 1, 4242)
    half = world.submit(world.nodes["p0"], PROMPT, 1, place)
    world.submit(world.nodes["d0"], PROMPT, 5, place, budget_s=1.0)
    world.run(world.now + 1.0)
    withdrawn = [
        e.message for _, e in told if isinstance(e, ToPeer) and isinstance(e.message, Withdraw)
    ]
    assert [message.room for message in withdrawn] == [4242]
    assert half.finals and "requests are waiting" in half.failure
