"""Where staged transfers arrive on a decode rank: rings of slots, what is expected, the scatter.

    OpenPeer    -> a ring of slots for every source rank that writes here, told in PeerOpened
    Expect      -> the pages that a transfer of a peer may fill
    Landed      -> checked against both, scattered, answered by a Credit, all on the I/O thread
    Forget      -> Forgotten: scatters are not interrupted, so none is running when it is said
    ClosePeer   -> its rings count for nothing; its slots stay its own until ReclaimPeer

Owned by the I/O thread. Knows nothing of requests. A peer that lies reaches no page but those that
were announced for the transfer it names.
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
from common.planner.staging import Piece, StagedPair
from common.protocol.codec import decode_landed, encode
from common.protocol.descriptor import LandingDescriptor, LandingRing
from common.protocol.staging import Credit, Landed
from common.protocol.worker import Expect, Forget, Forgotten
from common.worker.staging.copier import Copier

log = logging.getLogger(__name__)

REGION = "landing"
SLOT_NBYTES_MAX = 4 << 20
"""A slot's put, message and credit wake six threads in two processes: 0.4 ms where they share two
cores, which is what copying 4 MiB takes."""

SLOT_NBYTES_MIN = 1 << 16
RING_SLOT_COUNT_MAX = 4
"""Slots of one source rank: three keep gather, put and scatter busy, and one is for transfers that
would wait for a slow one."""

SLOT_COUNT_MIN = 16
"""Slots of a region, so that several source ranks find some."""

RING_ID_BITS = 62


def slot_nbytes_of(region_nbytes: int) -> int:
    """A sixteenth of the region or more, as far as SLOT_NBYTES_MAX goes: a power of two."""
    size = SLOT_NBYTES_MAX
    while size > SLOT_NBYTES_MIN and size * SLOT_COUNT_MIN > region_nbytes:
        size //= 2
    return size


class Slots:
    """The free slots of a region. Pure."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def grant(self, ring_count: int) -> list[list[int]] | None:
        """Slots for every ring of a newcomer; None if there is not even one for each.

        A newcomer gets at most half of what is free, so that the next one finds some.
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
    """Slots of one source rank. answered: per slot, the last sequence number and its answer."""

    peer: str
    source_rank: int
    slots: tuple[int, ...]
    pair: StagedPair
    answered: dict[int, tuple[int, str]] = field(default_factory=dict)


@dataclass(slots=True)
class LandingCounters:
    """Since start. refused: pieces that were not expected; late: of a transfer that is forgotten or
    never was; malformed: messages that were none."""

    pieces: int = 0
    nbytes: int = 0
    refused: int = 0
    late: int = 0
    malformed: int = 0


class Landing:
    """Owner of the landing region, its rings, and what is expected."""

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
        """region: uint8[nbytes], known to the transport as REGION. host: listened on where a peer
        was not dialled at any address. gate: who may connect there. ports: the first and the last
        that may be listened on; (0, 0): any."""
        self._gate = gate
        self._ports = ports
        self._region = region
        self._copier = copier
        self._layout = layout
        self._page_counts = list(page_counts)
        self._host = host
        self.slot_nbytes = slot_nbytes_of(len(region))
        self._slots = Slots(len(region) // self.slot_nbytes)
        self._slots_of_peer: dict[str, list[int]] = {}
        self._rings: dict[int, _Ring] = {}
        self._expected: dict[int, Expect] = {}
        self._listeners: dict[str, PeerListener] = {}
        self.counters = LandingCounters()

    @property
    def free_slot_count(self) -> int:
        return self._slots.free_count

    @property
    def expected_count(self) -> int:
        return len(self._expected)

    # ---- asked by the scheduler ------------------------------------------------------------------

    def open(self, peer: str, source: ServerLayout, link: str) -> LandingDescriptor | str:
        """Rings for every rank of a peer that writes here, or why there are none.

        The region in the descriptor is empty: only the transport knows how it is reached.
        Raises: ConfigError if nothing can be listened on.
        """
        try:
            pairs = [(rank.index, StagedPair(rank, self._layout)) for rank in source.ranks]
        except PlanMismatch as exc:
            return str(exc)
        pairs = [(rank, pair) for rank, pair in pairs if not pair.is_empty]
        for _, pair in pairs:
            if pair.item_nbytes_max > self.slot_nbytes:
                return (
                    f"a payload of {pair.item_nbytes_max} bytes does not fit a landing slot of "
                    f"{self.slot_nbytes}"
                )
        host = local_host_towards(link) if link else self._host
        if host not in self._listeners:
            self._listeners[host] = self._listen(host)
        self.reclaim(peer)  # dialled anew by the same process: its old connection is closed
        granted = self._slots.grant(len(pairs)) if pairs else []
        if granted is None:
            return (
                f"the landing region has {self._slots.free_count} free slots for {len(pairs)} "
                f"source ranks: raise --staging-buffer-mb"
            )
        self._slots_of_peer[peer] = [slot for slots in granted for slot in slots]
        rings: list[LandingRing] = []
        for (rank, pair), slots in zip(pairs, granted, strict=True):
            ring_id = secrets.randbits(RING_ID_BITS)
            self._rings[ring_id] = _Ring(peer, rank, tuple(slots), pair)
            rings.append(LandingRing(rank, ring_id, slots))
        shown = f"[{host}]" if ":" in host else host
        address = f"{shown}:{self._listeners[host].port}"
        public_key = self._gate.public_key if self._gate is not None else ""
        region = ("", 0, 0, b"")
        return LandingDescriptor(address, region, self.slot_nbytes, rings, public_key)

    def _listen(self, host: str) -> PeerListener:
        """Raises: ConfigError if nothing can be listened on."""
        first, last = self._ports
        for port in range(first, last):
            with suppress(NotNow):  # it is in use
                return PeerListener(host, port, self._gate)
        return PeerListener(host, last, self._gate)

    def close(self, peer: str) -> None:
        """Nothing of this peer is scattered any more; it may still write into its slots."""
        self._rings = {i: ring for i, ring in self._rings.items() if ring.peer != peer}
        self._expected = {i: e for i, e in self._expected.items() if e.peer != peer}

    def reclaim(self, peer: str) -> None:
        """The peer can not write any more: others may have its slots."""
        self.close(peer)
        self._slots.put_back(self._slots_of_peer.pop(peer, []))

    def expect(self, message: Expect) -> None:
        self._expected[message.transfer_id] = message

    def forget(self, message: Forget) -> Forgotten:
        self._expected.pop(message.transfer_id, None)
        return Forgotten(message.transfer_id, self._layout.index)

    # ---- told by source ranks --------------------------------------------------------------------

    def sockets(self) -> tuple[SocketSet, ...]:
        return tuple(s for listener in self._listeners.values() for s in listener.sockets())

    def receive(self) -> None:
        """Scatter what has landed, and give the slots back."""
        for listener in self._listeners.values():
            for link, payload in listener.receive():
                try:
                    credit = self.apply_landed(decode_landed(payload))
                except ProtocolError as error:
                    self.counters.malformed += 1
                    log.warning("dropped a prefill rank on link %.24s: %s", link, error)
                    listener.drop(link)  # ours never send such; a flood would fill the log
                    continue
                # A credit that can't be sent is not lost: the source asks again.
                if credit is not None and listener.send(link, encode(credit)) is SendResult.FULL:
                    log.warning("a prefill rank does not read its credits")
            for _, reason in listener.take_refusals():
                self.counters.refused += 1
                log.debug("refused a connection of a rank: %s", reason)

    def apply_landed(self, landed: Landed) -> Credit | None:
        """Scatter one piece; the answer, None if the slot has moved on since."""
        ring = self._rings.get(landed.ring)
        if ring is None:
            return self._refuse(landed, "unknown ring: not connected, or not any more")
        if landed.slot not in ring.slots:
            return self._refuse(landed, f"slot {landed.slot}: is not of this ring")
        sequence, answer = ring.answered.get(landed.slot, (-1, ""))
        if landed.sequence < sequence:
            return None
        if landed.sequence > sequence:
            answer = self._scatter(ring, landed)
            ring.answered[landed.slot] = (landed.sequence, answer)
        return Credit(landed.ring, landed.sequence, landed.slot, answer)

    def _refuse(self, landed: Landed, reason: str) -> Credit:
        self.counters.refused += 1
        return Credit(landed.ring, landed.sequence, landed.slot, reason)

    def _scatter(self, ring: _Ring, landed: Landed) -> str:
        """Write a piece into its pages, if they are its pages; why not, or ""."""
        if landed.row_stop == 0:
            return ""
        expected = self._expected.get(landed.transfer_id)
        if expected is None or expected.peer != ring.peer:
            self.counters.late += 1
            return f"transfer {landed.transfer_id}: is not expected from this peer"
        piece = Piece(
            landed.group, landed.row_first, landed.row_stop, landed.item_first, landed.item_stop
        )
        reason = ring.pair.why_bad(piece, expected.token_count, self.slot_nbytes)
        if reason is not None:
            self.counters.refused += 1
            return reason
        start = landed.slot * self.slot_nbytes
        self._copier.scatter(
            ring.pair.scatter(piece, expected.pages),
            ring.pair.conversion(piece),
            self._region[start : start + self.slot_nbytes],
        )
        self.counters.pieces += 1
        self.counters.nbytes += ring.pair.wire_nbytes(piece)
        return ""

    def page_counts(self) -> list[int]:
        """Of this rank's pool, for a peer that does not get to see it."""
        return list(self._page_counts)

    def end(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        if self._gate is not None:
            self._gate.close()
