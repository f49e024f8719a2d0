"""The transport contract over UCX: names and translates. native/ makes every UCX call."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.environment import shared_memory_dir
from common.errors import TransportError
from common.planner.copy_plan import CopyPlan
from common.transport.connections import Connections, NativeEvent
from common.transport.loader import UcxUnavailable, has_rdma_device, load_ucx
from common.transport.regions import Regions
from common.transport.room import WORKER_SHARED_NBYTES, check_files, check_shared_memory
from common.transport.transport import (
    LOOPBACK,
    ConnectionMade,
    MemoryType,
    PeerInUse,
    PlanOutOfBounds,
    Region,
    RegionDescriptor,
    RegionRefused,
    TargetDescriptor,
    TransportBroken,
    TransportEvent,
    UnknownPeer,
)

if TYPE_CHECKING:
    from baton_native import _ucx

log = logging.getLogger(__name__)

ENGINE_FAILED = 4
"""EventKind in native/queues.hpp; nothing comes after it."""

NativeRegion = tuple[int, int, bytes]
"""Address, size and key."""

NETWORK_TRANSPORTS = ("tcp", "rc", "rc_x", "rc_v", "dc", "dc_x", "ud", "ud_x", "ud_v", "ib", "all")
HOST_TRANSPORTS = frozenset({"posix", "sysv", "xpmem", "cma", "knem", "tcp", "self", "cuda_copy"})
"""UCX transports that copy GPU memory through the host's, a hundred times slower."""


@dataclass(frozen=True, slots=True)
class UcxSettings:
    """How this process uses UCX.

    tls: UCX transports, comma separated. `auto` is posix, with rc if there is an RDMA device and
        with CUDA's if `cuda_device` is set. Never tcp: UCX stores its bytes at any address that a
        frame names, from any sender.
    net_devices: UCX device names, comma separated, or all.
    ports: the first and the last that tcp may listen on; (0, 0): any.
    ucx: auto, wheel, system, or a directory; see loader.py.
    spin_us: how long the progress thread polls after traffic over a network, before it sleeps. On
        one host, a thread that the other end wakes is put on the waker's core, and the two take
        turns. So neither should sleep while bytes flow, or between two transfers. Runs of 256 KiB
        over tcp: 3.7 GB/s with 50 us, 5.2 with 400, 5.6 with 1500.
    keepalive_s: how often an idle peer is probed. This finds a dead host. A dead process is noticed
        at once over tcp; a stopped one only by the deadlines of the application.
    close_patience_s: how long operations of a connection that was closed by force may go on until
        this counts as broken. Milliseconds are usual; a device may have much to copy first.
    cuda_device: ordinal of the device whose memory is registered, or None.
    """

    tls: str = "auto"
    net_devices: str = "all"
    ports: tuple[int, int] = (0, 0)
    ucx: str = "auto"
    spin_us: int = 400
    keepalive_s: float = 2.0
    close_patience_s: float = 30.0
    cuda_device: int | None = None


