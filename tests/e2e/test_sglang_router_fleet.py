"""SGLang's router with two servers of each role: every policy that it has, its small sibling, and
servers that are killed under load and come back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

import httpx
import pytest

from demo.facts import Question, is_right, make_question
from tests.e2e.fleet import Body, Fleet, Node, reply_of, wait_until
from tests.e2e.replies import event_payloads, texts_of
from tests.e2e.sglang_router import SglangRouter, sglang_router

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.soak]

POLICIES = [
    *(("--policy", policy) for policy in ("random", "round_robin", "cache_aware", "power_of_two")),
    ("--policy", "manual"),
    ("--prefill-policy", "bucket", "--decode-policy", "random"),
]
GREEDY: Body = {"temperature": 0, "max_new_tokens": 24}
LOAD_COUNT = 24
SEEDS = count(2000)
# The router answers these itself when it runs out of attempts, or of servers it believes in.
GIVEN_UP = (500, 502, 503)


@dataclass
class House:
    prefills: list[Node]
    decodes: list[Node]
    fleet: Fleet

    def ask(self, router: SglangRouter, question: Question) -> Future[httpx.Response]:
        body: Body = {"text": question.prompt, "sampling_params": GREEDY}
        return self.fleet.threads.submit(router.post, "/generate", body)

    def finished_counts(self) -> list[float]:
        nodes = [*self.prefills, *self.decodes]
        return [node.info().counters["finished"] for node in nodes]


@pytest.fixture(scope="module")
def house(fleet: Fleet) -> House:
    prefills = [fleet.prefill(name=f"prefill{index}") for index in range(2)]
    decodes = [fleet.decode(prefills, name=f"decode{index}") for index in range(2)]
    fleet.wait_ready()
    return House(prefills, decodes, fleet)


@pytest.fixture
def router(request: pytest.FixtureRequest, house: House) -> Iterator[SglangRouter]:
    """The router with the flags that a test is parametrized by; all at rest after it."""
    log_path = house.fleet.log_dir / "router.log"
    with sglang_router(house.prefills, house.decodes, log_path, *request.param) as started:
        wait_until("the router to be ready", started.is_ready)
        started.wait_healthy(len(house.fleet.nodes))
        yield started
    house.fleet.wait_at_rest()


def questions() -> list[Question]:
    return [make_question(next(SEEDS), 4 + index % 12) for index in range(LOAD_COUNT)]


@pytest.mark.parametrize("router", POLICIES, indirect=True, ids=" ".join)
def test_every_policy_answers_a_load_right(house: House, router: SglangRouter) -> None:
    asked = questions()
    for question, future in [(one, house.ask(router, one)) for one in asked]:
        assert is_right(question, reply_of(future.result()).text)
    assert router.retry_count() == 0


@pytest.mark.parametrize("router", [("--policy", "round_robin")], indirect=True)
def test_all_servers_take_part(house: House, router: SglangRouter) -> None:
    before = house.finished_counts()
    futures = [house.ask(router, question) for question in questions()]
    assert all(future.result().status_code == 200 for future in futures)
    after = house.finished_counts()
    shares = [last - first for first, last in zip(before, after, strict=True)]
    assert shares == [LOAD_COUNT / 2] * 4


def test_the_small_router_works_streaming_and_not(house: House) -> None:
    """It parses the prefill server's events, and goes on with the decode server's alone."""
    log_path = house.fleet.log_dir / "mini_lb.log"
    with sglang_router(house.prefills, house.decodes, log_path, "--mini-lb") as router:
        wait_until("it to answer", lambda: answers(router))
        question = make_question(next(SEEDS), 8)
        body: Body = {"text": question.prompt, "sampling_params": GREEDY}
        batch = body | {"text": [question.prompt] * 2}
        for asked in (body, batch, body | {"return_logprob": True, "logprob_start_len": 0}):
            whole = router.post("/generate", asked)
            assert all(is_right(question, text) for text in texts_of("/generate", [whole.content]))
            events = event_payloads(router.post("/generate", asked | {"stream": True}))
            assert all(is_right(question, text) for text in texts_of("/generate", events))
    house.fleet.wait_at_rest()


def answers(router: SglangRouter) -> bool:
    try:
        return router.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("router", [("--policy", "round_robin")], indirect=True)
def test_a_killed_server_costs_retries_and_comes_back(
    house: House, router: SglangRouter, role: str
) -> None:
    victim = (house.prefills if role == "prefill" else house.decodes)[0]
    asked = questions()
    running = [(question, house.ask(router, question)) for question in asked]
    victim.kill()
    running += [(question, house.ask(router, question)) for question in questions()]
    for question, future in running:
        response = future.result()
        if response.status_code == 200:
            assert is_right(question, reply_of(response).text)
        else:
            assert response.status_code in GIVEN_UP, response.text
    router.wait_healthy(3)
    survivors = [node for node in house.fleet.nodes if node is not victim]
    for node in survivors:
        node.wait_at_rest()
    late = [(question, house.ask(router, question)) for question in questions()]
    assert all(is_right(question, reply_of(future.result()).text) for question, future in late)
    victim.start().wait_ready()
    router.wait_healthy(4)
    wait_until("it to be used again", lambda: is_used(house, router, victim))


def is_used(house: House, router: SglangRouter, node: Node) -> bool:
    """Ask one question; whether the server has finished anything since it came back."""
    question = make_question(next(SEEDS), 8)
    response = house.ask(router, question).result()
    assert response.status_code != 200 or is_right(question, reply_of(response).text)
    return node.info().counters["finished"] > 0
