"""One body posted to both servers, as a router does: any order of arrival, batches, retries, and
what happens to a half that stays alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

import httpx
import msgspec
import pytest

from demo.facts import Ask, Question, is_right, make_question
from tests.e2e.fleet import Body, Fleet, Node, error_message, reply_of
from tests.e2e.replies import Reply

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ROOM_MAX = 2**63 - 1
GREEDY: Body = {"temperature": 0, "max_new_tokens": 64}
QUESTIONS = [make_question(500 + index, 6 + 3 * index) for index in range(4)]
ROOMS = count(1000, 100)
"""Rooms that no other test uses; each may be the first of a hundred."""


@dataclass
class Router:
    """A pair, and a body for both."""

    prefill: Node
    decode: Node
    fleet: Fleet

    def body(self, room: object, *questions: Question, **more: object) -> Body:
        prompts = [question.prompt for question in questions or QUESTIONS[:1]]
        return {
            "text": prompts if len(questions) > 1 else prompts[0],
            "sampling_params": GREEDY,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.bootstrap_port,
            "bootstrap_room": room,
            **more,
        }

    def post(self, body: Body) -> tuple[httpx.Response, httpx.Response]:
        """Both halves, in no particular order: (prefill's reply, decode's reply)."""
        halves = [self.fleet.in_background(node, body) for node in (self.prefill, self.decode)]
        return halves[0].result(), halves[1].result()

    def is_met_by_both(self, room: int) -> bool:
        """Whether a request through a room works, as a router's next one would."""
        prefilled, decoded = self.post(self.body(room))
        return prefilled.status_code == 200 and is_right(QUESTIONS[0], reply_of(decoded).text)

    def offer(self, body: Body) -> Future[httpx.Response]:
        """The prefill half; it waits for the other one when this returns."""
        future = self.fleet.in_background(self.prefill, body)
        self.prefill.wait_queued("bootstrap")
        return future

    def reserve(self, body: Body) -> Future[httpx.Response]:
        """The decode half; its reservation waits at the prefill server when this returns."""
        future = self.fleet.in_background(self.decode, body)
        self.prefill.wait_queued("reservations")
        return future


@pytest.fixture(scope="module")
def started(fleet: Fleet) -> Router:
    prefill = fleet.prefill("--chunked-prefill-size", "32")
    decode = fleet.decode([prefill])
    fleet.wait_ready()
    return Router(prefill, decode, fleet)


@pytest.fixture
def router(started: Router) -> Iterator[Router]:
    """The pair at rest; it must be at rest again after each test."""
    yield started
    started.fleet.wait_at_rest()


def replies_of(response: httpx.Response) -> list[Reply]:
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=list[Reply])


def check_first_token(prefilled: Reply, decoded: Reply) -> None:
    """A prefill server's part is the first token and no more."""
    assert prefilled.output_ids == decoded.output_ids[:1]
    assert prefilled.meta_info.completion_tokens == 1
    assert prefilled.finish.type == "length"


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_either_half_may_come_first(router: Router, first: str) -> None:
    body = router.body(next(ROOMS))
    early = router.offer(body) if first == "prefill" else router.reserve(body)
    late = router.decode if first == "prefill" else router.prefill
    second = late.generate(body)
    replies = (reply_of(early.result()), second)
    prefilled, decoded = replies if first == "prefill" else reversed(replies)
    assert is_right(QUESTIONS[0], decoded.text)
    check_first_token(prefilled, decoded)


@pytest.mark.parametrize("is_list", [False, True])
def test_a_batch_meets_room_by_room(router: Router, is_list: bool) -> None:
    room = next(ROOMS)
    rooms = [room + 7 * index for index in range(len(QUESTIONS))]
    body = router.body(rooms if is_list else room, *QUESTIONS)
    prefilled, decoded = map(replies_of, router.post(body))
    for question, first, whole in zip(QUESTIONS, prefilled, decoded, strict=True):
        assert is_right(question, whole.text)
        check_first_token(first, whole)


def test_a_single_room_of_a_batch_counts_up(router: Router) -> None:
    room = next(ROOMS)
    batch = router.fleet.in_background(router.prefill, router.body(room, *QUESTIONS))
    router.prefill.wait_queued("bootstrap", len(QUESTIONS))
    for index, question in enumerate(QUESTIONS):
        decoded = router.decode.generate(router.body(room + index, question))
        assert is_right(question, decoded.text)
    assert len(replies_of(batch.result())) == len(QUESTIONS)


