"""The transport contract over tcp streams of our own; native/stream moves the bytes.

A target listens, and admits writers that know its random secret. Only the control channel carries
the secret. A writer sends it in the clear, or, where the control channel has keys, both sides prove
in a TLS 1.3 handshake that they know it. A write names a region by its number and an offset. The
receiver checks both before it stores a byte.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from baton_native import _stream

from common.errors import TransportError
from common.planner.copy_plan import CopyPlan
from common.transport.connections import Connections
from common.transport.regions import Regions
from common.transport.room import check_files
from common.transport.transport import (
    LOOPBACK,
    MemoryType,
    PeerInUse,
    PlanOutOfBounds,
    Region,
    RegionDescriptor,
    RegionRefused,
    TargetDescriptor,
    TransportEvent,
    UnknownPeer,
)

TARGET_ID_NBYTES = 16
SECRET_NBYTES = 32
CONNECTION_COUNT_MAX = 4


def default_connection_count() -> int:
    """Of one writer to one target: a connection keeps a core busy on either side."""
    return max(1, min(CONNECTION_COUNT_MAX, len(os.sched_getaffinity(0)) // 4))


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How this process uses streams.

    is_encrypted: must be equal on both ends.
    ports: the first and the last that may be listened on; (0, 0): any.
    connection_count: of one writer to one target.
    handshake_s: how long connecting may take, and how long a connection without the secret stays.
    stall_s: how long the other end may stand still in the middle of a frame, or owe an answer.
    keepalive_s: how often an idle connection is probed; three that are not answered end it.
    spin_us: how long a thread polls before it sleeps.
    rekey_nbytes: bytes that one TLS key encrypts.
    """

    is_encrypted: bool = False
    ports: tuple[int, int] = (0, 0)
    connection_count: int = field(default_factory=default_connection_count)
    handshake_s: float = 10.0
    stall_s: float = 30.0
    keepalive_s: float = 2.0
    spin_us: int = 50
    rekey_nbytes: int = 64 << 30


class StreamAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Address and credentials of a target. target, secret: random."""

    host: str
    port: int
    target: bytes
    secret: bytes


class StreamTransport:
    """See transport.Transport for what each call promises. Not for use from several threads."""

    def __init__(
        self, settings: StreamSettings | None = None, connections: Connections | None = None
    ) -> None:
        """connections: shared with another transport that the same peers may be written by."""
        self._settings = settings = settings or StreamSettings()
        self._engine = _stream.Engine(
            is_encrypted=settings.is_encrypted,
            connection_count=settings.connection_count,
            handshake_s=settings.handshake_s,
            stall_s=settings.stall_s,
            keepalive_s=settings.keepalive_s,
            spin_us=settings.spin_us,
            rekey_nbytes=settings.rekey_nbytes,
        )
        self._finalizer = weakref.finalize(self, self._engine.close)
        self._regions = Regions()
        self._targets: dict[str, bytes] = {}
        self._listens_at: set[str] = set()
        self._connections = connections or Connections()

    def allocate(self, name: str, nbytes: int) -> Region:
        self._regions.check_new(name, nbytes)
        with _translated(f"region {name}", RegionRefused):
            index = self._engine.allocate(nbytes)
        view = self._engine.view(index)
        address = self._engine.address(index)
        return self._regions.add(Region(name, index, address, nbytes, "host", view))

    def register(self, name: str, address: int, nbytes: int, memory_type: MemoryType) -> Region:
        self._regions.check_new(name, nbytes)
        if memory_type != "host":
            raise RegionRefused(
                f"region {name}: a stream moves memory of the host only, not of {memory_type}; "
                "what is in a GPU's goes through staging slots in the host's"
            )
        index = self._engine.enroll(address, nbytes)
        return self._regions.add(Region(name, index, address, nbytes, memory_type, None))

    def skip(self, name: str) -> None:
        """Takes the next region's number for memory that no stream can move."""
        index = self._engine.enroll(0, 0)
        self._regions.add(Region(name, index, 0, 0, "cuda", None))

    def open_target(
        self, peer: str, regions: Sequence[str] | None = None, host: str = LOOPBACK
    ) -> TargetDescriptor:
        if peer in self._targets:
            raise PeerInUse(f"open_target {peer}: already open")
        opened = self._regions.named(regions)
        check_files(f"open_target {peer}")
        with _translated(f"open_target {peer}"):
            port = self._engine.listen(host, *self._settings.ports)
        self._listens_at.add(f"{host}:{port}")
        target, secret = secrets.token_bytes(TARGET_ID_NBYTES), secrets.token_bytes(SECRET_NBYTES)
        self._engine.open_target(target, secret, [region.index for region in opened])
        self._targets[peer] = target
        return TargetDescriptor(
            worker_address=b"",
            regions=tuple(RegionDescriptor(r.name, 0, r.nbytes, "host", b"") for r in opened),
            probe=RegionDescriptor("probe", 0, 0, "host", b""),
            stream_address=msgspec.msgpack.encode(StreamAddress(host, port, target, secret)),
        )

    def close_target(self, peer: str) -> None:
        if peer not in self._targets:
            raise UnknownPeer(f"close_target {peer}: must be one of {sorted(self._targets)}")
        self._engine.close_target(self._targets.pop(peer))

    def connect(self, peer: str, descriptor: TargetDescriptor) -> None:
        self._connections.check_free(peer)
        check_files(f"connect {peer}")
        address = parse_stream_address(descriptor.stream_address)
        peer_id = self._connections.take_id()
        regions = [region.nbytes for region in descriptor.regions]
        with _translated(f"connect {peer}"):
            self._engine.connect(
                peer_id, address.host, address.port, address.target, address.secret, regions
            )
        self._connections.add(peer, peer_id)

    def disconnect(self, peer: str) -> None:
        self._engine.disconnect(self._connections.id_of(peer))

    def submit(self, peer: str, plan: CopyPlan, tag: int) -> None:
        try:
            self._connections.submit(self._engine.submit, peer, plan, tag)
        except _stream.PlanOutOfBoundsError as exc:
            raise PlanOutOfBounds(f"transfer to {peer}: {exc}") from exc

    def cancel(self, tag: int) -> None:
        if self._connections.is_open(tag):
            self._engine.cancel(tag)

    def poll(self) -> list[TransportEvent]:
        return [self._connections.translate(event) for event in self._engine.drain()]

    def fileno(self) -> int:
        return self._engine.fileno()

    def wait(self, timeout_s: float) -> bool:
        return self._engine.wait(timeout_s)

    def close(self) -> None:
        self._finalizer()

    def describe(self) -> dict[str, object]:
        return {
            "transport": "stream",
            "stream": "TLS 1.3" if self._settings.is_encrypted else "not encrypted",
            "listens_at": sorted(self._listens_at),
            "regions": self._regions.describe(),
            "targets": sorted(self._targets),
            **self._connections.describe(),
        }

    def incoming_counts(self) -> tuple[int, int]:
        """Connections to targets here, and those of them that have not shown a secret yet."""
        return self._engine.incoming_counts()


def parse_stream_address(data: bytes) -> StreamAddress:
    """Decode the address that a peer announced. Raises: TransportError."""
    try:
        address = msgspec.msgpack.decode(data, type=StreamAddress)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise TransportError(f"the peer announced no address of a stream: {exc}") from exc
    if not 1 <= address.port <= 65535:
        raise TransportError(f"the peer announced port {address.port}: must be in 1..65535")
    if (len(address.target), len(address.secret)) != (TARGET_ID_NBYTES, SECRET_NBYTES):
        raise TransportError("the peer announced a target's id or secret of another length")
    return address


@contextmanager
def _translated(what: str, kind: type[TransportError] = TransportError) -> Iterator[None]:
    try:
        yield
    except _stream.StreamError as exc:
        raise kind(f"{what}: {exc}") from exc
