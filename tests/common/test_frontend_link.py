"""What a scheduler says to its frontend: gathered, kept while the frontend reads nothing, and whole
in the end. Over a real socket; nothing sleeps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from common.channel.local import connect_local
from common.channel.poller import Poller
from common.channel.sockets import FRONTEND_QUEUE_MAX
from common.protocol import codec
from common.protocol.codec import decode_scheduler_to_frontend, encode
from common.protocol.frontend import (
    CallDone,
    Failed,
    GetState,
    Outputs,
    SchedulerToFrontend,
    Tokens,
    Traced,
)
from common.protocol.joined_tokens import JoinedTokens
from common.request import CachedTokens, FinishKind, FinishReason, RequestTrace, TokenLogprobs
from common.runtime import frontend_link, undelivered
from common.runtime.frontend_link import FrontendLink
from common.runtime.undelivered import Undelivered, tokens_nbytes

END = FinishReason(FinishKind.LENGTH)
PATIENCE_MS = 20_000  # only a failing test waits this long
STEP_COUNT = 20_000


def one_token(request_id: int, offset: int, *, is_last: bool = False) -> Tokens:
    return Tokens(request_id, [offset], offset=offset, finish=END if is_last else None)


def taken(waiting: Undelivered) -> list[SchedulerToFrontend]:
    return list(iter(waiting.take, None))


# ---- what waits ----------------------------------------------------------------------------------


def test_joined_messages_say_what_the_parts_said_and_leave_them_as_they_were() -> None:
    cached = CachedTokens(prefill=4)
    first = Tokens(1, [5], [TokenLogprobs(5, -1.0)], [b"of a chunk"], cached, offset=9)
    second = Tokens(1, [6], offset=10)
    last = Tokens(1, [7, 8], [TokenLogprobs(7, -2.0)], finish=END, offset=11)
    joined = JoinedTokens()
    for message in (first, second, last):
        joined.add(message)
    assert joined.take() == Tokens(
        1,
        [5, 6, 7, 8],
        [TokenLogprobs(5, -1.0), TokenLogprobs(7, -2.0)],
        [b"of a chunk"],
        cached,
        finish=END,
        offset=9,
    )
    assert (first.token_ids, first.prompt_logprobs) == ([5], [b"of a chunk"])
    assert joined.is_empty and joined.take() is None


def test_the_output_of_a_step_is_one_message() -> None:
    waiting = Undelivered()
    outputs = [one_token(1, 0), one_token(2, 4, is_last=True), Failed(3, 504, "timed_out", "late")]
    for output in outputs:
        waiting.add(output)
    assert taken(waiting) == [Outputs(outputs)]
    assert taken(waiting) == []


def test_steps_that_wait_are_joined_by_request_and_a_failure_comes_last() -> None:
    waiting = Undelivered()
    failed = Failed(1, 500, "transfer_failed", "peer lost")
    for message in (one_token(1, 0), one_token(2, 0), one_token(1, 1), failed, one_token(2, 1)):
        waiting.add(message)
    assert taken(waiting) == [Outputs([Tokens(1, [0, 1]), Tokens(2, [0, 1]), failed])]


def test_answers_and_accounts_keep_their_order_behind_the_output() -> None:
    waiting = Undelivered()
    said = [CallDone(1, True, ""), CallDone(2, True, ""), Traced(RequestTrace(5))]
    for message in (*said, one_token(1, 0)):
        waiting.add(message)
    assert taken(waiting) == [Outputs([one_token(1, 0)]), *said]


def test_accounts_that_are_too_many_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(undelivered, "TRACE_COUNT_MAX", 2)
    waiting = Undelivered()
    for request_id in range(5):
        waiting.add(Traced(RequestTrace(request_id)))
    assert taken(waiting) == [Traced(RequestTrace(3)), Traced(RequestTrace(4))]
    assert (waiting.take_dropped_count(), waiting.take_dropped_count()) == (3, 0)


def test_what_waits_is_weighed_by_what_it_takes_in_a_message() -> None:
    entry = TokenLogprobs(2**31, -1.5, [(2**31 + i, -0.1 * i) for i in range(20)], [(5, -9.0)])
    message = Tokens(1, [2**31] * 100, [entry] * 100, [b"x" * 5000])
    assert 0.9 < len(encode(Outputs([message]))) / tokens_nbytes(message) <= 1.0
    waiting = Undelivered()
    waiting.add(message)
    waiting.add(message)
    assert waiting.nbytes == 2 * tokens_nbytes(message)
    waiting.take()
    assert waiting.nbytes == 0


# ---- over a socket -------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return str(tmp_path / "frontend.sock")


@pytest.fixture
def link(path: str) -> Iterator[FrontendLink]:
    with contextlib.closing(FrontendLink(path)) as link:
        yield link


class Reader:
    """A frontend that reads when the test wants it to."""

    def __init__(self, path: str, link: FrontendLink) -> None:
        self._socket = connect_local(path, "frontend", receive_queue_max=FRONTEND_QUEUE_MAX)
        self._socket.send(encode(GetState(1)))
        poller = Poller()
        poller.register(link.endpoint)
        while not link.receive():
            assert poller.poll(PATIENCE_MS / 1000)

    def read(self) -> SchedulerToFrontend:
        assert self._socket.poll(PATIENCE_MS), "nothing came"
        return decode_scheduler_to_frontend(self._socket.recv(zmq.NOBLOCK))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def reader(path: str, link: FrontendLink) -> Iterator[Reader]:
    with contextlib.closing(Reader(path, link)) as reader:
        yield reader


def say_steps(link: FrontendLink, request_count: int) -> None:
    """STEP_COUNT steps of as many requests, with the answer to a question at the end."""
    for offset in range(STEP_COUNT):
        for request_id in range(request_count):
            link.add(one_token(request_id, offset, is_last=offset == STEP_COUNT - 1))
        link.flush()
    link.add(CallDone(7, True, ""))
    link.flush()


@pytest.mark.slow
def test_nothing_is_lost_or_repeated_while_nobody_reads(link: FrontendLink, reader: Reader) -> None:
    """Far more steps than any socket holds."""
    say_steps(link, 3)
    assert link.has_unsent and not link.endpoint.is_writable
    outputs: dict[int, list[int]] = {0: [], 1: [], 2: []}
    message_count = 0
    while not isinstance(message := reader.read(), CallDone):
        message_count += 1
        assert isinstance(message, Outputs)
        for item in message.items:
            assert isinstance(item, Tokens)
            assert item.offset == len(outputs[item.request_id])
            outputs[item.request_id] += item.token_ids
            assert (item.finish is not None) == (len(outputs[item.request_id]) == STEP_COUNT)
        link.flush()
    assert list(outputs.values()) == [list(range(STEP_COUNT))] * 3
    assert message_count < STEP_COUNT / 2, "what waits is joined"
    assert not link.has_unsent


def test_what_is_said_before_the_frontend_is_there_waits_for_it(
    link: FrontendLink, path: str
) -> None:
    link.add(one_token(1, 0))
    link.flush()
    assert link.has_unsent
    link.add(one_token(1, 1, is_last=True))
    with contextlib.closing(Reader(path, link)) as reader:
        link.flush()
        assert reader.read() == Outputs([one_token(1, 0)])
        assert reader.read() == Outputs([one_token(1, 1, is_last=True)])


def test_the_poller_wakes_once_there_is_room_and_not_before(
    link: FrontendLink, reader: Reader
) -> None:
    poller = Poller()
    poller.register(link.endpoint)
    count = 0
    while True:  # the system's own buffers fill as ZMQ's threads come to it
        while not link.has_unsent:
            link.add(CallDone(count, True, ""))
            link.flush()
            count += 1
        poller.wait_writable(link.endpoint, waits=True)
        if not poller.poll(0.05):
            break
        link.flush()
    assert [reader.read() for _ in range(count - 1)] == [
        CallDone(index, True, "") for index in range(count - 1)
    ]
    assert poller.poll(PATIENCE_MS / 1000) == [link.endpoint]
    link.flush()
    assert reader.read() == CallDone(count - 1, True, "")
    poller.wait_writable(link.endpoint, waits=False)
    assert poller.poll(0.0) == []


@pytest.mark.slow
def test_steps_have_to_wait_from_a_bound_on_until_all_has_left(
    link: FrontendLink, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_count_max = 50_000
    monkeypatch.setattr(frontend_link, "WAITING_NBYTES_MAX", 5 * token_count_max)
    offset = 0
    while not link.is_behind:
        link.add(one_token(1, offset))
        link.flush()
        offset += 1
    assert token_count_max < offset < 2 * token_count_max
    link.add(one_token(1, offset, is_last=True))
    count = 0
    while count <= offset:
        assert link.is_behind == (link.has_unsent or not count)
        message = reader.read()
        assert isinstance(message, Outputs) and isinstance(message.items[0], Tokens)
        count += len(message.items[0].token_ids)
        link.flush()
    assert not link.is_behind


def test_a_message_that_is_too_large_is_sent_in_parts(
    link: FrontendLink, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the request that is too large by itself ends for it."""
    monkeypatch.setattr(codec, "LOCAL_MESSAGE_NBYTES_MAX", 300)
    outputs = [one_token(request_id, 7) for request_id in range(1, 20)]
    outputs[11] = Tokens(12, [5], prompt_logprobs=[b"x" * 300])
    for output in outputs:
        link.add(output)
    link.flush()
    items: list[Tokens | Failed] = []
    while len(items) < len(outputs):
        message = reader.read()
        assert isinstance(message, Outputs)
        items += message.items
    failed = items.pop(11)
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.kind) == (12, "too_large")
    assert items == [*outputs[:11], *outputs[12:]]
    assert link.dropped_count == 1
