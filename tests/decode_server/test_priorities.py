"""What urgency decides on a decode server: who is refused, who makes room, who is retracted."""

from __future__ import annotations

from common.request import Claim
from decode_server.scheduler import DecodeScheduler
from tests.decode_server.asked import prompts_asked_for
from tests.sim.client import Client
from tests.sim.node import Node
from tests.sim.world import World, connected_pair

PROMPT = list(range(20, 30))


def submit(world: World, claim: Claim, *, count: int = 5, budget_s: float = 30.0) -> Client:
    world.claim_of = lambda prompt: claim
    number = len(world.clients)
    return world.submit(world.nodes["d0"], [number, *PROMPT], count, budget_s=budget_s)


def core_of(node: Node) -> DecodeScheduler:
    assert isinstance(node.core, DecodeScheduler)
    return node.core


def narrow_world(queue_max: int = 1000) -> World:
    """A decode server that runs one request at a time."""
    world = World(3)
    world.add("p0", "prefill", 4, 200)
    decode = world.add("d0", "decode", 8, 64)
    decode.links, decode.running_max, decode.queue_max = ["p0:1"], 1, queue_max
    world.begin()
    return world


def flooded(claim: Claim) -> World:
    """After seconds of more than it can do, so that it knows how fast its queue drains."""
    world = narrow_world()
    for _ in range(60):
        submit(world, claim, count=20)
    world.run(world.now + 5.0)
    assert len(core_of(world.nodes["d0"]).requests.queue) > 10
    return world


def is_refused_at_once(world: World, claim: Claim) -> bool:
    client = submit(world, claim, budget_s=1.0)
    world.run(world.now + 0.05)
    return client.failure.startswith("overloaded: ") and "which takes about" in client.failure


def test_who_is_before_the_queue_is_not_refused_for_its_length() -> None:
    world = flooded(Claim(0, "a"))
    assert is_refused_at_once(world, Claim(0, "a"))
    assert is_refused_at_once(world, Claim(-1, "b"))
    assert not is_refused_at_once(world, Claim(1, "a"))
    assert not is_refused_at_once(world, Claim(0, "b")), "the queue is another client's"


def test_who_is_as_urgent_as_the_queue_is_refused_for_its_length() -> None:
    world = flooded(Claim(5, "a"))
    assert is_refused_at_once(world, Claim(0, "b")), "all of the others are before it"


def test_in_a_full_queue_the_more_urgent_takes_the_place_of_the_latest() -> None:
    world = narrow_world(queue_max=4)
    asked = prompts_asked_for(world)
    running = [submit(world, Claim(0, "a"), count=80)]
    world.run(world.now + 0.1)
    running.append(submit(world, Claim(0, "a"), count=20))
    world.run(world.now + 0.1)  # its cache has come, and waits for a place
    waiting = [submit(world, Claim(0, "a")) for _ in range(4)]
    refused = submit(world, Claim(0, "a"))
    assert refused.failure.startswith("queue_full: ") and not any(one.finals for one in waiting)
    urgent = submit(world, Claim(3, "a"))
    assert waiting[3].failure.startswith("queue_full: ") and not waiting[2].finals
    few = submit(world, Claim(0, "b"))
    assert waiting[2].failure.startswith("queue_full: ") and not waiting[1].finals
    unimportant = submit(world, Claim(-1, "c"))
    assert unimportant.failure.startswith("queue_full: ")
    world.run(world.now + 30.0)
    done = [*running, urgent, few, *waiting[:2]]
    assert all(client.finals == ["finished"] for client in done)
    assert asked[2:] == [client.prompt[0] for client in (urgent, few, waiting[0], waiting[1])]


def test_the_least_urgent_is_retracted_though_it_costs_more() -> None:
    world = connected_pair(prefill_page_count=200, decode_page_count=20)
    world.nodes["d0"].expects_short_outputs = True
    world.nodes["d0"].crash()
    world.nodes["d0"].boot()
    world.run(world.now + 2.0)
    long_prompt = list(range(100, 130))
    world.claim_of = lambda prompt: Claim(0 if prompt == long_prompt else 1)
    unimportant = world.submit(world.nodes["d0"], long_prompt, 20)
    others = [world.submit(world.nodes["d0"], [n, *PROMPT[:3]], 30) for n in range(2)]
    world.run(world.now + 30.0)
    clients = [unimportant, *others]
    assert all(client.finals == ["finished"] for client in clients)
    assert unimportant.retraction_count > 0
    assert not any(client.retraction_count for client in others)
