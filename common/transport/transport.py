"""The transport contract: write byte runs into another process's memory; learn when they arrived.

A transport moves bytes between registered regions by a `CopyPlan`. It knows nothing of pages,
requests, layers or the protocol that carries its descriptors.

Life of a connection, seen from the writer (`initiator`):

    target:    open_target("p0") -> TargetDescriptor     sent to the writer by other means
    initiator: connect("d0", descriptor)                 -> ConnectionMade | ConnectionFailed
    initiator: submit("d0", plan, tag)                   -> TransferSettled, exactly one per submit
    initiator: disconnect("d0")                          -> ConnectionClosed
    target:    close_target("p0")

Outcomes are events; calls raise only for what the caller could have known. When a connection
breaks, all its transfers settle with an error first and `ConnectionFailed` comes last. After
`ConnectionFailed` or `ConnectionClosed` the name may be connected again.

A settled transfer proves that no operation of it runs in this process any more, copies by CPU or
GPU included. With `error is None`, every byte is in the target's memory, visible to its owner.
Otherwise any of its runs may have arrived. If `is_quiet`, no byte of it changes at the target any
more. If not, the connection broke, and the network may carry bytes until the target has called
`close_target`.

So "settled here" and "closed there" together are proof on every transport. A writer that died
settles nothing; fences.py has the proofs for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import TransportError
from common.planner.copy_plan import CopyPlan

MemoryType = Literal["host", "cuda"]

TAG_MAX = 2**63 - 1
LOOPBACK = "127.0.0.1"

CANCELLED = "cancelled"
"""`TransferSettled.error` of a transfer that `cancel` stopped."""


class TransportBroken(TransportError):
    """The transport itself has failed: no peer can be reached, and nothing under way can be proved
    over. The process must end; that is the proof."""


class UnknownPeer(TransportError):
    """The name is neither connected nor connecting (or, for a target, not open)."""


class PeerInUse(TransportError):
    """The name is connected, connecting, or its last event has not been fetched yet."""


class TagInUse(TransportError):
    """A transfer with this tag has not settled yet."""


class PlanOutOfBounds(TransportError):
    """A run leaves its source or target region. Nothing of the plan was written."""


class RegionRefused(TransportError):
    """Memory can't be allocated or registered."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Memory of this process that plans may name as source `index`, in order of registration."""

    name: str
    index: int
    address: int
    nbytes: int
    memory_type: MemoryType
    view: NDArray[np.uint8] | None  # uint8[nbytes], no copy; None if the caller owns the memory


@dataclass(frozen=True, slots=True)
class RegionDescriptor:
    """A region as its owner announces it to one writer. `key` is opaque."""

    name: str
    address: int
    nbytes: int
    memory_type: MemoryType
    key: bytes


@dataclass(frozen=True, slots=True)
class TargetDescriptor:
    """All that a writer needs. Plain values, so that a protocol message can carry it.

    A plan's target region is an index into `regions`. `probe` is scratch memory of the target that
    connecting writes to, so that a connection that is up has already carried bytes.

    worker_address: of UCX, stream_address: of a stream; empty where the target has none. Both are
    opaque. The second one holds a secret: it is for its writer alone, and shown nowhere.
    """

    worker_address: bytes
    regions: tuple[RegionDescriptor, ...]
    probe: RegionDescriptor
    stream_address: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class ConnectionMade:
    """`transports` names the carriers of puts, comma separated: "posix", "tcp", "posix,tcp".

    Each name is one that fences.py answers for.
    """

    peer: str
    transports: str


@dataclass(frozen=True, slots=True)
class ConnectionFailed:
    """The connection could not be made, or broke. All its transfers have settled before."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """`disconnect` is complete. All transfers of the connection have settled before."""

    peer: str


@dataclass(frozen=True, slots=True)
class TransferSettled:
    """The one outcome of a `submit`. See the head of this file for its proof."""

    peer: str
    tag: int
    error: str | None
    is_quiet: bool
    nbytes: int  # handed to the transport; the plan's total if error is None
    run_count: int
    seconds: float  # from submit to here
    issue_cpu_seconds: float  # of the progress thread


TransportEvent = ConnectionMade | ConnectionFailed | ConnectionClosed | TransferSettled


class Transport(Protocol):
    """One per process, called from one thread. Only `wait` blocks, and never holds the GIL."""

    def allocate(self, name: str, nbytes: int) -> Region:
        """Zeroed host memory that other processes can write. Raises RegionRefused."""
        ...

    def register(self, name: str, address: int, nbytes: int, memory_type: MemoryType) -> Region:
        """Memory of the caller, who keeps it alive until `close`. Raises RegionRefused."""
        ...

    def open_target(
        self, peer: str, regions: Sequence[str] | None = None, host: str = LOOPBACK
    ) -> TargetDescriptor:
        """Lets one incarnation of a peer write into the named regions, by default all.

        host: the IP address of this machine at which the peer reaches it.
        Raises: PeerInUse, RegionRefused.
        """
        ...

    def close_target(self, peer: str) -> None:
        """Takes the way in away, and returns when it is gone. Raises UnknownPeer.

        Nothing lands any more of transfers that have settled at the writer. Nothing lands at all if
        `fences.is_fenced_by_close` says so of the writer's transports.
        """
        ...

    def connect(self, peer: str, descriptor: TargetDescriptor) -> None:
        """Starts connecting to a target. Raises PeerInUse."""
        ...

    def disconnect(self, peer: str) -> None:
        """Closes by force: open transfers settle with an error, then ConnectionClosed.

        An operation that does not end in time, such as a copy of a device that hangs, breaks the
        transport. If the connection has failed meanwhile, ConnectionFailed is its last event.
        Raises UnknownPeer.
        """
        ...

    def submit(self, peer: str, plan: CopyPlan, tag: int) -> None:
        """Copies every run of `plan`. Arrays are copied; source memory stays put until it settles.

        Raises: UnknownPeer, TagInUse, PlanOutOfBounds; then nothing was written and no event comes.
        """
        ...

    def cancel(self, tag: int) -> None:
        """Stops issuing runs. The transfer settles as CANCELLED, unless it was done already."""
        ...

    def poll(self) -> list[TransportEvent]:
        """Events since the last call, in order. Never blocks.

        Raises: TransportBroken, from then on; events that were not fetched before are lost.
        """
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` has something to return."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Blocks without the GIL until `poll` has something to return; False on timeout."""
        ...

    def close(self) -> None:
        """Ends every connection and the transport. Views of regions stay readable. Idempotent."""
        ...

    def describe(self) -> dict[str, object]:
        """Settings and connections in use, as plain values for a status page."""
        ...
