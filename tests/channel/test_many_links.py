"""What a round costs where many links are quiet: operations are counted, not timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import zmq

from common.channel import peer, sockets
from common.channel.handshakes import Handshakes
from common.channel.peer import PeerDialer, PeerListener
from common.channel.poller import Poller
from common.channel.sockets import SendResult

LINK_COUNT = 12
PATIENCE_COUNT = 1000
POLL_S = 0.02


class Cluster:
    """A dialler with a link to each of several listeners, all of them up and quiet."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.listeners = [
            stack.enter_context(contextlib.closing(PeerListener("127.0.0.1", 0)))
            for _ in range(LINK_COUNT)
        ]
        self.dialer = stack.enter_context(contextlib.closing(PeerDialer()))
        self.poller = Poller()
        self.poller.register(self.dialer)
        self.names: list[str] = []
        for listener in self.listeners:
            self.dialer.dial(f"127.0.0.1:{listener.port}")
        for listener in self.listeners:
            self.names.append(self._heard_by(listener))
        while self.poller.poll(POLL_S):
            assert self.dialer.receive() == []

    def _heard_by(self, listener: PeerListener) -> str:
        """The name of the link at its listener."""
        for _ in range(PATIENCE_COUNT):
            self.dialer.send(f"127.0.0.1:{listener.port}", b"hello")
            self.poller.poll(POLL_S)
            assert self.dialer.receive() == []
            messages = listener.receive()
            if messages:
                return messages[0][0]
        raise AssertionError("never connected")

    def speak(self, index: int) -> None:
        """One listener says something, and the dialler's poll has found it."""
        name = self.names[index]
        assert self.listeners[index].send(name, b"beat") is SendResult.SENT
        for _ in range(PATIENCE_COUNT):
            if self.poller.poll(POLL_S):
                return
        raise AssertionError("nothing came")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        yield Cluster(stack)


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, calls: list[object]) -> None:
    original: Callable[..., object] = getattr(owner, name)

    def call(subject: object, *arguments: object) -> object:
        calls.append(subject)
        return original(subject, *arguments)

    monkeypatch.setattr(owner, name, call)


def test_only_the_socket_that_can_be_read_is_tried(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.speak(3)
    tried: list[object] = []
    counted(monkeypatch, peer, "receive_dealt", tried)
    counted(monkeypatch, Handshakes, "read_events", tried)
    link = f"127.0.0.1:{cluster.listeners[3].port}"
    assert cluster.dialer.receive() == [(link, b"beat")]
    assert len(tried) == 1 and isinstance(tried[0], zmq.Socket)
    assert cluster.dialer.receive() == [], "nothing was found since"
    assert len(tried) == 1


def test_a_quiet_round_registers_nothing_and_a_new_link_is_waited_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[object] = []
    counted(monkeypatch, zmq.Poller, "register", registered)
    for _ in range(50):
        cluster.poller.poll(0)
        assert cluster.dialer.receive() == []
    assert registered == []
    with contextlib.closing(PeerListener("127.0.0.1", 0)) as listener:
        cluster.dialer.dial(f"127.0.0.1:{listener.port}")
        cluster.names.append(cluster._heard_by(listener))
        cluster.listeners.append(listener)
        cluster.speak(LINK_COUNT)
        assert cluster.dialer.receive() == [(f"127.0.0.1:{listener.port}", b"beat")]
    assert registered


def test_a_link_that_is_hung_up_is_not_waited_for_and_the_others_are(cluster: Cluster) -> None:
    gone = f"127.0.0.1:{cluster.listeners[0].port}"
    cluster.speak(0)
    cluster.dialer.hang_up(gone)
    assert cluster.dialer.receive() == [], "it was found readable and is closed since"
    cluster.speak(1)
    assert cluster.dialer.receive() == [(f"127.0.0.1:{cluster.listeners[1].port}", b"beat")]


def test_more_than_is_taken_at_a_time_is_found_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "RECEIVE_COUNT_MAX", 2)
    for _ in range(5):
        cluster.listeners[0].send(cluster.names[0], b"beat")
    heard: list[bytes] = []
    for _ in range(PATIENCE_COUNT):
        cluster.poller.poll(POLL_S)
        taken = [payload for _, payload in cluster.dialer.receive()]
        assert len(taken) <= 2
        heard += taken
        if len(heard) == 5:
            return
    raise AssertionError(f"only {len(heard)} of 5")
