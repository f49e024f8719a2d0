"""Proxies that ask the prefill server first and then the decode server, as vLLM's do: answers are
those of the decode server alone, and whatever does not come to its end leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest

from demo.facts import make_question
from tests.e2e.fleet import Body, Fleet, Node, wait_until
from tests.e2e.replies import event_payloads, texts_of
from tests.e2e.two_step_proxy import ASKED, Told, TwoStepProxy

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

QUESTIONS = [make_question(950 + index, 5 + 3 * index) for index in range(3)]
PROMPTS = [question.prompt for question in QUESTIONS]
MESSAGES = [{"role": "user", "content": QUESTIONS[0].chat}]
OPENAI: Body = {"model": "checkpoint", "temperature": 0, "max_tokens": 24}
GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, tuple[str, Body]] = {
    "completion": (COMPLETIONS, OPENAI | {"prompt": PROMPTS[0]}),
    "several of each": (COMPLETIONS, OPENAI | {"prompt": PROMPTS, "n": 2}),
    "chat": (CHAT, OPENAI | {"messages": MESSAGES}),
    "chat of many tokens": (CHAT, OPENAI | {"messages": MESSAGES, "min_tokens": 12}),
}
HOLD_S = "8"


@dataclass
class Pair:
    prefill: Node
    decode: Node
    fleet: Fleet

    def proxy(self, *, is_thorough: bool = True) -> TwoStepProxy:
        return TwoStepProxy(self.prefill, self.decode, self.fleet.client, is_thorough)

    def counted(self) -> tuple[float, float]:
        """Prompts that the prefill server has computed, and caches that were lost to somebody."""
        prefilled, decoded = self.prefill.info().counters, self.decode.info().counters
        return prefilled["finished"], decoded["holds_lost"]


@pytest.fixture(scope="module")
def started(fleet: Fleet) -> Pair:
    prefill = fleet.prefill("--chunked-prefill-size", "32", "--bootstrap-timeout", HOLD_S)
    decode = fleet.decode([prefill])
    fleet.wait_ready()
    return Pair(prefill, decode, fleet)


@pytest.fixture
def pair(started: Pair) -> Iterator[Pair]:
    """The pair at rest; it must be at rest again after each test."""
    yield started
    started.fleet.wait_at_rest()


@pytest.mark.parametrize("is_thorough", [True, False])
@pytest.mark.parametrize("shape", BODIES)
def test_an_answer_is_that_of_the_decode_server(pair: Pair, shape: str, is_thorough: bool) -> None:
    path, body = BODIES[shape]
    lost = pair.counted()[1]
    alone = pair.decode.post(path, body)
    proxy = pair.proxy(is_thorough=is_thorough)
    whole = proxy.post(path, body)
    assert whole.status_code == alone.status_code == 200, whole.text
    assert texts_of(path, [whole.content]) == texts_of(path, [alone.content])
    with proxy.stream(path, body) as response:
        response.read()
        assert texts_of(path, event_payloads(response)) == texts_of(path, [alone.content])
    assert pair.counted()[1] == lost, "every cache was transferred"


def test_a_prompt_is_computed_once(pair: Pair) -> None:
    """Before the decode server asks: afterwards no step of the prefill server is run."""
    body = OPENAI | {"prompt": PROMPTS[1]}
    params = pair.proxy().first_step(COMPLETIONS, body)
    pair.prefill.wait_queued("held")
    steps = pair.prefill.info().step_count
    assert pair.proxy().second_step(COMPLETIONS, body, params).status_code == 200
    assert pair.prefill.info().step_count == steps


def test_what_a_prefill_server_streams_names_it_too(pair: Pair) -> None:
    body = OPENAI | {"prompt": PROMPTS[0]}
    first = pair.prefill.post(COMPLETIONS, body | {"kv_transfer_params": ASKED, "stream": True})
    last = msgspec.json.decode(event_payloads(first)[-1], type=Told)
    answer = pair.proxy().second_step(COMPLETIONS, body, last.kv_transfer_params)
    assert answer.status_code == 200, answer.text


@pytest.mark.soak
def test_what_nobody_asks_for_is_free_again_in_time(pair: Pair) -> None:
    expired = pair.prefill.info().counters["hold_expired"]
    body = OPENAI | {"prompt": PROMPTS[2]}
    params = pair.proxy().first_step(COMPLETIONS, body)
    assert not pair.prefill.info().is_at_rest
    pair.prefill.wait_at_rest()
    assert pair.prefill.info().counters["hold_expired"] == expired + 1
    late = pair.proxy().second_step(COMPLETIONS, body, params)
    alone = pair.decode.post(COMPLETIONS, body)
    assert texts_of(COMPLETIONS, [late.content]) == texts_of(COMPLETIONS, [alone.content])


def test_a_first_step_that_goes_wrong_is_one_error(pair: Pair) -> None:
    body = OPENAI | {"prompt": PROMPTS[0], "kv_transfer_params": ASKED}
    assert "kv_transfer_params" in pair.decode.refused(COMPLETIONS, body, 400)
    other = body | {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "x"}}
    assert "remote_engine_id" in pair.decode.refused(COMPLETIONS, other, 400)
    assert pair.decode.post(COMPLETIONS, body | {"kv_transfer_params": None}).status_code == 200


@pytest.mark.soak
def test_a_prefill_server_that_is_restarted_in_between_costs_a_computation(pair: Pair) -> None:
    body = OPENAI | {"prompt": PROMPTS[0]}
    params = pair.proxy().first_step(COMPLETIONS, body)
    lost = pair.decode.info().counters["holds_lost"]
    pair.prefill.kill()
    pair.prefill.start().wait_ready()
    wait_until("the pair to be ready", lambda: pair.decode.get("/health").status_code == 200)
    answer = pair.proxy().second_step(COMPLETIONS, body, params)
    assert answer.status_code == 200, answer.text
    assert pair.decode.info().counters["holds_lost"] == lost + 1
