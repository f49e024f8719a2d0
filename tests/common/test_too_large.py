"""A message that its receiver would not take, for its size or for a bound, ends one request, never
the scheduler that has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.channel.sockets import SendResult
from common.config import Role, ServerConfig
from common.protocol import codec
from common.protocol.frontend import CallDone, Failed, Outputs, Tokens
from common.protocol.peer import Hello, TransferDone, TransferFailed, TransferRequest
from common.request import SamplingParams, TransferTrace
from common.runtime.peer_ends import dial
from common.runtime.scheduler_loop import SchedulerLoop
from common.scheduling.events import Dial, Effect, Event, FromPeer, ToFrontend, ToPeer

LINK = "127.0.0.1:9"
NBYTES_MAX = 300
HUGE = [b"x" * NBYTES_MAX]


class Listener:
    """A core that remembers what it is fed."""

    request_token_max = 1
    is_idle = True

    def __init__(self) -> None:
        self.events: list[Event] = []

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.events.append(event)
        return []

    def schedule(self, now: float) -> list[Effect]:
        return []

    def next_wakeup(self, now: float) -> float:
        return now


@pytest.fixture
def core() -> Listener:
    return Listener()


@pytest.fixture
def loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, core: Listener
) -> Iterator[SchedulerLoop]:
    monkeypatch.setattr(codec, "PEER_MESSAGE_NBYTES_MAX", NBYTES_MAX)
    monkeypatch.setattr(codec, "LOCAL_MESSAGE_NBYTES_MAX", NBYTES_MAX)
    tmp_path.chmod(0o700)
    config = ServerConfig(
        role=Role.DECODE,
        model_path="",
        tokenizer_path="",
        served_model_name="",
        port=1,
        runtime_dir=str(tmp_path),
    )
    loop = SchedulerLoop(config, lambda *_: core, dial)
    loop._core = core
    loop._carry_out([Dial(LINK)])
    yield loop
    loop.close()


def sent(loop: SchedulerLoop, monkeypatch: pytest.MonkeyPatch, effect: Effect) -> list[object]:
    """What the loop gave to its sockets."""
    payloads: list[bytes] = []

    def keep(_: object, payload: bytes) -> SendResult:
        payloads.append(payload)
        return SendResult.SENT

    monkeypatch.setattr(loop._sockets.peers.links, "send", keep)
    monkeypatch.setattr(loop._sockets.frontend.endpoint, "send", keep)
    loop._carry_out([effect])
    loop._sockets.frontend.flush()
    decode = (
        codec.decode_scheduler_to_frontend
        if isinstance(effect, ToFrontend)
        else codec.decode_peer_message
    )
    return [decode(payload) for payload in payloads]


def test_a_transfer_that_can_not_be_told_has_failed(
    loop: SchedulerLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = TransferDone(5, "decode", 3, 8, [0], TransferTrace(), prompt_logprobs=HUGE)
    (told,) = sent(loop, monkeypatch, ToPeer(LINK, done))
    assert isinstance(told, TransferFailed)
    assert (told.transfer_id, told.peer_incarnation) == (5, "decode")
    assert (told.kind, told.status, told.is_retryable) == ("too_large", 400, False)
    assert str(NBYTES_MAX) in told.message


def test_a_reservation_that_can_not_be_sent_is_answered_here(
    loop: SchedulerLoop, core: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = TransferRequest(5, "decode", "prefill", 3, [], 1, [0], token_ids=[5] * NBYTES_MAX)
    assert sent(loop, monkeypatch, ToPeer(LINK, request)) == []
    (event,) = core.events
    assert isinstance(event, FromPeer) and event.link == LINK
    answer = event.message
    assert isinstance(answer, TransferFailed)
    assert (answer.transfer_id, answer.peer_incarnation) == (5, "decode")
    assert (answer.kind, answer.is_retryable) == ("too_large", False)


def test_a_reservation_that_its_peer_would_refuse_is_answered_here(
    loop: SchedulerLoop, core: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(max_new_tokens=4, seed=0, temperature=-1.0)
    request = TransferRequest(5, "decode", "prefill", 1, [], 1, [0], None, [5], 1, sampling)
    assert sent(loop, monkeypatch, ToPeer(LINK, request)) == []
    (event,) = core.events
    assert isinstance(event, FromPeer) and isinstance(event.message, TransferFailed)
    answer = event.message
    assert (answer.transfer_id, answer.peer_incarnation) == (5, "decode")
    assert (answer.kind, answer.status, answer.is_retryable) == ("bad_reservation", 400, False)
    assert "TransferRequest.sampling.temperature=-1.0" in answer.message


def test_a_result_that_its_peer_would_refuse_is_told_as_failed(
    loop: SchedulerLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = TransferDone(5, "decode", 3, -1, [0], TransferTrace())
    (told,) = sent(loop, monkeypatch, ToPeer(LINK, done))
    assert isinstance(told, TransferFailed) and told.transfer_id == 5
    assert (told.kind, told.status, told.is_retryable) == ("transfer_failed", 500, True)
    assert "TransferDone.first_token=-1" in told.message


def test_tokens_that_can_not_be_told_are_an_error_of_their_request(
    loop: SchedulerLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    effect = ToFrontend(Tokens(7, [5], prompt_logprobs=HUGE))
    (message,) = sent(loop, monkeypatch, effect)
    assert isinstance(message, Outputs)
    (told,) = message.items
    assert isinstance(told, Failed)
    assert (told.request_id, told.status, told.kind) == (7, 400, "too_large")


def test_what_no_request_hangs_on_is_counted(
    loop: SchedulerLoop, core: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "x" * NBYTES_MAX
    assert sent(loop, monkeypatch, ToFrontend(CallDone(1, True, text))) == []
    hello = Hello(1, 1, text, "decode", {}, b"")
    assert sent(loop, monkeypatch, ToPeer(LINK, hello)) == []
    assert (loop._sockets.peers.dropped_count, loop._sockets.frontend.dropped_count) == (1, 1)
    assert core.events == []
