"""The transport contract over UCX where it reaches a target, and over a stream where it does not.

UCX reaches it through shared memory, CUDA IPC or RDMA, never through tcp. Both have the same
regions under the same numbers, and a target can be written to through either; the writer decides,
once for a connection, when it connects.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from dataclasses import replace

from common.errors import TransportError
from common.planner.copy_plan import CopyPlan
from common.transport.stream import StreamTransport
from common.transport.transport import (
    LOOPBACK,
    ConnectionClosed,
    ConnectionFailed,
    MemoryType,
    Region,
    TargetDescriptor,
    TransportEvent,
)
from common.transport.ucx import UcxTransport


class AutoTransport:
    """See transport.Transport for what each call promises. Not for use from several threads."""

    def __init__(self, ucx: UcxTransport, stream: StreamTransport) -> None:
        """Both new, and with the same `Connections`."""
        self._ucx = ucx
        self._stream = stream
        self._names: list[str] = []
        self._has_cuda = False
        self._mapped: set[str] = set()  # targets that UCX may write to
        self._carried_by: dict[str, UcxTransport | StreamTransport] = {}
        self._epoll = select.epoll()
        for transport in (ucx, stream):
            self._epoll.register(transport.fileno(), select.EPOLLIN)

    def allocate(self, name: str, nbytes: int) -> Region:
        region = self._ucx.allocate(name, nbytes)
        self._stream.register(name, region.address, nbytes, "host")
        self._names.append(name)
        return region

    def register(self, name: str, address: int, nbytes: int, memory_type: MemoryType) -> Region:
        region = self._ucx.register(name, address, nbytes, memory_type)
        if memory_type == "host":
            self._stream.register(name, address, nbytes, memory_type)
        else:
            self._has_cuda = True
            self._stream.skip(name)
        self._names.append(name)
        return region

    def open_target(
        self, peer: str, regions: Sequence[str] | None = None, host: str = LOOPBACK
    ) -> TargetDescriptor:
        names = self._names if regions is None else list(regions)
        streamed = self._stream.open_target(peer, names, host)
        if any(name in self._names and self._ucx.is_private(name) for name in names):
            return streamed  # UCX would reach only part of it
        try:
            target = self._ucx.open_target(peer, names, host)
        except TransportError:
            self._stream.close_target(peer)
            raise
        self._mapped.add(peer)
        return replace(target, stream_address=streamed.stream_address)

    def close_target(self, peer: str) -> None:
        self._stream.close_target(peer)
        if peer in self._mapped:
            self._mapped.remove(peer)
            self._ucx.close_target(peer)

    def connect(self, peer: str, descriptor: TargetDescriptor) -> None:
        if descriptor.worker_address and self._ucx.try_connect(peer, descriptor):
            self._carried_by[peer] = self._ucx
            return
        if not descriptor.stream_address:
            raise TransportError(f"connect {peer}: it is reached by nothing that this side may use")
        if self._has_cuda:
            raise TransportError(
                f"connect {peer}: memory of a GPU gets there by CUDA IPC, which needs one machine "
                "with process and IPC namespaces shared, or by RDMA, and neither reaches it"
            )
        self._stream.connect(peer, descriptor)
        self._carried_by[peer] = self._stream

    def disconnect(self, peer: str) -> None:
        self._carrier(peer).disconnect(peer)

    def submit(self, peer: str, plan: CopyPlan, tag: int) -> None:
        self._carrier(peer).submit(peer, plan, tag)

    def cancel(self, tag: int) -> None:
        self._ucx.cancel(tag)
        self._stream.cancel(tag)

    def poll(self) -> list[TransportEvent]:
        events = [*self._ucx.poll(), *self._stream.poll()]
        for event in events:
            if isinstance(event, ConnectionFailed | ConnectionClosed):
                self._carried_by.pop(event.peer)
        return events

    def fileno(self) -> int:
        return self._epoll.fileno()

    def wait(self, timeout_s: float) -> bool:
        return bool(self._epoll.poll(timeout_s))

    def close(self) -> None:
        self._ucx.close()
        self._stream.close()
        self._epoll.close()

    def describe(self) -> dict[str, object]:
        streamed = self._stream.describe()
        return {
            **self._ucx.describe(),
            "transport": "ucx, stream",
            "stream": streamed["stream"],
            "listens_at": streamed["listens_at"],
        }

    def _carrier(self, peer: str) -> UcxTransport | StreamTransport:
        # Neither knows a name that the other does not, and both refuse it in the same words.
        return self._carried_by.get(peer, self._ucx)
