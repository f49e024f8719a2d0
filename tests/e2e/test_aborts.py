"""A request can be given up in any state and by any means: both servers stop working on it, every
page comes back, and later requests are answered right."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
import pytest

from demo.facts import is_right, make_question
from tests.e2e.fleet import Body, Fleet, Node, error_message, reply_of, wait_until
from tests.e2e.replies import Reply

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

# Over a hundred chunks: a prompt that is being computed long enough to be caught at it.
LONG_PROMPT = [20 + index % 900 for index in range(1800)]
SHORT_PROMPT = LONG_PROMPT[:40]
LONG: Body = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}
BRIEF: Body = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


@dataclass
class Pair:
    prefill: Node
    decode: Node
    fleet: Fleet

    def is_right_again(self) -> bool:
        """Whether everything came back and a new request is answered right."""
        self.fleet.wait_at_rest()
        question = make_question(800, 12)
        sampling: Body = {"temperature": 0, "max_new_tokens": 32}
        reply = self.decode.generate({"text": question.prompt, "sampling_params": sampling})
        return is_right(question, reply.text)


@pytest.fixture(scope="module")
def pair(fleet: Fleet) -> Pair:
    # Over tcp a put needs the target's process, so freezing that keeps a transfer under way.
    flags = ("--transport", "stream", "--disable-radix-cache", "--worker-timeout", "30")
    prefill = fleet.prefill(*flags, "--chunked-prefill-size", "16")
    decode = fleet.decode([prefill], *flags, "--max-running-requests", "1")
    fleet.wait_ready()
    return Pair(prefill, decode, fleet)


# ---- states: a context in which one request, the only one with the given body, is in that state --


@contextmanager
def waiting(pair: Pair, post: Callable[[Body], None]) -> Iterator[None]:
    body: Body = {"input_ids": SHORT_PROMPT, "sampling_params": LONG}
    # The second one is ready and waits for the place of the first.
    with pair.decode.stream(body) as other, pair.decode.stream(body) as ready:
        next(other)
        next(ready)
        post({"input_ids": SHORT_PROMPT, "sampling_params": BRIEF})
        pair.decode.wait_queued("waiting")
        yield
        wait_until("the queue to be empty", lambda: not pair.decode.info().queues["waiting"])
        assert next(other).meta_info.finish_reason is None, "the other request goes on"


@contextmanager
def prefilling(pair: Pair, post: Callable[[Body], None]) -> Iterator[None]:
    post({"input_ids": LONG_PROMPT, "sampling_params": BRIEF})
    pair.prefill.wait_queued("running")
    pair.decode.wait_queued("transfer")
    yield


@contextmanager
def transferring(pair: Pair, post: Callable[[Body], None]) -> Iterator[None]:
    with pair.decode.frozen("common.worker"):
        post({"input_ids": SHORT_PROMPT, "sampling_params": BRIEF})
        pair.prefill.wait_queued("inflight")
        wait_until("the prompt to be computed", lambda: not pair.prefill.has_queued("running"))
        yield


@contextmanager
def decoding(pair: Pair, post: Callable[[Body], None]) -> Iterator[None]:
    post({"input_ids": SHORT_PROMPT, "sampling_params": LONG})
    pair.decode.wait_queued("running")
    yield


STATES = pytest.mark.parametrize("state", [waiting, prefilling, transferring, decoding])
State = Callable[[Pair, Callable[[Body], None]], AbstractContextManager[None]]


# ---- ways to give up -----------------------------------------------------------------------------


class Connection:
    """A client that can hang up in the middle of a request."""

    def __init__(self, node: Node) -> None:
        self._netloc = urlsplit(node.url).netloc
        host, port = self._netloc.split(":")
        self._socket = socket.create_connection((host, int(port)))

    def post(self, body: Body) -> None:
        payload = msgspec.json.encode(body)
        head = f"POST /generate HTTP/1.1\r\nHost: {self._netloc}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        self._socket.sendall(head.encode() + payload)

    def close(self) -> None:
        self._socket.close()


@STATES
@pytest.mark.parametrize("streams", [False, True])
def test_a_disconnect_gives_everything_back(pair: Pair, state: State, streams: bool) -> None:
    client = Connection(pair.decode)
    with state(pair, lambda body: client.post(body | {"stream": streams})):
        client.close()
    assert pair.is_right_again()


@STATES
@pytest.mark.parametrize("streams", [False, True])
def test_an_abort_answers_and_gives_everything_back(
    pair: Pair, state: State, streams: bool
) -> None:
    answers: list[Callable[[], Reply]] = []

    def post(body: Body) -> None:
        named = body | {"rid": "given-up"}
        if streams:
            future = pair.fleet.threads.submit(last_event, pair.decode, named)
            answers.append(future.result)
        else:
            plain = pair.fleet.in_background(pair.decode, named)
            answers.append(lambda: reply_of(plain.result()))

    with state(pair, post):
        response = pair.decode.post("/abort_request", {"rid": "given-up"})
        assert response.json() == {"success": True, "aborted_count": 1}
        # Answered at once, also while a frozen peer still holds the pages.
        assert answers[0]().finish.type == "abort"
    assert pair.is_right_again()


def last_event(node: Node, body: Body) -> Reply:
    with node.stream(body) as events:
        return list(events)[-1]


def test_a_prefix_aborts_all_of_its_requests_and_no_other(pair: Pair) -> None:
    body: Body = {"input_ids": SHORT_PROMPT, "sampling_params": LONG}
    names = ["job-1", "job-2", "other"]
    pending = {name: pair.fleet.in_background(pair.decode, body | {"rid": name}) for name in names}
    wait_until("all to be open", lambda: sum(pair.decode.info().queues.values()) >= len(names))
    response = pair.decode.post("/abort_request", {"rid": "job-"})
    assert response.json()["aborted_count"] == 2
    for name in names[:2]:
        assert reply_of(pending[name].result()).finish.type == "abort"
    assert not pending["other"].done()
    assert pair.decode.post("/abort_request", {"rid": "other"}).json()["aborted_count"] == 1
    assert reply_of(pending["other"].result()).finish.type == "abort"
    assert pair.is_right_again()


def test_abort_all_aborts_what_runs_and_what_waits(pair: Pair) -> None:
    body: Body = {"input_ids": SHORT_PROMPT, "sampling_params": LONG}
    pending = [pair.fleet.in_background(pair.decode, body) for _ in range(4)]
    states = ("transfer", "ready", "running", "waiting")
    wait_until(
        "all to be there", lambda: sum(pair.decode.info().queues[s] for s in states) == len(pending)
    )
    response = pair.decode.post("/abort_request", {"abort_all": True})
    assert response.json()["aborted_count"] == 4
    assert {reply_of(future.result()).finish.type for future in pending} == {"abort"}
    assert pair.is_right_again()


def test_an_abort_of_nobody_is_no_error(pair: Pair) -> None:
    response = pair.decode.post("/abort_request", {"rid": "nobody"})
    assert (response.status_code, response.json()["aborted_count"]) == (200, 0)
    assert "rid" in pair.decode.refused("/abort_request", {}, 400)


@pytest.mark.parametrize("leaver", ["prefill", "decode"])
def test_a_half_that_hangs_up_ends_the_other_one_as_an_error(pair: Pair, leaver: str) -> None:
    body: Body = {
        "input_ids": LONG_PROMPT,
        "sampling_params": BRIEF,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": pair.prefill.bootstrap_port,
        "bootstrap_room": 77,
    }
    left, stays = pair.prefill, pair.decode
    if leaver == "decode":
        left, stays = stays, left
    client = Connection(left)
    client.post(body)
    pending = pair.fleet.in_background(stays, body)
    pair.prefill.wait_queued("running")
    client.close()
    response = pending.result()
    assert response.status_code == 500, response.text
    assert "went away" in error_message(response)
    assert pair.is_right_again()
