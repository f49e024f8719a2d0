"""Servers of a pair start in any order, are killed and come back: the others go on, heal by
themselves, and lose no page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from demo.facts import Question, is_right, make_question
from tests.e2e.fleet import Body, Fleet, Node, reply_of, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

LONG_PROMPT = [20 + index % 900 for index in range(1800)]
BRIEF: Body = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
LONG: Body = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
QUESTION_COUNT = 24


@dataclass
class Pair:
    prefill: Node
    decode: Node
    fleet: Fleet
    transport: str


@pytest.fixture(scope="module", params=["shm", pytest.param("stream", marks=pytest.mark.soak)])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Every test that kills one of them starts it again."""
    flags = ("--transport", str(request.param))
    with Fleet(tmp_path_factory.mktemp("logs")) as fleet:
        # No prompt is there already: a long one is computed for long enough to be caught at it.
        slow = ("--chunked-prefill-size", "16", "--disable-radix-cache")
        prefill = fleet.prefill(*flags, *slow)
        decode = fleet.decode([prefill], *flags, "--disable-radix-cache")
        fleet.wait_ready()
        yield Pair(prefill, decode, fleet, str(request.param))


def ask(node: Node, question: Question) -> str:
    return node.generate(body_of(question)).text


def body_of(question: Question) -> Body:
    return {
        "text": question.prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 32},
    }


def is_answering(node: Node) -> bool:
    question = make_question(900, 12)
    return is_right(question, ask(node, question))


def knows_peer(node: Node, state: str) -> bool:
    return state in [peer.state for peer in node.info().peers]


def wait_health(node: Node, status: int) -> str:
    """Until /health answers `status`; its body."""
    wait_until(f"{node.name} to be {status}", lambda: node.get("/health").status_code == status)
    return node.get("/health").text


def test_a_decode_server_waits_for_its_prefill_server(fleet: Fleet) -> None:
    prefill = fleet.prefill(starts=False)
    decode = fleet.decode([prefill])
    wait_until(f"{decode.name}'s workers", lambda: "workers are ready" in decode.log)
    wait_until("its health", lambda: prefill.bootstrap in decode.get("/health").text)
    response = decode.get("/health")
    assert response.status_code == 503
    assert int(response.headers["Retry-After"]) > 0
    early = fleet.in_background(decode, body_of(make_question(901, 12)))
    decode.wait_queued("waiting")
    fleet.start(prefill)
    # The early request waits for some seconds only: it is answered, one way or the other.
    assert early.result().status_code in (200, 503)
    wait_health(decode, 200)
    assert is_answering(decode)


def test_a_killed_prefill_server_that_comes_back_is_used_again(pair: Pair) -> None:
    prefill, decode = pair.prefill, pair.decode
    long_body: Body = {"input_ids": LONG_PROMPT, "sampling_params": BRIEF}
    with decode.stream({"text": "Facts:", "sampling_params": LONG}) as events:
        next(events)
        caught = pair.fleet.in_background(decode, long_body)
        prefill.wait_queued("running")
        prefill.kill()
        last = list(events)[-1]
    assert len(last.output_ids) == LONG["max_new_tokens"], "what decodes needs no prefill server"
    wait_health(decode, 503)
    prefill.start()
    wait_health(decode, 200)
    assert is_answering(decode)
    # Either it waited long enough, or it was told that nobody is there.
    assert caught.result().status_code in (200, 503), caught.result().text
    pair.fleet.wait_at_rest()


def test_a_killed_decode_server_that_comes_back_is_served_again(pair: Pair) -> None:
    prefill, decode = pair.prefill, pair.decode
    long_body: Body = {"input_ids": LONG_PROMPT, "sampling_params": BRIEF}
    caught = pair.fleet.in_background(decode, long_body)
    prefill.wait_queued("running")
    decode.kill()
    assert caught.exception() is not None, "its connection broke"
    prefill.wait_at_rest()
    wait_until("the dead peer to be forgotten", lambda: not knows_peer(prefill, "connected"))
    decode.start().wait_ready()
    assert is_answering(decode)
    pair.fleet.wait_at_rest()


def test_a_writer_that_is_frozen_in_the_midst_of_its_puts_spoils_nothing(pair: Pair) -> None:
    prefill, decode = pair.prefill, pair.decode
    doomed: Body = {"input_ids": LONG_PROMPT, "sampling_params": BRIEF, "timeout": 2}
    questions = [make_question(940 + index, 16) for index in range(8)]
    with decode.stream({"text": "Facts:", "sampling_params": LONG}) as events:
        next(events)
        caught = pair.fleet.in_background(decode, doomed)
        prefill.wait_queued("inflight")
        with prefill.frozen("common.worker"):
            wait_until("its health", lambda: "worker 0 is stopped" in prefill.get("/health").text)
            response = caught.result()
            assert response.status_code in (503, 504), response.text
            # Over a stream, our closing of the connection is proof enough to have them back.
            if pair.transport == "shm":
                assert sum(group.quarantined for group in decode.info().page_groups) > 0
            last = list(events)[-1]
    assert len(last.output_ids) == LONG["max_new_tokens"], "the others went on"
    # What it still had to put lands while these are served from the pages that are free.
    pending = [pair.fleet.in_background(decode, body_of(question)) for question in questions]
    for question, future in zip(questions, pending, strict=True):
        assert is_right(question, reply_of(future.result()).text)
    pair.fleet.wait_at_rest()


def test_two_prefill_servers_share_the_load_and_stand_in_for_each_other(fleet: Fleet) -> None:
    questions = [make_question(910 + index, 16) for index in range(QUESTION_COUNT)]
    flags = ("--chunked-prefill-size", "16", "--disable-radix-cache")
    first, second = (fleet.prefill(*flags, name=name) for name in ("first", "second"))
    decode = fleet.decode([first, second], "--disable-radix-cache", name="decode-of-two")
    wait_until("both prefill servers", lambda: is_connected_to_both(decode))
    pending = [fleet.in_background(decode, body_of(question)) for question in questions]
    replies = [reply_of(future.result()) for future in pending]
    used = [reply.timeline.peer for reply in replies]
    shares = [used.count(node.bootstrap) for node in (first, second)]
    assert sum(shares) == QUESTION_COUNT
    assert min(shares) >= QUESTION_COUNT // 4, shares

    pending = [fleet.in_background(decode, body_of(question)) for question in questions]
    first.wait_queued("running")
    first.kill()
    for question, future in zip(questions, pending, strict=True):
        assert is_right(question, reply_of(future.result()).text)
    assert decode.get("/health").status_code == 200
    decode.wait_at_rest()
    second.wait_at_rest()


def is_connected_to_both(decode: Node) -> bool:
    return [peer.state for peer in decode.peers()] == ["connected"] * 2
