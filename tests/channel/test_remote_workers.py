"""Workers on other machines reach their scheduler over tcp: by name, with the server's own key."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.channel.keys import Curve, load_own_curve, write_key_pair
from common.channel.local import LocalClient, LocalServer
from common.channel.poller import Poller
from common.channel.sockets import ChannelClosed, SendResult
from demo.servers import free_ports

PATIENCE_COUNT = 400
POLL_S = 0.02


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def make_curve(directory: Path, name: str) -> Curve:
    write_key_pair(directory / name)
    curve = load_own_curve(str(directory / name))
    assert curve is not None
    return curve


class Pair:
    """A scheduler's end, and those of processes around it."""

    def __init__(
        self, stack: contextlib.ExitStack, path: Path, address: str, curve: Curve | None
    ) -> None:
        self._stack, self._path, self._address = stack, str(path / "s.sock"), address
        server = LocalServer(self._path, address, ["worker-1"], curve)
        self.server = stack.enter_context(contextlib.closing(server))
        self.heard: list[tuple[str, bytes]] = []
        self.refusals: list[str] = []

    def connect(self, name: str, curve: Curve | None, *, is_remote: bool = True) -> LocalClient:
        where = self._address if is_remote else ""
        client = LocalClient(self._path, name, where, curve)
        return self._stack.enter_context(contextlib.closing(client))

    def turn(self, client: LocalClient) -> list[bytes]:
        """Wait a little for either end, and take in what has come."""
        poller = Poller()
        poller.register(self.server)
        poller.register(client)
        poller.poll(POLL_S)
        self.heard += self.server.receive()
        self.refusals += self.server.take_refusals()
        return client.receive()

    def hear(self, client: LocalClient) -> list[tuple[str, bytes]]:
        for _ in range(PATIENCE_COUNT):
            self.turn(client)
            if self.heard:
                break
        heard, self.heard = self.heard, []
        return heard


@pytest.mark.parametrize("has_keys", [False, True])
def test_messages_go_both_ways(
    directory: Path, address: str, stack: contextlib.ExitStack, has_keys: bool
) -> None:
    curve = make_curve(directory, "own") if has_keys else None
    pair = Pair(stack, directory, address, curve)
    near, far = pair.connect("worker-0", None, is_remote=False), pair.connect("worker-1", curve)
    for name, client in (("worker-0", near), ("worker-1", far)):
        client.send(b"here")
        assert pair.hear(client) == [(name, b"here")]
        assert pair.server.send(name, b"step") is SendResult.SENT
        answers: list[bytes] = []
        for _ in range(PATIENCE_COUNT):
            answers += pair.turn(client)
            if answers:
                break
        assert answers == [b"step"]


def test_another_key_gets_nowhere_and_is_told(
    directory: Path, address: str, stack: contextlib.ExitStack
) -> None:
    own, other = make_curve(directory, "own"), make_curve(directory, "other")
    pair = Pair(stack, directory, address, own)
    # It knows the server's public key, which is no secret.
    client = pair.connect("worker-1", Curve(other.pair, own.peers))
    client.send(b"let me in")
    with pytest.raises(ChannelClosed, match="the same --curve-secret-key-file"):
        for _ in range(PATIENCE_COUNT):
            pair.turn(client)
    assert pair.heard == [] and other.pair.public.hex() in pair.refusals[0]


@pytest.mark.parametrize("is_keyed", [False, True])
def test_only_one_side_with_keys_gets_nowhere(
    directory: Path, address: str, stack: contextlib.ExitStack, is_keyed: bool
) -> None:
    curve = make_curve(directory, "own")
    pair = Pair(stack, directory, address, curve if is_keyed else None)
    client = pair.connect("worker-1", None if is_keyed else curve)
    client.send(b"let me in")
    with pytest.raises(ChannelClosed):
        for _ in range(PATIENCE_COUNT):
            pair.turn(client)
    assert pair.heard == []


@pytest.mark.parametrize("name", ["frontend", "worker-0", "worker-2"])
def test_a_remote_process_can_be_no_other_than_a_remote_worker(
    directory: Path, address: str, stack: contextlib.ExitStack, name: str
) -> None:
    pair = Pair(stack, directory, address, None)
    forger, honest = pair.connect(name, None), pair.connect("worker-1", None)
    forger.send(b"I am another")
    while pair.server.malformed_count == 0:
        pair.turn(forger)
    honest.send(b"here")
    assert pair.hear(honest) == [("worker-1", b"here")]
    assert pair.server.send(name, b"secret") is SendResult.GONE
