"""Prompts that are computed before a decode server asks for them: transferred on demand, given up
if nobody does, computed again by whoever can where what was held is lost."""

from __future__ import annotations

import pytest

from common.config import DEFAULT_BOOTSTRAP_TIMEOUT_S
from common.protocol.frontend import GetState, State, Submit
from common.request import Bootstrap, SamplingParams
from common.scheduling.events import FromFrontend, ToFrontend
from prefill_server.requests import UNDISTURBED_S
from tests.sim.client import EOS, Client
from tests.sim.node import Node
from tests.sim.oracle import next_token
from tests.sim.story import run_story
from tests.sim.world import World

PROMPT = list(range(20, 60))
OUTPUT_COUNT = 8


@pytest.fixture
def world() -> World:
    """A decode server and two prefill servers, connected and at rest, at time 3."""
    world = World(seed=1)
    for name in ("p0", "p1"):
        world.add(name, "prefill", 4, 64)
    world.add("d0", "decode", 8, 64).links = ["p0:1", "p1:1"]
    world.begin()
    return world


def place(world: World, host: str = "p0", room: int = 77) -> Bootstrap:
    """What p0 tells its clients of where a cache is held."""
    return Bootstrap(host, 1, room, world.nodes["p0"].facts.incarnation)


def ask_ahead(world: World, where: Bootstrap, prompt: list[int] = PROMPT) -> Client:
    first = world.submit(world.nodes["p0"], prompt, 1, where)
    world.run(world.now + 0.5)
    return first


def go_on(world: World, where: Bootstrap, seconds: float = 5.0) -> Client:
    client = world.submit(world.nodes["d0"], PROMPT, OUTPUT_COUNT, where)
    world.run(world.now + seconds)
    return client


def state_of(node: Node) -> State:
    effects = node.core.handle(FromFrontend(GetState(1)), node.world.now)
    (told,) = [e.message for e in effects if isinstance(e, ToFrontend)]
    assert isinstance(told, State)
    return told


def used_count(world: World, name: str) -> int:
    """Pages that somebody has; those that hold prefixes for nobody are free."""
    return state_of(world.nodes[name]).page_groups[0].used


def test_a_prompt_is_computed_and_answered_before_anybody_asks(world: World) -> None:
    first = ask_ahead(world, place(world))
    assert first.finals == ["finished"] and first.output == first.expected()
    assert state_of(world.nodes["p0"]).queues["held"] == 1


@pytest.mark.parametrize("host", ["p0", "another.name", ""])
def test_what_is_held_is_handed_over_when_asked_for(world: World, host: str) -> None:
    """The server is known by what it said of itself, whatever the way to it is called."""
    where = place(world, host)
    ask_ahead(world, where)
    steps = world.nodes["p0"].core.batcher.step_count
    client = go_on(world, where)
    assert client.output == client.expected() and client.finals == ["finished"]
    assert world.nodes["p0"].core.batcher.step_count == steps, "nothing is computed again"
    assert state_of(world.nodes["d0"]).counters["holds_lost"] == 0
    assert world.nodes["p0"].core.is_idle


def test_a_decode_server_that_is_early_gets_it_once_it_is_computed(world: World) -> None:
    where = place(world)
    first = world.submit(world.nodes["p0"], PROMPT, 1, where)
    client = go_on(world, where)
    assert first.finals == ["finished"]
    assert client.output == client.expected()
    assert state_of(world.nodes["d0"]).counters["holds_lost"] == 0


def test_what_nobody_asks_for_is_given_up_in_time_and_counted(world: World) -> None:
    ask_ahead(world, place(world))
    assert used_count(world, "p0") > 0
    world.run(world.now + DEFAULT_BOOTSTRAP_TIMEOUT_S + 1.0)
    assert used_count(world, "p0") == 0
    assert world.nodes["p0"].core.is_idle
    assert state_of(world.nodes["p0"]).counters["hold_expired"] == 1


def test_who_comes_after_that_has_it_computed_again(world: World) -> None:
    where = place(world)
    ask_ahead(world, where)
    world.run(world.now + DEFAULT_BOOTSTRAP_TIMEOUT_S + 1.0)
    client = go_on(world, where)
    assert client.output == client.expected()
    assert state_of(world.nodes["d0"]).counters["holds_lost"] == 1


def test_a_room_that_was_never_held_is_computed_again(world: World) -> None:
    client = go_on(world, place(world))
    assert client.output == client.expected()


@pytest.mark.parametrize("is_back", [True, False])
def test_a_prefill_server_that_ended_in_between_costs_a_computation(
    world: World, is_back: bool
) -> None:
    where = place(world)
    ask_ahead(world, where)
    world.nodes["p0"].crash()
    if is_back:
        world.nodes["p0"].boot()
    client = go_on(world, where)
    assert client.output == client.expected()
    assert state_of(world.nodes["d0"]).counters["holds_lost"] == 1


