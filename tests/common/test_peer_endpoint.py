"""What a server makes of a link that says what it can't read; over real ZMQ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec
import pytest

from common.channel.peer import PeerDialer, PeerListener
from common.channel.poller import Poller
from common.channel.sockets import SendResult
from common.config import Role, ServerConfig
from common.protocol.codec import encode
from common.protocol.peer import (
    Abort,
    Quiesced,
    TransferDone,
    TransferFailed,
    TransferRequest,
)
from common.request import SamplingParams, TransferTrace
from common.runtime import peer_ends
from common.runtime.peer_endpoint import MALFORMED_COUNT_MAX, PeerEndpoint
from common.scheduling.events import Event, FromPeer, LinkDropped, UnreadableRequest

PATIENCE_S = 20.0  # only a failing test waits this long
NONSENSE = b"\xc1 no message"
ABORT = Abort(5, "decode", "prefill", "a client left")
SAMPLING = SamplingParams(max_new_tokens=1, seed=0)
REQUEST = TransferRequest(5, "decode", "prefill", 1, [], 1, [0], None, [5], 1, SAMPLING)
DONE = TransferDone(5, "decode", 1, 8, [0], TransferTrace())


def endpoint(role: Role, lines: list[str]) -> PeerEndpoint:
    config = ServerConfig(
        role=role, model_path="", tokenizer_path="", served_model_name="", port=1, bootstrap_port=0
    )
    open_peers = peer_ends.listen if role is Role.PREFILL else peer_ends.dial
    return PeerEndpoint(open_peers(config), lines.append)


@pytest.fixture
def lines() -> list[str]:
    """What is logged."""
    return []


@pytest.fixture
def prefill(lines: list[str]) -> Iterator[PeerEndpoint]:
    with contextlib.closing(endpoint(Role.PREFILL, lines)) as opened:
        yield opened


@pytest.fixture
def decode(lines: list[str]) -> Iterator[PeerEndpoint]:
    with contextlib.closing(endpoint(Role.DECODE, lines)) as opened:
        yield opened


@pytest.fixture
def dialer() -> Iterator[PeerDialer]:
    with contextlib.closing(PeerDialer()) as opened:
        yield opened


@pytest.fixture
def listener() -> Iterator[PeerListener]:
    with contextlib.closing(PeerListener("127.0.0.1", 0)) as opened:
        yield opened


def say(dialer: PeerDialer, link: str, payload: bytes) -> None:
    poller = Poller()
    poller.register(dialer)
    for _ in range(int(PATIENCE_S / 0.02)):
        if dialer.send(link, payload) is SendResult.SENT:
            return
        poller.poll(0.02)
        dialer.receive()
    raise AssertionError("never connected")


def events_of(heard: PeerEndpoint, count: int = 1) -> list[Event]:
    poller = Poller()
    poller.register(heard.links)
    events: list[Event] = []
    while len(events) < count:
        assert poller.poll(PATIENCE_S), "nothing came"
        events += heard.receive()
    return events


def dial(dialer: PeerDialer, prefill: PeerEndpoint) -> str:
    assert isinstance(prefill.links, PeerListener)
    link = f"127.0.0.1:{prefill.links.port}"
    dialer.dial(link)
    return link


def changed(message: TransferRequest | TransferDone, **change: object) -> bytes:
    fields = msgspec.msgpack.decode(encode(message), type=dict[str, object])
    return msgspec.msgpack.encode(fields | change)


def greet(decode: PeerEndpoint, listener: PeerListener) -> tuple[str, str]:
    """The two names of a link that the decode server has dialled and spoken on."""
    link = f"127.0.0.1:{listener.port}"
    assert decode.dial(link) is None
    assert isinstance(decode.links, PeerDialer)
    say(decode.links, link, encode(ABORT))
    poller = Poller()
    poller.register(listener)
    assert poller.poll(PATIENCE_S), "nothing came"
    ((name, _),) = listener.receive()
    return link, name


@dataclass
class Told:
    """One end of a link, and what tells it something from the other one."""

    heard: PeerEndpoint
    tell: Callable[[bytes], object]


@pytest.fixture(params=["prefill", "decode"])
def told(request: pytest.FixtureRequest) -> Told:
    """Either end: caches go both ways where answers go back."""
    heard: PeerEndpoint = request.getfixturevalue(request.param)
    if request.param == "prefill":
        dialer: PeerDialer = request.getfixturevalue("dialer")
        return Told(heard, partial(say, dialer, dial(dialer, heard)))
    listener: PeerListener = request.getfixturevalue("listener")
    _, name = greet(heard, listener)
    return Told(heard, partial(listener.send, name))


def test_a_reservation_that_can_not_be_read_is_told_as_one_and_never_drops_its_link(
    told: Told, lines: list[str]
) -> None:
    for _ in range(2 * MALFORMED_COUNT_MAX):
        told.tell(changed(REQUEST, budget_ms=-1))
    found = events_of(told.heard, 2 * MALFORMED_COUNT_MAX)
    names = {(e.transfer_id, e.incarnation) for e in found if isinstance(e, UnreadableRequest)}
    assert len(found) == 2 * MALFORMED_COUNT_MAX and names == {(5, "decode")}
    assert isinstance(found[0], UnreadableRequest) and "budget_ms=-1" in found[0].problem
    assert "budget_ms=-1" in lines[0]
    told.tell(encode(ABORT))
    (event,) = events_of(told.heard)
    assert isinstance(event, FromPeer) and event.message == ABORT


def test_a_result_that_can_not_be_read_ends_its_transfer(told: Told) -> None:
    told.tell(changed(DONE, first_token=-1))
    (event,) = events_of(told.heard)
    assert isinstance(event, FromPeer)
    failed = event.message
    assert isinstance(failed, TransferFailed)
    assert (failed.transfer_id, failed.peer_incarnation) == (5, "decode")
    assert (failed.kind, failed.status, failed.is_retryable) == ("transfer_failed", 500, True)
    assert "first_token=-1" in failed.message


def test_a_prefill_server_drops_a_link_that_says_nonsense_and_hears_it_when_it_is_dialled_anew(
    prefill: PeerEndpoint, dialer: PeerDialer
) -> None:
    link = dial(dialer, prefill)
    for _ in range(MALFORMED_COUNT_MAX):
        say(dialer, link, NONSENSE)
    (dropped,) = events_of(prefill)
    assert isinstance(dropped, LinkDropped) and f"{MALFORMED_COUNT_MAX} malf" in dropped.reason
    say(dialer, link, encode(ABORT))
    dialer.hang_up(link)
    dialer.dial(link)
    say(dialer, link, encode(ABORT))
    (event,) = events_of(prefill)
    assert isinstance(event, FromPeer) and event.link != dropped.link


def test_a_decode_server_closes_a_link_that_says_nonsense_and_may_dial_it_anew(
    decode: PeerEndpoint, listener: PeerListener
) -> None:
    link, name = greet(decode, listener)
    for _ in range(2 * MALFORMED_COUNT_MAX):
        listener.send(name, NONSENSE)
    dropped = events_of(decode)[0]
    assert isinstance(dropped, LinkDropped) and dropped.link == link
    assert decode.send(link, ABORT) is None, "it is gone, and that is no error"
    link, other_name = greet(decode, listener)
    assert other_name != name
    listener.send(other_name, encode(Quiesced(5, "decode")))
    (event,) = events_of(decode)
    assert event == FromPeer(link, Quiesced(5, "decode"))
