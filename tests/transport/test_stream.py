"""What streams promise beyond the contract: secrets, bounds, and what is left of them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from common.errors import TransportError
from common.transport.stream import StreamSettings, StreamTransport, parse_stream_address
from common.transport.transport import (
    ConnectionClosed,
    ConnectionFailed,
    ConnectionMade,
    RegionRefused,
    TargetDescriptor,
    TransferSettled,
    TransportEvent,
)
from tests.transport.stream_fuzz import FRAME_MAGIC, HEAD, World
from tests.transport.transport_pair import plan_of

NBYTES = 1 << 20
PATIENCE_S = 20.0
BRIEF_S = 0.2
NEVER_S = 3600.0


def transport_of(**changes: object) -> StreamTransport:
    values: dict[str, object] = {"connection_count": 2, **changes}
    return StreamTransport(StreamSettings(**values))  # type: ignore[arg-type]


class Ends:
    """A writer and a target in this process."""

    def __init__(self, *, is_encrypted: bool = False, **changes: object) -> None:
        self.writer = transport_of(is_encrypted=is_encrypted, **changes)
        self.target = transport_of(is_encrypted=is_encrypted, **changes)
        source = self.writer.allocate("source", NBYTES).view
        pool = self.target.allocate("pool", NBYTES).view
        assert source is not None and pool is not None
        self.source, self.pool = source, pool
        self.source[:] = np.random.default_rng(1).integers(1, 256, NBYTES, dtype=np.uint8)

    def connect(self, descriptor: TargetDescriptor) -> TransportEvent:
        self.writer.connect("target", descriptor)
        return self.next_event()

    def copy(self) -> TransferSettled:
        self.writer.submit("target", plan_of((0, 0, 0, 0, NBYTES)), 1)
        event = self.next_event()
        assert isinstance(event, TransferSettled), event
        return event

    def next_event(self) -> TransportEvent:
        while not (events := self.writer.poll()):
            assert self.writer.wait(PATIENCE_S), "nothing happens"
        (event,) = events[:1]
        return event

    def close(self) -> None:
        self.writer.close()
        self.target.close()


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def is_encrypted(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def ends(is_encrypted: bool) -> Iterator[Ends]:
    ends = Ends(is_encrypted=is_encrypted)
    yield ends
    ends.close()


# Secrets ------------------------------------------------------------------------------------------


def with_address(descriptor: TargetDescriptor, **changes: object) -> TargetDescriptor:
    address = msgspec.structs.replace(parse_stream_address(descriptor.stream_address), **changes)
    return replace(descriptor, stream_address=msgspec.msgpack.encode(address))


@pytest.mark.parametrize("changes", [{"secret": bytes(32)}, {"target": bytes(16)}])
def test_a_writer_with_another_secret_is_not_let_in(ends: Ends, changes: dict[str, bytes]) -> None:
    descriptor = ends.target.open_target("writer")
    assert isinstance(ends.connect(with_address(descriptor, **changes)), ConnectionFailed)
    assert not ends.pool.any()


def test_an_encrypted_writer_trusts_no_target_without_the_secret() -> None:
    """Who has taken the target's place, port and all, gets no byte."""
    ends, impostor = Ends(is_encrypted=True), transport_of(is_encrypted=True)
    try:
        impostor.allocate("pool", NBYTES)
        theirs = parse_stream_address(impostor.open_target("writer").stream_address)
        descriptor = with_address(ends.target.open_target("writer"), port=theirs.port)
        assert isinstance(ends.connect(descriptor), ConnectionFailed)
    finally:
        ends.close()
        impostor.close()


def test_both_ends_must_say_the_same_of_encryption() -> None:
    encrypted, plain = Ends(is_encrypted=True, handshake_s=BRIEF_S), Ends(handshake_s=BRIEF_S)
    try:
        assert isinstance(plain.connect(encrypted.target.open_target("w")), ConnectionFailed)
        assert isinstance(encrypted.connect(plain.target.open_target("w")), ConnectionFailed)
    finally:
        encrypted.close()
        plain.close()


def test_no_descriptor_shows_its_secret(ends: Ends) -> None:
    descriptor = ends.target.open_target("writer")
    address = parse_stream_address(descriptor.stream_address)
    for value in (address.secret, address.secret.hex(), str(address.secret)):
        assert str(value) not in str(descriptor)
        assert str(value) not in str(ends.target.describe())


class Middle:
    """A man in the middle: reads all traffic, and may change it."""

    def __init__(self, port: int, change: Callable[[bytes], bytes] = lambda data: data) -> None:
        self._port, self._change = port, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.heard = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._pass, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_writer: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if is_writer:
                    self.heard += data
                    data = self._change(data)
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()

    def close(self) -> None:
        self._listener.close()


def test_who_listens_in_on_what_is_encrypted_hears_nothing(ends: Ends, is_encrypted: bool) -> None:
    descriptor = ends.target.open_target("writer")
    middle = Middle(parse_stream_address(descriptor.stream_address).port)
    assert isinstance(ends.connect(with_address(descriptor, port=middle.port)), ConnectionMade)
    assert ends.copy().error is None
    assert np.array_equal(ends.pool, ends.source)
    secret = parse_stream_address(descriptor.stream_address).secret
    for known in (ends.source[:64].tobytes(), secret):
        assert (known in middle.heard) == (not is_encrypted)
    middle.close()


