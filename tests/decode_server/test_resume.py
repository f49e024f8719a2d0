"""Requests that come with a part of their answer: they go on behind it, as if nothing had been."""

from __future__ import annotations

import msgspec
import pytest

from common.layout.component import FULL, SLOT, Live, LiveKind
from common.prefix_digests import DIGEST_NBYTES, extend_digests
from common.protocol.frontend import Cancel, Failed, Sibling, Submit, Tokens
from common.protocol.peer import Offer, TransferRequest
from common.request import Bootstrap, SamplingParams
from common.scheduling.events import Effect, FromFrontend, ToFrontend, ToPeer
from tests.decode_server.test_returns import returning_pair
from tests.sim.client import BUDGET_S, DIGEST_TOKENS, Client
from tests.sim.node import Node
from tests.sim.verdict import judge
from tests.sim.world import World, connected_pair

PROMPT = [20 + token for token in range(23)]
OUTPUT_COUNT = 30
LIVES = (FULL, SLOT, Live(LiveKind.TAIL, 4, 4), Live(LiveKind.WINDOW, 8))


def resume(
    world: World,
    node: Node,
    had_count: int,
    *,
    bootstrap: Bootstrap | None = None,
    sampling: SamplingParams | None = None,
) -> Client:
    """A request whose client has had the first tokens of the answer from another server."""
    client = Client(len(world.clients) + 1, PROMPT, OUTPUT_COUNT, node.name)
    client.output = client.expected(world.lives, count=had_count)
    world.clients[client.request_id] = client
    submit = Submit(
        client.request_id,
        list(PROMPT),
        sampling or SamplingParams(max_new_tokens=OUTPUT_COUNT, seed=0),
        BUDGET_S,
        bootstrap,
        prefix_digests=extend_digests(bytes(DIGEST_NBYTES), PROMPT, DIGEST_TOKENS),
        output_ids=list(client.output),
    )
    node.feed(FromFrontend(submit))
    return client


def watch(world: World) -> list[Effect]:
    told: list[Effect] = []
    world.watchers.append(lambda _, effect: told.append(effect))
    return told


@pytest.mark.parametrize("lives", [(FULL,), LIVES], ids=["full", "all"])
@pytest.mark.parametrize("had_count", [0, 1, 7, OUTPUT_COUNT - 1])
def test_it_goes_on_behind_what_its_client_has_had(had_count: int, lives: tuple[Live, ...]) -> None:
    world = World(seed=1)
    world.lives = lives
    for name, role in (("p0", "prefill"), ("d0", "decode")):
        node = world.add(name, role, 4, 64)
        node.page_counts = (64,) * len(lives)
    world.nodes["d0"].links = ["p0:1"]
    world.begin()
    told = watch(world)
    client = resume(world, world.nodes["d0"], had_count)
    world.run(world.now + 5.0)
    assert client.finals == ["finished"] and client.output == client.expected(lives)
    tokens = [
        one.message
        for one in told
        if isinstance(one, ToFrontend) and isinstance(one.message, Tokens)
    ]
    assert [one.offset for one in tokens] == list(range(had_count, OUTPUT_COUNT))
    (end,) = [one.trace for one in tokens if one.trace is not None]
    counts = (end.prompt_token_count, end.output_token_count, end.retraction_count)
    assert counts == (len(PROMPT), OUTPUT_COUNT, 0)
    judge(world)


def test_its_prefill_server_gets_all_tokens_and_is_asked_for_no_more_of_the_prompt() -> None:
    world = connected_pair()
    told = watch(world)
    sampling = SamplingParams(
        max_new_tokens=OUTPUT_COUNT, seed=0, return_logprob=True, logprob_start_len=0
    )
    room = Bootstrap("elsewhere", 1, 77)
    client = resume(world, world.nodes["d0"], 9, bootstrap=room, sampling=sampling)
    world.run(world.now + 5.0)
    assert client.output == client.expected()
    asked = [
        one.message
        for one in told
        if isinstance(one, ToPeer) and isinstance(one.message, TransferRequest)
    ]
    (request,) = [one for one in asked if not one.is_self_test]
    assert request.room is None and request.prompt_count == len(PROMPT)
    assert request.token_ids == PROMPT + client.expected(count=9)
    assert request.sampling is not None and request.sampling.logprob_start_len == -1
    assert request.sampling.return_logprob
    for one in told:
        if isinstance(one, ToFrontend) and isinstance(one.message, Tokens):
            assert one.message.prompt_logprobs == []


def test_it_goes_before_those_that_have_not_begun() -> None:
    world = connected_pair(decode_page_count=24)
    decode = world.nodes["d0"]
    first = world.submit(decode, [5] * 60, 20)
    world.run(world.now + 0.1)
    waiting = [world.submit(decode, [6 + index] * 60, 4) for index in range(3)]
    resumed = resume(world, decode, 5)
    world.run(world.now + 15.0)
    assert all(one.finals == ["finished"] for one in (first, resumed, *waiting))
    assert resumed.answered_at <= min(one.answered_at for one in waiting)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"output_ids": [1] * OUTPUT_COUNT}, "output of 30 tokens: must be fewer than 27 to go on"),
        ({"output_ids": [1] * 1000}, "output of 1000 tokens: must be fewer than 27"),
        ({"token_ids": [1] * 9, "output_ids": [1] * 25}, "must be fewer than 23 to go on"),
        ({"siblings": [Sibling(900, 3)]}, "must be of one sample, not 2"),
        ({"token_ids": []}, "prompt of 0 tokens"),
    ],
)
def test_what_could_never_go_on_is_refused(changes: dict[str, object], problem: str) -> None:
    world = connected_pair(decode_page_count=8)  # 32 tokens
    told = watch(world)
    submit = Submit(
        800, [1] * 5, SamplingParams(max_new_tokens=OUTPUT_COUNT, seed=0), 5.0, output_ids=[2, 3]
    )
    for request_id in (800, 900):
        world.clients[request_id] = Client(request_id, [1], 1, "d0")
    world.nodes["d0"].feed(FromFrontend(msgspec.structs.replace(submit, **changes)))
    failures = [
        one.message
        for one in told
        if isinstance(one, ToFrontend) and isinstance(one.message, Failed)
    ]
    assert failures and all(one.kind == "bad_request" for one in failures)
    assert problem in failures[0].message


@pytest.mark.parametrize("is_moved", [True, False])
def test_what_is_computed_of_a_request_that_moves_is_offered_and_of_a_cancelled_one_not(
    is_moved: bool,
) -> None:
    pair, _ = returning_pair()
    told = watch(pair.world)
    client = pair.world.submit(pair.decode, PROMPT, 100)
    while len(client.output) < 40:
        pair.world.run(pair.world.now + 0.01)
    pair.decode.feed(FromFrontend(Cancel(client.request_id, "goes on elsewhere", is_moved)))
    pair.world.run(pair.world.now + 2.0)
    offers = [
        one.message for one in told if isinstance(one, ToPeer) and isinstance(one.message, Offer)
    ]
    assert len(offers) == is_moved
    assert client.failure.startswith("moved" if is_moved else "aborted")
    if is_moved:
        assert offers[0].token_count > len(PROMPT) + 16
    counters = pair.decode.state().counters
    assert (counters["moved"], counters["aborted"]) == (is_moved, not is_moved)
    assert counters["failed"] == (not is_moved)
