"""A random story of clients and accidents for one seed, and the judgement at its end."""

from __future__ import annotations

import random
from collections.abc import Callable

from common.request import Bootstrap, Claim
from tests.sim.accidents import (
    ACCIDENTS,
    plan_accident,
    plan_breaks,
    plan_outage,
    plan_stopped_frontends,
    plan_struck_returns,
    repair,
)
from tests.sim.client import BUDGET_S, Client
from tests.sim.comings import check_all_are_back, plan_comings
from tests.sim.moves import plan_moves
from tests.sim.node import Node
from tests.sim.pauses import plan_pauses
from tests.sim.samples import plan_samples
from tests.sim.servers import add_servers, count_traits
from tests.sim.sessions import POLL_S, plan_bursts, plan_sessions
from tests.sim.speculation import SPECULATION_SHARE, choose_speculation
from tests.sim.succession import plan_successions
from tests.sim.switches import SWITCH_SHARE, plan_switches
from tests.sim.updates import plan_updates
from tests.sim.upgrades import UPGRADE_SHARE, plan_upgrades
from tests.sim.verdict import check_flush, judge, run_to_rest
from tests.sim.world import World

QUIET_AT = 15.0  # accidents stop here; what is left must end by itself
ACCIDENT_COUNT_MAX = 8
BUDGETS_S = (BUDGET_S, BUDGET_S, BUDGET_S, 4.0, 1.0)

# Routed requests whose prefill server is asked first, and how long that holds what it computed:
# some accidents happen before it gives that up, and some after.
TWO_STEP_SHARE = 0.35
HOLD_S = 6.0
# How long a half whose other one never comes holds pages, where no accident is to blame if others
# do not get them in time.
CALM_LONE_S = 10.0

# Stories in which no prefill server is there for more than ten seconds.
OUTAGE_SHARE = 0.15

# Stories in which some prompts have several samples.
SAMPLES_SHARE = 0.4

# Stories in which some requests are more urgent than others, and clients show keys. Sessions and
# halves of a routed request go by the beginning of their prompt.
CLAIMS_SHARE = 0.4
PRIORITIES = (0, 0, 0, -3, 5)
CLIENTS = ("", "a", "a", "a", "b")
CLAIM_TOKENS = 3

# Routed requests whose first half comes late.
LATE_HALF_SHARE = 0.2
LATE_HALF_S = (0.3, 2.0)

# Requests of a hungry story that all grow far beyond what admission leaves free.
HUNGRY_SHARE = 0.2
HUNGRY_TOKENS = (60, 120)

# Sessions of a story. A crowded one has two servers of each role, with pools that hold a few
# prompts, and many sessions that servers end or stand still in the midst of.
SESSION_COUNTS = (0, 4)
CROWDED_SHARE = 0.2
CROWDED_SESSION_COUNTS = (5, 10)
CROWDED_ACCIDENTS = (
    *("crash", "crash", "linger", "freeze", "freeze", "stop worker", "stop server"),
    *("frozen writer", "frozen reader", "blink", "abort storm"),
)