class UcxTransport:
    """See transport.Transport for what each call promises. Not for use from several threads."""

    def __init__(
        self, settings: UcxSettings | None = None, connections: Connections | None = None
    ) -> None:
        """connections: shared with another transport that the same peers may be written by."""
        settings = settings or UcxSettings()
        self._tls = resolve_tls(settings)
        self._is_shared = "posix" in self._tls.split(",")
        self._has_cuda = settings.cuda_device is not None
        if self._is_shared:
            check_shared_memory("UCX", WORKER_SHARED_NBYTES)
        self._origin = load_ucx(settings.ucx)
        from baton_native import _ucx  # only now: it needs the libraries loaded above

        self._native = _ucx
        self._engine = start_engine(self._tls, settings)
        self._finalizer = weakref.finalize(self, self._engine.close)
        self._regions = Regions()
        self._targets: dict[str, int] = {}
        self._connections = connections or Connections()
        self._broken = ""

    def allocate(self, name: str, nbytes: int) -> Region:
        self._regions.check_new(name, nbytes)
        if self._is_shared:
            try:
                check_shared_memory(f"region {name}", nbytes)
            except TransportError as exc:
                raise RegionRefused(str(exc)) from exc
        with self._translated(f"region {name}", RegionRefused):
            index = self._engine.allocate(nbytes)
        address, _, _ = self._engine.region(index)
        if self._is_shared and not self._engine.is_shared(index):
            raise RegionRefused(
                f"region {name}: UCX fell back to memory that no other process can write; look "
                f"at the size and permissions of {shared_memory_dir()}"
            )
        view = self._engine.view(index)
        return self._regions.add(Region(name, index, address, nbytes, "host", view))

    def register(self, name: str, address: int, nbytes: int, memory_type: MemoryType) -> Region:
        self._regions.check_new(name, nbytes)
        if memory_type == "cuda" and "cuda" not in self._tls:
            raise RegionRefused(
                f"region {name}: CUDA memory needs cuda_copy,cuda_ipc in tls={self._tls}"
            )
        with self._translated(f"region {name}", RegionRefused):
            index = self._engine.enroll(address, nbytes, memory_type)
        return self._regions.add(Region(name, index, address, nbytes, memory_type, None))

    def open_target(
        self, peer: str, regions: Sequence[str] | None = None, host: str = LOOPBACK
    ) -> TargetDescriptor:
        if peer in self._targets:
            raise PeerInUse(f"open_target {peer}: already open")
        opened = self._regions.named(regions)
        for region in opened:
            if not has_network(self._tls) and self.is_private(region.name):
                raise RegionRefused(
                    f"region {region.name}: over tls={self._tls} only memory that was allocated "
                    "here or lies on a GPU can be written by others"
                )
        check_files(f"open_target {peer}")
        if self._is_shared:
            check_shared_memory(f"open_target {peer}", WORKER_SHARED_NBYTES)
        target_id = self._connections.take_id()
        with self._translated(f"open_target {peer}"):
            worker_address = self._engine.open_target(target_id)
        self._targets[peer] = target_id
        probe_address, probe_nbytes, probe_key = self._engine.probe()
        return TargetDescriptor(
            worker_address=worker_address,
            regions=tuple(self._describe_region(region) for region in opened),
            probe=RegionDescriptor("probe", probe_address, probe_nbytes, "host", probe_key),
        )

    def is_private(self, name: str) -> bool:
        """Whether a region is memory of the host that no other process can map."""
        region = self._regions[name]
        return region.memory_type == "host" and not self._engine.is_shared(region.index)

    def close_target(self, peer: str) -> None:
        if peer not in self._targets:
            raise UnknownPeer(f"close_target {peer}: must be one of {sorted(self._targets)}")
        with self._translated(f"close_target {peer}"):
            self._engine.close_target(self._targets.pop(peer))

    def connect(self, peer: str, descriptor: TargetDescriptor) -> None:
        peer_id, target = self._prepare(peer, descriptor)
        with self._translated(f"connect {peer}"):
            self._engine.connect(peer_id, *target)
        self._connections.add(peer, peer_id)

    def try_connect(self, peer: str, descriptor: TargetDescriptor) -> bool:
        """`connect`, or False, and no event, if no transport of this UCX reaches the target."""
        peer_id, target = self._prepare(peer, descriptor)
        with self._translated(f"connect {peer}"):
            is_reached = self._engine.try_connect(peer_id, *target)
        if is_reached:
            self._connections.add(peer, peer_id)
        return is_reached

    def disconnect(self, peer: str) -> None:
        with self._translated(f"disconnect {peer}"):
            self._engine.disconnect(self._connections.id_of(peer))

    def submit(self, peer: str, plan: CopyPlan, tag: int) -> None:
        try:
            self._connections.submit(self._engine.submit, peer, plan, tag)
        except self._native.PlanOutOfBoundsError as exc:
            raise PlanOutOfBounds(f"transfer to {peer}: {exc}") from exc
        except self._native.UcxError as exc:
            raise TransportError(f"transfer to {peer}: {exc}") from exc

    def cancel(self, tag: int) -> None:
        with self._translated(f"cancel {tag}"):
            if self._connections.is_open(tag):
                self._engine.cancel(tag)

    def poll(self) -> list[TransportEvent]:
        events = self._engine.drain()
        if events and events[-1][0] == ENGINE_FAILED:
            self._broken = events[-1][2]
        if self._broken:
            raise TransportBroken(self._broken)
        return [self._translate(event) for event in events]

    def fileno(self) -> int:
        return self._engine.fileno()

    def wait(self, timeout_s: float) -> bool:
        return self._engine.wait(timeout_s)

    def close(self) -> None:
        self._finalizer()

    def describe(self) -> dict[str, object]:
        return {
            "transport": "ucx",
            "ucx_version": self._native.version(),
            "ucx_origin": self._origin.kind,
            "ucx_directory": str(self._origin.directory),
            "tls": self._tls,
            "regions": self._regions.describe(),
            "targets": sorted(self._targets),
            **self._connections.describe(),
        }

    @contextmanager
    def _translated(self, what: str, kind: type[TransportError] = TransportError) -> Iterator[None]:
        try:
            yield
        except self._native.UcxError as exc:
            raise kind(f"{what}: {exc}") from exc

    def _prepare(
        self, peer: str, descriptor: TargetDescriptor
    ) -> tuple[int, tuple[bytes, list[NativeRegion], NativeRegion]]:
        """An id for a new connection, and the target as the engine takes it.

        Raises: PeerInUse, TransportError.
        """
        if not descriptor.worker_address:
            raise TransportError(f"connect {peer}: it is reached by streams only")
        self._connections.check_free(peer)
        check_files(f"connect {peer}")
        regions = [(region.address, region.nbytes, region.key) for region in descriptor.regions]
        probe = descriptor.probe
        target = descriptor.worker_address, regions, (probe.address, probe.nbytes, probe.key)
        return self._connections.take_id(), target

    def _describe_region(self, region: Region) -> RegionDescriptor:
        address, nbytes, key = self._engine.region(region.index)
        return RegionDescriptor(region.name, address, nbytes, region.memory_type, key)

    def _translate(self, event: NativeEvent) -> TransportEvent:
        named = self._connections.translate(event)
        if (
            isinstance(named, ConnectionMade)
            and self._has_cuda
            and goes_through_host(named.transports)
        ):
            log.warning(
                "%s: GPU memory goes there through the host's, over %s: CUDA IPC needs one "
                "machine, with process and IPC namespaces shared, and RDMA a network card",
                named.peer,
                named.transports,
            )
        return named