def test_samples_meet_in_one_room_and_follow_their_grammar(router: Router) -> None:
    """Each half answers all of them; another request may use the room afterwards."""
    room = next(ROOMS)
    sampling: Body = {"n": 5, "regex": "(red|blue)( [a-z]{2,9}){1,3}", "max_new_tokens": 40}
    asked = router.body(room, sampling_params=sampling | {"temperature": 1.0, "seed": 3})
    prefilled, decoded = map(replies_of, router.post(asked))
    assert [reply.meta_info.completion_tokens for reply in prefilled] == [1] * 5
    firsts = [reply.output_ids for reply in prefilled]
    assert firsts == [reply.output_ids[:1] for reply in decoded]
    for reply in decoded:
        assert re.fullmatch("(red|blue)( [a-z]{2,9}){1,3}", reply.text), reply.text
    assert len({reply.text for reply in decoded}) > 1
    moved = [reply.timeline.transfer.nbytes for reply in decoded]
    assert moved[0] > 0 and not any(moved[1:]), "one cache"
    assert router.is_met_by_both(room)


def test_fewer_samples_on_the_prefill_server_cost_another_transfer(router: Router) -> None:
    """A router that asks the prefill server for one sample of several."""
    sampling: Body = {"max_new_tokens": 9, "temperature": 1.0, "seed": 3}
    asked = router.body(next(ROOMS), sampling_params=sampling | {"n": 3})
    half = router.fleet.in_background(router.prefill, {**asked, "sampling_params": sampling})
    replies = router.decode.generate_list(asked)
    assert half.result().status_code == 200
    plain: Body = {"text": asked["text"], "sampling_params": sampling | {"n": 3}}
    whole = router.decode.generate_list(plain)
    assert [reply.output_ids for reply in replies] == [reply.output_ids for reply in whole]


def test_a_streamed_prefill_half_ends_after_one_token(router: Router) -> None:
    body = router.body(next(ROOMS))
    decoded = router.fleet.in_background(router.decode, body)
    with router.prefill.stream(body) as events:
        seen = list(events)
    check_first_token(seen[-1], reply_of(decoded.result()))


def test_a_streamed_decode_half_streams_the_whole_answer(router: Router) -> None:
    question = make_question(600, 8, ask=Ask.ALL)
    body = router.body(next(ROOMS), question)
    prefilled = router.fleet.in_background(router.prefill, body)
    with router.decode.stream(body) as events:
        seen = list(events)
    assert is_right(question, seen[-1].text)
    check_first_token(reply_of(prefilled.result()), seen[-1])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "Facts:"}),
        ("/v1/completions", {"model": "default", "prompt": "Facts:"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Facts:"}]}),
    ],
)
def test_a_prefill_server_refuses_what_has_no_room(router: Router, path: str, body: Body) -> None:
    assert "bootstrap_room" in router.prefill.refused(path, body, 400)


def test_the_largest_room_works_and_larger_ones_are_refused(router: Router) -> None:
    assert router.is_met_by_both(ROOM_MAX)
    pair = QUESTIONS[:2]
    prefilled, decoded = router.post(router.body(ROOM_MAX - 1, *pair))
    assert len(replies_of(prefilled)) == len(replies_of(decoded)) == 2
    for room, questions in ((ROOM_MAX + 1, pair[:1]), (ROOM_MAX, pair), (-1, pair[:1])):
        for response in router.post(router.body(room, *questions)):
            assert response.status_code == 400
            assert "bootstrap_room" in error_message(response)


def test_a_room_can_be_used_again_after_its_request(router: Router) -> None:
    room = next(ROOMS)
    assert router.is_met_by_both(room)
    assert router.is_met_by_both(room)


def test_a_retry_in_a_new_room_works_after_the_prefill_half_was_aborted(router: Router) -> None:
    body = router.body(next(ROOMS), rid="early-prefill")
    early = router.offer(body)
    router.prefill.post("/abort_request", {"rid": "early-prefill"})
    assert reply_of(early.result()).finish.type == "abort"
    assert router.is_met_by_both(next(ROOMS))


def test_a_retry_in_a_new_room_works_after_the_decode_half_was_aborted(router: Router) -> None:
    body = router.body(next(ROOMS), rid="early-decode")
    early = router.reserve(body)
    router.decode.post("/abort_request", {"rid": "early-decode"})
    assert reply_of(early.result()).finish.type == "abort"
    assert router.is_met_by_both(next(ROOMS))


def test_a_second_request_for_a_taken_room_is_refused(router: Router) -> None:
    room = next(ROOMS)
    first = router.offer(router.body(room))
    assert str(room) in router.prefill.refused("/generate", router.body(room), 400)
    assert is_right(QUESTIONS[0], router.decode.generate(router.body(room)).text)
    assert reply_of(first.result()).meta_info.completion_tokens == 1


def test_halves_with_different_prompts_are_both_refused(router: Router) -> None:
    room = next(ROOMS)
    first = router.offer(router.body(room, QUESTIONS[0]))
    message = router.decode.refused("/generate", router.body(room, QUESTIONS[1]), 400)
    assert "tokens" in message
    assert first.result().status_code == 400