def run_story(
    seed: int,
    *,
    has_accidents: bool = True,
    is_verified: bool = True,
    has_two_steps: bool = False,
    has_moves: bool = False,
    has_comings: bool = True,
    has_claims: bool = True,
    has_successions: bool = True,
    has_pauses: bool = False,
    has_updates: bool = False,
    speculation_share: float = SPECULATION_SHARE,
    switch_share: float | None = None,
    upgrade_share: float | None = None,
    log: list[str] | None = None,
) -> World:
    """Run the story of a seed to its end and judge it. Raises: AssertionError.

    is_verified: whether servers may compare caches, which hides whose fault a wrong one is.
    has_two_steps: whether some requests are computed before their decode server asks.
    has_moves: whether requests go on elsewhere, and after a crash.
    has_comings: whether prefill servers may be taken out of decode servers' lists for a while.
    has_claims: whether some requests may be more urgent than others, and clients show keys.
    has_pauses: whether servers are told to stand still for a while. has_updates: whether they get
    other weights.
    has_successions: whether schedulers may crash under workers that live.
    speculation_share: of stories, in how many decode servers verify proposals.
    switch_share: of stories, in how many servers take on the other role.
    upgrade_share: in how many some servers are of the first release, and are upgraded. Where these
    are not said, only stories with accidents have such changes.
    log: where to tell what happens.
    """
    if switch_share is None:
        switch_share = SWITCH_SHARE if has_accidents else 0.0
    if upgrade_share is None:
        upgrade_share = UPGRADE_SHARE if has_accidents else 0.0
    world = World(seed)
    world.log = log
    world.is_honest = True
    world.is_hurried = has_accidents
    if has_accidents:
        world.hold_s = HOLD_S
    crowd = random.Random(seed ^ 0xC40D)
    is_crowded = has_accidents and crowd.random() < CROWDED_SHARE
    world.tally["crowded"] += is_crowded
    rng = random.Random(seed ^ 0x5EED)
    add_servers(world, rng, seed, is_crowded=is_crowded, is_verified=is_verified)
    choose_speculation(world, seed, speculation_share)
    if has_claims:
        _choose_claims(world, seed)
    plan_upgrades(world, random.Random(seed ^ 0x6BADE), upgrade_share)
    for node in world.nodes.values():
        world.after(rng.uniform(0.0, 0.5), node.boot)
    world.start_ticks()
    _plan_requests(
        world,
        rng,
        rng.randint(3, 10) if is_crowded else rng.randint(10, 40),
        is_hungry=has_accidents and random.Random(seed ^ 0x40C6).random() < HUNGRY_SHARE,
        two_step_share=TWO_STEP_SHARE if has_two_steps else 0.0,
    )
    decodes = [node for node in world.nodes.values() if node.role == "decode"]
    forks = random.Random(seed ^ 0xF02C)
    if forks.random() < SAMPLES_SHARE:
        prefills = [node for node in world.nodes.values() if node.role == "prefill"]
        plan_samples(world, forks, prefills, decodes)
    if has_comings:
        plan_comings(world, random.Random(seed ^ 0xC0316), decodes)
    plan_bursts(world, random.Random(seed ^ 0xB0257), decodes)
    session_counts = CROWDED_SESSION_COUNTS if is_crowded else SESSION_COUNTS
    plan_sessions(world, random.Random(seed ^ 0x7423), decodes, session_counts)
    if has_successions and has_accidents:
        plan_successions(world, random.Random(seed ^ 0x50CCE5))
    plan_switches(world, random.Random(seed ^ 0x5317C4), switch_share)
    if has_moves:
        plan_moves(world, random.Random(seed ^ 0x30FE5))
    if has_pauses:
        plan_pauses(world, random.Random(seed ^ 0x9A05E))
    if has_updates:
        plan_updates(world, random.Random(seed ^ 0x3E16475))
    if has_accidents:
        _plan_accidents(world, rng, seed, is_crowded=is_crowded)
    world.run(QUIET_AT)
    repair(world)
    run_to_rest(world)
    judge(world)
    check_all_are_back(world)
    for node in world.nodes.values():
        node.harvest()
    count_traits(world)
    check_flush(world)
    return world


def _choose_claims(world: World, seed: int) -> None:
    if random.Random(seed ^ 0xC1A1).random() >= CLAIMS_SHARE:
        return
    world.tally["with priorities and keys"] += 1

    def claim_of(prompt: list[int]) -> Claim:
        rng = random.Random(f"claim {seed} {prompt[:CLAIM_TOKENS]} {len(prompt) // 20}")
        return Claim(rng.choice(PRIORITIES), rng.choice(CLIENTS))

    world.claim_of = claim_of


def _plan_accidents(world: World, rng: random.Random, seed: int, *, is_crowded: bool) -> None:
    for _ in range(rng.randint(0, ACCIDENT_COUNT_MAX)):
        plan_accident(world, rng, CROWDED_ACCIDENTS if is_crowded else ACCIDENTS)
    outage = random.Random(seed ^ 0x0FF)
    if outage.random() < OUTAGE_SHARE:
        plan_outage(world, outage)
    plan_stopped_frontends(world, random.Random(seed ^ 0xF407))
    plan_breaks(world, random.Random(seed ^ 0xB2EA))
    plan_struck_returns(world, random.Random(seed ^ 0x57A2C))