def test_a_byte_that_is_changed_on_the_way_is_not_stored() -> None:
    # A longer record than there is has to be waited for.
    ends = Ends(is_encrypted=True, stall_s=1.0)
    descriptor = ends.target.open_target("writer")

    def change(data: bytes) -> bytes:
        is_cache = len(data) > 8192
        return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:] if is_cache else data

    middle = Middle(parse_stream_address(descriptor.stream_address).port, change)
    assert isinstance(ends.connect(with_address(descriptor, port=middle.port)), ConnectionMade)
    settled = ends.copy()
    assert settled.error is not None and not settled.is_quiet
    ends.target.close_target("writer")
    stored = ends.pool != 0
    assert np.array_equal(ends.pool[stored], ends.source[stored])
    assert not stored.all()
    middle.close()
    ends.close()


# Bounds -------------------------------------------------------------------------------------------


def is_hung_up(connection: socket.socket) -> bool:
    connection.settimeout(PATIENCE_S)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def world_of(**changes: object) -> World:
    world = World()
    world.transport.close()
    world.transport = transport_of(**changes)
    world.transport.allocate("pool", 4096)
    descriptor = world.transport.open_target("writer")
    world.address = parse_stream_address(descriptor.stream_address)
    return world


@pytest.mark.parametrize("said", [b"", b"x", bytes(55)])
def test_a_stranger_is_heard_for_so_long_and_no_longer(said: bytes, is_encrypted: bool) -> None:
    world = world_of(handshake_s=BRIEF_S, stall_s=NEVER_S, is_encrypted=is_encrypted)
    with socket.create_connection((world.address.host, world.address.port)) as connection:
        connection.sendall(said)
        assert is_hung_up(connection)
    world.close()


def test_a_writer_that_stops_in_the_middle_of_a_frame_is_ended() -> None:
    world = world_of(stall_s=BRIEF_S)
    with socket.create_connection((world.address.host, world.address.port)) as connection:
        connection.sendall(world.hello() + HEAD.pack(FRAME_MAGIC, 1, 8, 1))
        assert is_hung_up(connection)
    world.close()


def test_a_target_that_stops_in_the_middle_of_a_frame_is_lost() -> None:
    """One that has let the writer in and then takes no byte."""
    ends = Ends(stall_s=BRIEF_S, connection_count=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        descriptor = with_address(ends.target.open_target("writer"), port=port)
        ends.writer.connect("target", descriptor)
        connection, _ = listener.accept()
        connection.sendall(bytes(8))
        assert isinstance(ends.next_event(), ConnectionMade)
        settled = ends.copy()
        assert settled.error == "the peer stopped in the middle" and not settled.is_quiet
        connection.close()
    ends.close()


@pytest.mark.slow
def test_one_writer_has_so_many_connections_and_no_more() -> None:
    world = world_of()
    connections = []
    for _ in range(16):
        connection = socket.create_connection((world.address.host, world.address.port))
        connection.sendall(world.hello())
        assert connection.recv(8) == bytes(8)
        connections.append(connection)
    assert world.ask(world.hello()) == []
    for connection in connections:
        connection.close()
    world.close()


def test_ports_that_are_taken_are_passed_over_and_none_left_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        transport = transport_of(ports=(port, port))
        with pytest.raises(TransportError, match=rf"all ports of {port}\.\.{port} are in use"):
            transport.open_target("writer", [])
        transport.close()
    transport = transport_of(ports=(port, port))
    address = parse_stream_address(transport.open_target("writer", []).stream_address)
    assert address.port == port
    transport.close()


def test_memory_of_a_gpu_is_refused_in_words() -> None:
    transport = transport_of()
    with pytest.raises(RegionRefused, match="memory of the host only, not of cuda"):
        transport.register("pages-0", 4096, 4096, "cuda")
    transport.close()


@pytest.mark.parametrize(
    "data",
    [b"", b"x", msgspec.msgpack.encode(["127.0.0.1", 0, bytes(16), bytes(32)])]
    + [msgspec.msgpack.encode(["127.0.0.1", 1, bytes(count), bytes(32)]) for count in (0, 15, 17)],
)
def test_an_address_that_is_none_is_refused(ends: Ends, data: bytes) -> None:
    descriptor = replace(ends.target.open_target("writer"), stream_address=data)
    with pytest.raises(TransportError, match="the peer announced"):
        ends.writer.connect("target", descriptor)


@pytest.mark.parametrize("host", ["localhost", "256.0.0.1", "", "x" * 300])
def test_a_host_that_is_no_number_is_not_looked_up(ends: Ends, host: str) -> None:
    descriptor = with_address(ends.target.open_target("writer"), host=host)
    event = ends.connect(descriptor)
    assert isinstance(event, ConnectionFailed) and "must be an IP address" in event.reason


# What stays ---------------------------------------------------------------------------------------


def in_use() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return tuple(len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("task", "fd"))  # type: ignore[return-value]


def test_peers_that_come_and_go_leave_no_thread_and_no_descriptor(is_encrypted: bool) -> None:
    before = in_use()
    ends = Ends(is_encrypted=is_encrypted)
    for _ in range(20):
        descriptor = ends.target.open_target("writer")
        assert isinstance(ends.connect(descriptor), ConnectionMade)
        assert ends.copy().error is None
        ends.writer.disconnect("target")
        assert isinstance(ends.next_event(), ConnectionClosed)
        ends.target.close_target("writer")
    ends.close()
    del ends
    assert in_use() == before
