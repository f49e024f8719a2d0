"""The target of staged transfers on a decode rank: receives pieces in slots and scatters them.

    OpenPeer    -> a ring of slots for every source rank that writes here, announced in PeerOpened
    Expect      -> the pages that a transfer of a peer may fill
    SlotFilled  -> checked against ring and pages, scattered, answered by SlotFreed
    Forget      -> Forgotten: no scatter of the transfer runs now or later
    ClosePeer   -> its rings are void; its slots stay its own until ReclaimPeer

Owned by the I/O thread, which also scatters: no scatter is ever interrupted. Knows nothing of
requests. A lying peer reaches only pages that were announced for a transfer of that peer.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from common.channel.gate import Gate
from common.channel.peer import PeerListener, local_host_towards
from common.channel.sockets import SendResult, SocketSet
from common.errors import NotNow, PlanMismatch, ProtocolError
from common.layout.cache_layout import RankLayout, ServerLayout
from common.planner.pairing import TokenRange
from common.planner.staging import StagedPair, StagedPiece
from common.protocol.codec import decode_slot_filled, encode
from common.protocol.descriptor import StagingBufferDescriptor, StagingRing
from common.protocol.staging import SlotFilled, SlotFreed
from common.protocol.worker import Expect, Forget, Forgotten
from common.worker.staging.copier import Copier

log = logging.getLogger(__name__)

REGION = "staging-buffer"
SLOT_NBYTES_MAX = 4 << 20
"""Largest slot. A slot's put and its two messages wake six threads in two processes: 0.4 ms where
they share two cores. Copying 4 MiB takes as long."""

SLOT_NBYTES_MIN = 1 << 16
RING_SLOT_COUNT_MAX = 4
"""Slots of one source rank. Three keep gather, put and scatter busy; the fourth serves a transfer
that would wait for a slow one."""

SLOT_COUNT_MIN = 16
"""Least number of slots of a staging buffer, so that several source ranks find some."""

RING_ID_BITS = 62


def slot_nbytes_of(region_nbytes: int) -> int:
    """The largest power of two up to SLOT_NBYTES_MAX that gives SLOT_COUNT_MIN slots."""
    size = SLOT_NBYTES_MAX
    while size > SLOT_NBYTES_MIN and size * SLOT_COUNT_MIN > region_nbytes:
        size //= 2
    return size


class FreeSlots:
    """The free slots of a staging buffer. Pure."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def grant(self, ring_count: int) -> list[list[int]] | None:
        """Slots for every ring of a new peer; None if there is not one for each ring.

        A peer gets at most half of the free slots, so that the next peer finds some.
        """
        if ring_count == 0 or len(self._free) < ring_count:
            return None
        size = min(RING_SLOT_COUNT_MAX, max(1, len(self._free) // 2 // ring_count))
        taken, self._free = self._free[: size * ring_count], self._free[size * ring_count :]
        return [taken[index * size : (index + 1) * size] for index in range(ring_count)]

    def put_back(self, slots: Sequence[int]) -> None:
        assert not set(slots) & set(self._free)
        self._free = sorted([*self._free, *slots])


@dataclass(slots=True)
class _Ring:
    """Slots of one source rank. answered: per slot, its last sequence number and the answer."""

    peer: str
    source_rank: int
    slots: tuple[int, ...]
    pair: StagedPair
    answered: dict[int, tuple[int, str]] = field(default_factory=dict)


@dataclass(slots=True)
class TargetCounters:
    """Since start. refused: pieces that were not expected. late: pieces of a forgotten or unknown
    transfer. malformed: messages that can't be read."""

    pieces: int = 0
    nbytes: int = 0
    refused: int = 0
    late: int = 0
    malformed: int = 0


class StagingTarget:
    """Owner of the staging buffer, its rings, and the pages of expected transfers."""

    def __init__(
        self,
        region: Tensor,
        copier: Copier,
        layout: RankLayout,
        page_counts: Sequence[int],
        host: str,
        gate: Gate | None = None,
        ports: tuple[int, int] = (0, 0),
    ) -> None:
        """region: uint8[nbytes], registered with the transport as REGION.

        host: where to listen for a peer that was not dialled at any address.
        gate: admits connections by their keys. ports: first and last that may be listened on;
        (0, 0): any.
        """
        self._gate = gate
        self._ports = ports
        self._region = region
        self._copier = copier
        self._layout = layout
        self._page_counts = list(page_counts)
        self._host = host
        self.slot_nbytes = slot_nbytes_of(len(region))
        self._slots = FreeSlots(len(region) // self.slot_nbytes)
        self._slots_of_peer: dict[str, list[int]] = {}
        self._rings: dict[int, _Ring] = {}
        self._expected: dict[int, Expect] = {}
        self._listeners: dict[str, PeerListener] = {}
        self.counters = TargetCounters()

    @property
    def free_slot_count(self) -> int:
        return self._slots.free_count

    @property
    def expected_count(self) -> int:
        return len(self._expected)

    # ---- asked by the scheduler ------------------------------------------------------------------

    def open(self, peer: str, source: ServerLayout, link: str) -> StagingBufferDescriptor | str:
        """Rings for every rank of a peer that writes here, or the reason why there are none.

        The region in the descriptor is empty: only the transport knows its key.
        Raises: ConfigError if no port can be listened on.
        """
        try:
            pairs = [(rank.index, StagedPair(rank, self._layout)) for rank in source.ranks]
        except PlanMismatch as exc:
            return str(exc)
        pairs = [(rank, pair) for rank, pair in pairs if not pair.is_empty]
        for _, pair in pairs:
            if pair.item_nbytes_max > self.slot_nbytes:
                return (
                    f"a payload of {pair.item_nbytes_max} bytes does not fit a staging slot of "
                    f"{self.slot_nbytes}"
                )
        host = local_host_towards(link) if link else self._host
        if host not in self._listeners:
            self._listeners[host] = self._listen(host)
        self.reclaim(peer)  # dialled anew by the same process: its old connection is closed
        granted = self._slots.grant(len(pairs)) if pairs else []
        if granted is None:
            return (
                f"the staging buffer has {self._slots.free_count} free slots for {len(pairs)} "
                f"source ranks: raise --staging-buffer-mb"
            )
        self._slots_of_peer[peer] = [slot for slots in granted for slot in slots]
        rings: list[StagingRing] = []
        for (rank, pair), slots in zip(pairs, granted, strict=True):
            ring_id = secrets.randbits(RING_ID_BITS)
            self._rings[ring_id] = _Ring(peer, rank, tuple(slots), pair)
            rings.append(StagingRing(rank, ring_id, slots))
        shown = f"[{host}]" if ":" in host else host
        address = f"{shown}:{self._listeners[host].port}"
        public_key = self._gate.public_key if self._gate is not None else ""
        region = ("", 0, 0, b"")
        return StagingBufferDescriptor(address, region, self.slot_nbytes, rings, public_key)

    def _listen(self, host: str) -> PeerListener:
        """Raises: ConfigError if no port can be listened on."""
        first, last = self._ports
        for port in range(first, last):
            with suppress(NotNow):  # it is in use
                return PeerListener(host, port, self._gate)
        return PeerListener(host, last, self._gate)

    def close(self, peer: str) -> None:
        """Scatter nothing of this peer any more. It may still write into its slots."""
        self._rings = {i: ring for i, ring in self._rings.items() if ring.peer != peer}
        self._expected = {i: e for i, e in self._expected.items() if e.peer != peer}

    def reclaim(self, peer: str) -> None:
        """The peer can't write any more: other peers may have its slots."""
        self.close(peer)
        self._slots.put_back(self._slots_of_peer.pop(peer, []))

    def expect(self, message: Expect) -> None:
        self._expected[message.transfer_id] = message

    def forget(self, message: Forget) -> Forgotten:
        self._expected.pop(message.transfer_id, None)
        return Forgotten(message.transfer_id, self._layout.index)

    # ---- messages of source ranks ----------------------------------------------------------------

    def sockets(self) -> tuple[SocketSet, ...]:
        return tuple(s for listener in self._listeners.values() for s in listener.sockets())

    def receive(self) -> None:
        """Scatter filled slots, and free them."""
        for listener in self._listeners.values():
            for link, payload in listener.receive():
                try:
                    freed = self.apply_filled(decode_slot_filled(payload))
                except ProtocolError as error:
                    self.counters.malformed += 1
                    log.warning("dropped a prefill rank on link %.24s: %s", link, error)
                    listener.drop(link)  # not a Baton rank; a flood would fill the log
                    continue
                # The source repeats its SlotFilled if the answer does not arrive.
                if freed is not None and listener.send(link, encode(freed)) is SendResult.FULL:
                    log.warning("a prefill rank does not read about its freed slots")
            for _, reason in listener.take_refusals():
                self.counters.refused += 1
                log.debug("refused a connection of a rank: %s", reason)

    def apply_filled(self, filled: SlotFilled) -> SlotFreed | None:
        """Scatter one piece. Returns the answer; None if a newer piece is in the slot already."""
        ring = self._rings.get(filled.ring)
        if ring is None:
            return self._refuse(filled, "unknown ring: not connected, or not any more")
        if filled.slot not in ring.slots:
            return self._refuse(filled, f"slot {filled.slot}: is not of this ring")
        sequence, answer = ring.answered.get(filled.slot, (-1, ""))
        if filled.sequence < sequence:
            return None
        if filled.sequence > sequence:
            answer = self._scatter(ring, filled)
            ring.answered[filled.slot] = (filled.sequence, answer)
        return SlotFreed(filled.ring, filled.sequence, filled.slot, answer)

    def _refuse(self, filled: SlotFilled, reason: str) -> SlotFreed:
        self.counters.refused += 1
        return SlotFreed(filled.ring, filled.sequence, filled.slot, reason)

    def _scatter(self, ring: _Ring, filled: SlotFilled) -> str:
        """Write a piece into the pages of its transfer; "", or the reason why not."""
        if filled.row_stop == 0:
            return ""
        expected = self._expected.get(filled.transfer_id)
        if expected is None or expected.peer != ring.peer:
            self.counters.late += 1
            return f"transfer {filled.transfer_id}: is not expected from this peer"
        piece = StagedPiece(
            filled.group, filled.row_first, filled.row_stop, filled.item_first, filled.item_stop
        )
        tokens = TokenRange(expected.token_start, expected.token_count, is_final=True)
        reason = ring.pair.why_bad(piece, tokens, self.slot_nbytes)
        if reason is not None:
            self.counters.refused += 1
            return reason
        start = filled.slot * self.slot_nbytes
        self._copier.scatter(
            ring.pair.scatter(piece, expected.pages),
            ring.pair.conversion(piece),
            self._region[start : start + self.slot_nbytes],
        )
        self.counters.pieces += 1
        self.counters.nbytes += ring.pair.wire_nbytes(piece)
        return ""

    def page_counts(self) -> list[int]:
        """Of this rank's pool, for a peer to which the pool is not announced."""
        return list(self._page_counts)

    def end(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        if self._gate is not None:
            self._gate.close()