def _plan_requests(
    world: World, rng: random.Random, count: int, *, is_hungry: bool, two_step_share: float
) -> None:
    """is_hungry: all grow far beyond what their decode servers leave free for that."""
    nodes = list(world.nodes.values())
    prefills = [node for node in nodes if node.role == "prefill"]
    decodes = [node for node in nodes if node.role == "decode"]
    for decode in decodes:
        decode.expects_short_outputs = is_hungry
    shared = [rng.randint(10, 900) for _ in range(24)]
    for _ in range(count):
        _plan_request(
            world,
            rng,
            prefills,
            decodes,
            shared,
            is_hungry=is_hungry,
            two_step_share=two_step_share,
        )


def _plan_request(
    world: World,
    rng: random.Random,
    prefills: list[Node],
    decodes: list[Node],
    shared: list[int],
    *,
    is_hungry: bool,
    two_step_share: float,
) -> None:
    prompt = shared[: rng.choice((0, 8, 16, 24))]
    prompt = prompt + [rng.randint(10, 900) for _ in range(rng.randint(1, 60))]
    max_new_tokens = rng.randint(1, 40)
    if is_hungry:
        max_new_tokens = rng.randint(*HUNGRY_TOKENS)
    budget_s = rng.choice(BUDGETS_S) if world.is_hurried else BUDGET_S
    decode, prefill = rng.choice(decodes), rng.choice(prefills)
    is_routed = rng.random() < 0.4
    at = rng.uniform(0.5, 4.0 if is_hungry else 8.0)
    held: list[Client] = []

    is_orphan = is_routed and rng.random() < 0.1
    is_two_step = is_routed and rng_of(prompt).random() < two_step_share

    def submit_decode(room: Bootstrap | None) -> None:
        is_lone = is_orphan and not world.is_hurried
        left_s = min(budget_s, CALM_LONE_S) if is_lone else budget_s
        held.append(world.submit(decode, prompt, max_new_tokens, room, left_s))
        held[0].is_orphan = is_orphan

    if is_two_step:
        world.after(at, lambda: ask_ahead(world, prefill, prompt, submit_decode, rng_of(prompt)))
    elif is_routed:
        room = Bootstrap(prefill.name, 1, rng.getrandbits(62))
        world.after(at + rng.uniform(0, 0.1), lambda: submit_decode(room))
        if not is_orphan:
            late_s = _late_s(prompt)
            world.after(
                at + rng.uniform(0, 0.1) + late_s,
                lambda: _submit_first_half(world, prefill, prompt, room),
            )
    else:
        world.after(at, lambda: submit_decode(None))
    if rng.random() < 0.25:
        world.after(at + rng.uniform(0.1, 1.5), lambda: held and world.cancel(held[0]))


def _late_s(prompt: list[int]) -> float:
    """How much later than its decode half a routed request's other one comes: most at once, some
    when that has gone."""
    rng = random.Random(f"late {prompt}")
    return rng.uniform(*LATE_HALF_S) if rng.random() < LATE_HALF_SHARE else 0.0


def rng_of(prompt: list[int]) -> random.Random:
    """Dice of one request's own."""
    return random.Random(repr(prompt))


def ask_ahead(
    world: World,
    prefill: Node,
    prompt: list[int],
    go_on: Callable[[Bootstrap | None], None],
    rng: random.Random,
) -> Client:
    """As a proxy does that goes to the prefill server first: once that has answered, perhaps after
    a while, go on with what it says. Some never do."""
    prefill = world.stand_in(prefill)
    engine = prefill.facts.incarnation if prefill.life else "none"
    room = Bootstrap(prefill.name, 1, rng.getrandbits(62), engine)
    client = world.submit(prefill, prompt, 1, room)
    pause_s = rng.choice((0.0, 0.0, rng.uniform(0.0, 3.0), HOLD_S + rng.uniform(-1.0, 2.0)))
    is_forgotten = rng.random() < 0.1

    def look() -> None:
        if not client.finals:
            world.after(POLL_S, look)
        elif client.finals == ["finished"] and not is_forgotten:
            world.after(pause_s, lambda: go_on(room))

    look()
    return client


def _submit_first_half(world: World, prefill: Node, prompt: list[int], room: Bootstrap) -> None:
    world.submit(prefill, prompt, 1, room)
