"""Servers of a pair start in any order, are killed and come back: the others go on, heal by
themselves, and lose no page."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.facts import Question, is_right, make_question
from tests.e2e.fleet import Body, Fleet, Node, error_message, reply_of, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

TRANSPORT = pytest.mark.parametrize("transport", ["shm", "tcp"])
LONG_PROMPT = [20 + index % 900 for index in range(1800)]
BRIEF: Body = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
LONG: Body = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}
QUESTION_COUNT = 24


@pytest.fixture
def servers(tmp_path: Path) -> Fleet:
    """Of one test each, since every test kills some. Used as a context manager."""
    return Fleet(tmp_path)


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


def wait_listening(node: Node) -> None:
    """Until a server answers at all, ready or not."""
    wait_until(f"{node.name} to be connected or not", lambda: "listening" in node.log)
    wait_until(f"{node.name}'s workers", lambda: "workers are ready" in node.log)


def test_a_decode_server_waits_for_its_prefill_server(servers: Fleet) -> None:
    with servers as fleet:
        prefill = fleet.prefill(starts=False)
        decode = fleet.decode([prefill])
        wait_listening(decode)
        response = decode.get("/health")
        assert response.status_code == 503
        assert prefill.bootstrap in error_message(response)
        assert int(response.headers["Retry-After"]) > 0
        early = fleet.in_background(decode, body_of(make_question(901, 12)))
        decode.wait_queued("waiting")
        fleet.start(prefill)
        # The early request waited for some seconds only: it is answered, one way or the other.
        assert early.result().status_code in (200, 503)
        wait_health(decode, 200)
        assert is_answering(decode)


@TRANSPORT
def test_a_killed_prefill_server_that_comes_back_is_used_again(
    servers: Fleet, transport: str
) -> None:
    flags = ("--transport", transport)
    with servers as fleet:
        prefill = fleet.prefill(*flags, "--chunked-prefill-size", "16")
        decode = fleet.decode([prefill], *flags)
        fleet.wait_ready()
        assert is_answering(decode)
        caught = fleet.in_background(decode, {"input_ids": LONG_PROMPT, "sampling_params": BRIEF})
        prefill.wait_queued("running")
        prefill.kill()
        wait_health(decode, 503)
        prefill.start()
        wait_health(decode, 200)
        assert is_answering(decode)
        # Either it waited long enough, or it was told that nobody is there.
        assert caught.result().status_code in (200, 503), caught.result().text
        decode.wait_at_rest()
        prefill.wait_at_rest()


@TRANSPORT
def test_a_decoding_request_survives_the_death_of_its_prefill_server(
    servers: Fleet, transport: str
) -> None:
    flags = ("--transport", transport)
    with servers as fleet:
        prefill = fleet.prefill(*flags)
        decode = fleet.decode([prefill], *flags)
        fleet.wait_ready()
        body: Body = {"text": "Facts:", "sampling_params": LONG}
        with decode.stream(body) as events:
            next(events)
            prefill.kill()
            last = list(events)[-1]
        assert len(last.output_ids) == LONG["max_new_tokens"]
        decode.wait_at_rest()


@TRANSPORT
def test_a_killed_decode_server_that_comes_back_is_served_again(
    servers: Fleet, transport: str
) -> None:
    flags = ("--transport", transport)
    with servers as fleet:
        prefill = fleet.prefill(*flags, "--chunked-prefill-size", "16")
        decode = fleet.decode([prefill], *flags)
        fleet.wait_ready()
        caught = fleet.in_background(decode, {"input_ids": LONG_PROMPT, "sampling_params": BRIEF})
        prefill.wait_queued("running")
        decode.kill()
        assert caught.exception() is not None, "its connection broke"
        prefill.wait_at_rest()
        wait_until("the dead peer to be forgotten", lambda: not knows_peer(prefill, "connected"))
        decode.start().wait_ready()
        assert is_answering(decode)
        fleet.wait_at_rest()


def test_two_prefill_servers_share_the_load_and_stand_in_for_each_other(servers: Fleet) -> None:
    questions = [make_question(910 + index, 16) for index in range(QUESTION_COUNT)]
    with servers as fleet:
        flags = ("--chunked-prefill-size", "16")
        first = fleet.prefill(*flags, name="first")
        second = fleet.prefill(*flags, name="second")
        decode = fleet.decode([first, second])
        fleet.wait_ready()
        wait_until(
            "both prefill servers",
            lambda: [peer.state for peer in decode.info().peers] == ["connected"] * 2,
        )
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
