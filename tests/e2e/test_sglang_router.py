"""SGLang's router, unmodified, in front of a pair: what it says to clients is what the decode
server would have said, and nothing that it does leaves anything behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import msgspec
import pytest

from demo.facts import make_question
from tests.e2e.fleet import Body, Fleet, Node, wait_until
from tests.e2e.replies import Completion, Logprob, Reply, event_payloads, texts_of
from tests.e2e.sglang_router import SglangRouter, sglang_router

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

QUESTIONS = [make_question(900 + index, 4 + 2 * index) for index in range(3)]
PROMPTS = [question.prompt for question in QUESTIONS]
IDS = [[20 + index % 900 for index in range(count)] for count in (37, 5, 21)]
GREEDY: Body = {"temperature": 0, "max_new_tokens": 24}
MESSAGES = [{"role": "user", "content": QUESTIONS[0].chat}]
GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
OPENAI: Body = {"model": "checkpoint", "temperature": 0, "max_tokens": 24}


@dataclass
class Routed:
    """A pair behind a router."""

    prefill: Node
    decode: Node
    router: SglangRouter

    def post_both_ways(self, path: str, body: Body) -> tuple[httpx.Response, httpx.Response]:
        """What the router answers, and what the decode server does."""
        return self.router.post(path, body), self.decode.post(path, body)

    def requests_count(self) -> tuple[float, float]:
        """Requests that each of both servers has been told of."""
        nodes = (self.prefill, self.decode)
        first, second = (node.info().counters["requests"] for node in nodes)
        return first, second


@pytest.fixture(scope="module")
def started(fleet: Fleet) -> Iterator[Routed]:
    prefill = fleet.prefill("--chunked-prefill-size", "32")
    decode = fleet.decode([prefill])
    # The decode server has dialled it as 127.0.0.1 when the router's name for it comes.
    log_path = fleet.log_dir / "router.log"
    with sglang_router([prefill], [decode], log_path, prefill_host="localhost") as router:
        fleet.wait_ready()
        wait_until("the router to be ready", router.is_ready)
        yield Routed(prefill, decode, router)


@pytest.fixture
def routed(started: Routed, fleet: Fleet) -> Iterator[Routed]:
    """The pair at rest; it must be at rest again after each test."""
    yield started
    fleet.wait_at_rest()


BODIES: dict[str, tuple[str, Body]] = {
    "text": (GENERATE, {"text": PROMPTS[0], "sampling_params": GREEDY}),
    "ids": (GENERATE, {"input_ids": IDS[0], "sampling_params": GREEDY}),
    "list of ids": (GENERATE, {"input_ids": IDS, "sampling_params": GREEDY}),
    "several": (GENERATE, {"text": PROMPTS[0], "sampling_params": GREEDY | {"n": 2}}),
    "completion": (COMPLETIONS, OPENAI | {"prompt": PROMPTS[0]}),
    "completions": (COMPLETIONS, OPENAI | {"prompt": PROMPTS}),
    "several completions": (COMPLETIONS, OPENAI | {"prompt": PROMPTS[0], "n": 2}),
    "several of each": (COMPLETIONS, OPENAI | {"prompt": PROMPTS, "n": 2}),
    "chat": (CHAT, OPENAI | {"messages": MESSAGES}),
    "several chats": (CHAT, OPENAI | {"messages": MESSAGES, "n": 2}),
}


@pytest.mark.parametrize("shape", BODIES)
def test_every_shape_of_body_is_answered_as_without_a_router(routed: Routed, shape: str) -> None:
    path, body = BODIES[shape]
    whole, direct = routed.post_both_ways(path, body)
    assert whole.status_code == direct.status_code == 200, whole.text
    assert whole.headers["content-type"] == "application/json"
    assert texts_of(path, [whole.content]) == texts_of(path, [direct.content])
    streamed = routed.router.post(path, body | {"stream": True})
    assert streamed.headers["content-type"] == "text/event-stream"
    assert texts_of(path, event_payloads(streamed)) == texts_of(path, [direct.content])


def input_logprobs(payload: bytes) -> list[Logprob]:
    return msgspec.json.decode(payload, type=Reply).meta_info.input_token_logprobs


@pytest.mark.parametrize("is_streaming", [False, True])
def test_log_probabilities_of_a_prompt_come_once(routed: Routed, is_streaming: bool) -> None:
    body: Body = {"input_ids": IDS[0], "sampling_params": GREEDY, "return_logprob": True}
    body |= {"logprob_start_len": 0, "stream": is_streaming}
    merged, direct = routed.post_both_ways(GENERATE, body)
    if is_streaming:
        (merged_last, direct_last) = (event_payloads(one)[-1] for one in (merged, direct))
    else:
        (merged_last, direct_last) = (one.content for one in (merged, direct))
    found = input_logprobs(merged_last)
    assert [token_id for _, token_id, _ in found] == IDS[0]
    assert found == input_logprobs(direct_last)


def test_log_probabilities_of_a_completion_are_the_decode_servers(routed: Routed) -> None:
    body = OPENAI | {"prompt": PROMPTS[0], "logprobs": 1, "echo": True}
    merged, direct = (
        msgspec.json.decode(one.content, type=Completion).choices[0]
        for one in routed.post_both_ways(COMPLETIONS, body)
    )
    assert merged.text == direct.text
    assert merged.logprobs is not None and direct.logprobs is not None
    assert merged.logprobs.tokens == direct.logprobs.tokens
    # A prompt is cut at other places where its beginning is cached: other sums, not other tokens.
    values = [value for value in direct.logprobs.token_logprobs if value is not None]
    assert merged.logprobs.token_logprobs[1:] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {"text": PROMPTS[0], "sampling_params": {"top_k": 0}}),
        (GENERATE, {}),
        (COMPLETIONS, OPENAI | {"prompt": PROMPTS[0], "best_of": 7}),
        (CHAT, OPENAI | {"messages": [{"role": "user", "content": "key " * 3000}]}),
        (GENERATE, {"input_ids": [5] * 4000}),
    ],
)
@pytest.mark.parametrize("is_streaming", [False, True])
def test_bad_input_is_answered_400_at_the_first_attempt(
    routed: Routed, path: str, body: Body, is_streaming: bool
) -> None:
    retries, requests = routed.router.retry_count(), routed.requests_count()
    answer = routed.router.post(path, body | {"stream": is_streaming})
    assert answer.status_code == 400, answer.text
    assert refused_message(routed.decode, path, body) in answer.text, "whole, whoever wraps it"
    assert routed.router.retry_count() == retries
    assert routed.requests_count() == requests, "neither scheduler hears of it"


def refused_message(node: Node, path: str, body: Body) -> str:
    """As it stands in a JSON string."""
    return json.dumps(node.refused(path, body, 400))[1:-1]


def test_an_unknown_model_is_404_at_the_first_attempt(routed: Routed) -> None:
    retries = routed.router.retry_count()
    body = OPENAI | {"model": "other", "messages": MESSAGES}
    assert routed.router.post(CHAT, body).status_code == 404
    assert routed.router.retry_count() == retries


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_client_that_leaves_ends_both_halves(routed: Routed, is_streaming: bool) -> None:
    """A stream is passed on live: its client leaves long before the last token is there."""
    aborted = routed.decode.info().counters["aborted"]
    sampling: Body = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}
    body: Body = {"input_ids": IDS[0], "sampling_params": sampling, "stream": is_streaming}
    url = routed.router.url + GENERATE
    if is_streaming:
        with routed.router.client.stream("POST", url, json=body) as response:
            assert next(response.iter_lines()).startswith("data: ")
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=httpx.Timeout(30.0, read=0.3))
    wait_until(
        "the decode server to give it up",
        lambda: routed.decode.info().counters["aborted"] == aborted + 1,
    )


def test_what_the_router_asks_of_servers_is_answered(routed: Routed) -> None:
    router = routed.router
    assert router.healthy_count() == 2
    models = msgspec.json.decode(router.get("/v1/models").content, type=Models)
    assert [card.id for card in models.data] == ["checkpoint"]
    assert router.get("/get_server_info").status_code == 200
    assert router.get("/get_model_info").json()["served_model_name"] == "checkpoint"
    assert router.post("/flush_cache").json()["workers_flushed"] == 2
    loads = msgspec.json.decode(router.get("/get_loads").content, type=Loads).workers
    assert len({one.worker for one in loads}) == 2
    assert all(one.load >= 0 for one in loads), "-1 stands for a load that can't be read"


class Card(msgspec.Struct):
    id: str


class Models(msgspec.Struct):
    data: list[Card]


class Load(msgspec.Struct):
    worker: str
    load: int


class Loads(msgspec.Struct):
    workers: list[Load]
