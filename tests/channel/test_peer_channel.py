"""Listener and dialler over real TCP on the loopback device."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
import zmq

from common.channel import sockets
from common.channel.handshakes import Break
from common.channel.peer import LINK_COUNT_MAX, PeerDialer, PeerListener
from common.channel.poller import Poller
from common.channel.sockets import PEER_QUEUE_MAX, SendResult
from common.errors import ConfigError

PATIENCE_S = 20.0  # only a failing test waits this long
POLL_S = 0.02


@pytest.fixture
def listener() -> Iterator[PeerListener]:
    with contextlib.closing(PeerListener("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def dialer() -> Iterator[PeerDialer]:
    with contextlib.closing(PeerDialer()) as dialer:
        yield dialer


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def receive_one(end: PeerListener | PeerDialer) -> tuple[str, bytes]:
    poller = Poller()
    poller.register(end)
    messages: list[tuple[str, bytes]] = []
    while not messages:
        assert poller.poll(PATIENCE_S) == [end], "nothing came"
        messages = end.receive()
    (message,) = messages
    return message


def send_until(
    end: PeerListener | PeerDialer, link: str, payload: bytes, wanted: SendResult
) -> None:
    """Send again and again, as schedulers do with their hellos, until the result is `wanted`."""
    poller = Poller()
    poller.register(end)
    for _ in range(int(PATIENCE_S / POLL_S)):
        if end.send(link, payload) is wanted:
            return
        poller.poll(POLL_S)
        assert end.receive() == []
    raise AssertionError(f"never {wanted}")


def test_a_dialled_link_carries_both_ways(listener: PeerListener, dialer: PeerDialer) -> None:
    link = f"127.0.0.1:{listener.port}"
    dialer.dial(link)
    send_until(dialer, link, b"hello", SendResult.SENT)

    name, payload = receive_one(listener)
    assert payload == b"hello"
    assert listener.send(name, b"welcome") is SendResult.SENT
    assert receive_one(dialer) == (link, b"welcome")


def test_links_to_two_servers_do_not_mix(listener: PeerListener, dialer: PeerDialer) -> None:
    with contextlib.closing(PeerListener("127.0.0.1", 0)) as other:
        links = [f"127.0.0.1:{end.port}" for end in (listener, other)]
        for link in links:
            dialer.dial(link)
            send_until(dialer, link, link.encode(), SendResult.SENT)
        for link, end in zip(links, (listener, other), strict=True):
            name, payload = receive_one(end)
            assert payload == link.encode()
            end.send(name, b"from " + payload)
            assert receive_one(dialer) == (link, b"from " + link.encode())


def test_a_link_keeps_its_name_and_a_new_one_gets_another(
    listener: PeerListener, dialer: PeerDialer
) -> None:
    link = f"127.0.0.1:{listener.port}"
    dialer.dial(link)
    send_until(dialer, link, b"1", SendResult.SENT)
    first, _ = receive_one(listener)
    assert dialer.send(link, b"2") is SendResult.SENT
    assert receive_one(listener) == (first, b"2")

    dialer.hang_up(link)
    dialer.dial(link)
    send_until(dialer, link, b"3", SendResult.SENT)
    second, _ = receive_one(listener)
    assert second != first


def test_nothing_piles_up_for_a_server_that_is_not_there(dialer: PeerDialer) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens, and nobody else can meanwhile
        link = f"127.0.0.1:{bound.getsockname()[1]}"
        dialer.dial(link)

        assert dialer.send(link, b"stale") is SendResult.FULL


def test_a_server_that_comes_back_is_found_again(dialer: PeerDialer) -> None:
    with contextlib.closing(PeerListener("127.0.0.1", 0)) as listener:
        port = listener.port
        link = f"127.0.0.1:{port}"
        dialer.dial(link)
        send_until(dialer, link, b"first life", SendResult.SENT)
        first_name, _ = receive_one(listener)
    send_until(dialer, link, b"lost", SendResult.FULL)

    with contextlib.closing(PeerListener("127.0.0.1", port)) as listener:
        send_until(dialer, link, b"second life", SendResult.SENT)
        assert receive_one(listener) == (first_name, b"second life")


def test_sending_to_a_link_that_is_gone_is_reported(listener: PeerListener) -> None:
    link = f"127.0.0.1:{listener.port}"
    with contextlib.closing(PeerDialer()) as dialer:
        dialer.dial(link)
        send_until(dialer, link, b"hello", SendResult.SENT)
        name, _ = receive_one(listener)

    send_until(listener, name, b"too late", SendResult.GONE)
    assert listener.send("00112233", b"never was") is SendResult.GONE


def test_sending_on_a_link_that_is_not_open_is_reported(dialer: PeerDialer) -> None:
    assert dialer.send("127.0.0.1:1", b"x") is SendResult.GONE


def test_a_full_queue_is_a_result_and_not_a_wait(
    listener: PeerListener, dialer: PeerDialer
) -> None:
    link = f"127.0.0.1:{listener.port}"
    dialer.dial(link)
    send_until(dialer, link, b"hello", SendResult.SENT)
    payload = bytes(1 << 16)  # so that what the kernel buffers does not matter
    results = [dialer.send(link, payload) for _ in range(3 * PEER_QUEUE_MAX)]
    assert SendResult.FULL in results


def test_malformed_messages_are_counted_and_dropped(listener: PeerListener) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(f"tcp://127.0.0.1:{listener.port}")
    socket.send_multipart([b"", b"two frames"])
    socket.send(b"one frame")
    _, payload = receive_one(listener)
    socket.close()

    assert payload == b"one frame"
    assert listener.malformed_count == 1


def test_a_message_above_the_limit_never_arrives(
    listener: PeerListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "PEER_MESSAGE_NBYTES_MAX", 1000)
    with (
        contextlib.closing(PeerListener("127.0.0.1", 0)) as strict,
        contextlib.closing(PeerDialer()) as dialer,
    ):
        link = f"127.0.0.1:{strict.port}"
        dialer.dial(link)
        send_until(dialer, link, bytes(1001), SendResult.SENT)
        send_until(dialer, link, b"small", SendResult.FULL)  # the connection was ended
        send_until(dialer, link, bytes(1000), SendResult.SENT)
        assert len(receive_one(strict)[1]) == 1000


def test_a_port_in_use_is_named(listener: PeerListener) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{listener.port}: the port is in use"):
        PeerListener("127.0.0.1", listener.port)


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:8998: Cannot assign"):
        PeerListener("192.0.2.1", 8998)


def test_a_host_that_does_not_resolve_is_refused() -> None:
    with pytest.raises(ConfigError, match="can't be resolved"):
        PeerListener("no-such-host.invalid", 8998)


def test_a_name_can_be_listened_on_and_dialled(dialer: PeerDialer) -> None:
    with contextlib.closing(PeerListener("localhost", 0)) as listener:
        link = f"localhost:{listener.port}"
        dialer.dial(link)
        send_until(dialer, link, b"hello", SendResult.SENT)
        assert receive_one(listener)[1] == b"hello"


def test_ipv6_works_where_the_machine_has_it(dialer: PeerDialer) -> None:
    try:
        listener = PeerListener("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with contextlib.closing(listener):
        link = f"[::1]:{listener.port}"
        dialer.dial(link)
        send_until(dialer, link, b"hello", SendResult.SENT)
        assert receive_one(listener)[1] == b"hello"


@pytest.mark.parametrize("link", ["nowhere", "host:0", "[::1]", "host:99999"])
def test_a_link_that_is_no_address_is_refused(dialer: PeerDialer, link: str) -> None:
    with pytest.raises(ConfigError):
        dialer.dial(link)
    assert [*dialer.sockets()[0]] == []


def test_links_are_bounded(dialer: PeerDialer) -> None:
    for index in range(LINK_COUNT_MAX):
        dialer.dial(f"127.0.0.1:{20000 + index}")
    with pytest.raises(ConfigError, match=f"{LINK_COUNT_MAX} links are open"):
        dialer.dial("127.0.0.1:1")


def test_a_connection_that_breaks_is_told_at_once_and_once_that_nobody_answers() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(PeerListener("127.0.0.1", 0)))
        dialer = stack.enter_context(contextlib.closing(PeerDialer()))
        link = f"127.0.0.1:{listener.port}"
        dialer.dial(link)
        send_until(dialer, link, b"here", SendResult.SENT)
        receive_one(listener)
        assert dialer.take_breaks() == []
        listener.close()
        poller = Poller()
        poller.register(dialer)
        breaks: list[tuple[str, Break]] = []
        while len(breaks) < 2:
            poller.poll(0.05)
            assert dialer.receive() == []
            breaks += dialer.take_breaks()
        assert breaks == [(link, Break.BROKEN), (link, Break.REFUSED)]


def test_an_address_that_never_answered_has_not_broken() -> None:
    # Bound and never listened on: it refuses every connection, and nobody else can take it.
    with closed_port() as port, contextlib.closing(PeerDialer()) as dialer:
        dialer.dial(f"127.0.0.1:{port}")
        poller = Poller()
        poller.register(dialer)
        for _ in range(10):
            poller.poll(0.05)
            assert dialer.receive() == []
            assert dialer.take_breaks() == []