def resolve_tls(settings: UcxSettings) -> str:
    """The explicit UCX_TLS list."""
    if settings.tls != "auto":
        return settings.tls
    names = ["posix"]
    if has_rdma_device():
        names.insert(0, "rc")
    if settings.cuda_device is not None:
        names += ["cuda_copy", "cuda_ipc"]
    return ",".join(names)


def has_network(tls: str) -> bool:
    return not set(NETWORK_TRANSPORTS).isdisjoint(tls.split(","))


def goes_through_host(transports: str) -> bool:
    """Whether nothing of a connection's transports can write from one GPU's memory to another's."""
    return HOST_TRANSPORTS.issuperset(transports.split(","))


def start_engine(tls: str, settings: UcxSettings) -> _ucx.Engine:
    from baton_native import _ucx

    cuda_device = -1 if settings.cuda_device is None else settings.cuda_device
    try:
        return _ucx.Engine(
            tls=tls,
            net_devices=settings.net_devices,
            has_network=has_network(tls),
            tcp_ports="-".join(map(str, settings.ports)) if settings.ports != (0, 0) else "0",
            keepalive_s=settings.keepalive_s,
            spin_us=settings.spin_us,
            close_patience_s=settings.close_patience_s,
            cuda_device=cuda_device,
        )
    except _ucx.UcxError as exc:
        raise UcxUnavailable(str(exc)) from exc