def test_without_any_other_server_it_ends_in_one_error(world: World) -> None:
    where = place(world)
    ask_ahead(world, where)
    for name in ("p0", "p1"):
        world.nodes[name].crash()
    client = go_on(world, where, 15.0)
    assert client.failure.startswith("no_prefill_server")


def test_a_client_that_leaves_before_pages_are_reserved_frees_what_is_held(world: World) -> None:
    where = place(world)
    ask_ahead(world, where)
    world.nodes["d0"].freeze()
    client = world.submit(world.nodes["d0"], PROMPT, OUTPUT_COUNT, where)
    world.cancel(client)
    world.nodes["d0"].thaw()
    world.run(world.now + 1.0)
    assert used_count(world, "p0") == 0 and world.nodes["p0"].core.is_idle


def test_who_waits_for_pages_gets_those_of_an_old_hold(world: World) -> None:
    """Forgotten caches must not stop a server for half a minute."""
    for room in range(3):
        prompt = [100 * (room + 1) + index for index in range(70)]
        ask_ahead(world, place(world, room=room), prompt)
    world.run(world.now + UNDISTURBED_S)
    client = world.submit(world.nodes["p0"], list(range(500, 580)), 1, place(world, room=99))
    world.run(world.now + 4.0)
    assert client.finals == ["finished"]
    assert state_of(world.nodes["p0"]).counters["hold_expired"] >= 1


def test_a_first_token_that_ends_too_early_is_drawn_anew(world: World) -> None:
    """vLLM's proxy takes min_tokens away from the prefill server's half."""
    where = place(world)
    prompt = next(
        tokens for i in range(10_000) if next_token(tokens := [20, 20 + i], world.lives) == EOS
    )
    assert ask_ahead(world, where, prompt).output == [EOS]
    sampling = SamplingParams(max_new_tokens=4, seed=0, min_new_tokens=2)
    wanted = Client(len(world.clients) + 1, prompt, 4, "d0")
    world.clients[wanted.request_id] = wanted
    submit = Submit(wanted.request_id, prompt, sampling, 20.0, where)
    world.nodes["d0"].feed(FromFrontend(submit))
    world.run(world.now + 3.0)
    assert len(wanted.finals) == 1
    assert state_of(world.nodes["d0"]).counters["holds_lost"] == 1


@pytest.mark.parametrize("rule", ["allowed_token_ids", "bad_words"])
def test_a_first_token_that_its_client_forbids_begins_no_output(world: World, rule: str) -> None:
    """A prefill server of an older release knows no such rule, as the simulated ones don't."""
    drawn = next_token(PROMPT, world.lives)
    rules = {"allowed_token_ids": (drawn + 1,), "bad_words": ((drawn,),)}
    sampling = SamplingParams(max_new_tokens=4, seed=0, **{rule: rules[rule]})  # type: ignore[arg-type]
    wanted = Client(len(world.clients) + 1, PROMPT, 4, "d0")
    world.clients[wanted.request_id] = wanted
    world.nodes["d0"].feed(FromFrontend(Submit(wanted.request_id, PROMPT, sampling, 20.0)))
    world.run(world.now + 3.0)
    assert wanted.output == [] and wanted.failure.startswith("unfit_token")


def test_prompts_that_differ_are_refused(world: World) -> None:
    where = place(world)
    ask_ahead(world, where, PROMPT[:-1])
    client = go_on(world, where)
    assert client.failure.startswith("prompt_mismatch")
    assert used_count(world, "p0") == 0


@pytest.mark.parametrize("seed", range(4))
def test_without_accidents_all_is_answered_right(seed: int) -> None:
    world = run_story(seed, has_accidents=False, is_verified=False, has_two_steps=True)
    decoded = [one for one in world.clients.values() if one.role == "decode"]
    wanted = [one for one in decoded if not one.is_cancelled and not one.is_orphan]
    assert [one.failure for one in wanted if one.finals != ["finished"]] == []


@pytest.mark.parametrize("seed", range(8))
def test_whatever_breaks_every_request_ends_once_and_no_page_is_lost(seed: int) -> None:
    run_story(seed, has_two_steps=True)


def test_what_a_stopping_server_held_is_computed_again_at_once(world: World) -> None:
    """Its drain is over: it says so, and nobody waits for it to come back."""
    where = place(world)
    ask_ahead(world, where)
    world.nodes["p0"].drain()
    world.run(world.now + 0.5)
    assert state_of(world.nodes["p0"]).queues["held"] == 1, "it is held while the server drains"
    world.nodes["p0"].leave()
    world.run(world.now + 0.3)
    client = go_on(world, where, 1.0)
    assert client.output == client.expected()
    assert state_of(world.nodes["d0"]).counters["holds_lost"] == 1


def test_what_a_draining_server_holds_is_handed_over_and_then_it_is_idle(world: World) -> None:
    where = place(world)
    ask_ahead(world, where)
    world.nodes["p0"].drain()
    client = go_on(world, where)
    assert client.output == client.expected()
    assert state_of(world.nodes["d0"]).counters["holds_lost"] == 0
    assert world.nodes["p0"].core.is_idle
