"""The source of staged transfers on a prefill rank: gathers pieces and puts them into slots.

    start(tag) -> pieces wait -> a slot at the target and a buffer here are free: gather, put
               -> put settled: the buffer is free, SlotFilled is sent
               -> SlotFreed: the slot is free; the last one settles the transfer

A staged transfer settles like one of the transport: one `TransferSettled` per tag. Without an error
every byte is in its page at the target. `is_quiet` is always true: puts reach slots only, and a
target that gives a transfer up scatters nothing of it afterwards. Transfers take turns, so a
stalled transfer delays no other.

Owned by the I/O thread. Knows nothing of requests.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from common.channel.keys import Curve
from common.channel.peer import PeerDialer
from common.channel.sockets import SendResult, SocketSet
from common.clock import Clock
from common.errors import ConfigError, ProtocolError, TransportError
from common.planner.copies import Pages
from common.planner.link_cost import CopyCosts
from common.planner.staging import StagedPair, StagedPiece
from common.protocol.codec import decode_slot_freed, encode
from common.protocol.descriptor import StagingBufferDescriptor, StagingRing
from common.protocol.staging import SlotFilled, SlotFreed
from common.transport.transport import CANCELLED, TransferSettled, Transport
from common.worker.staging.gather_buffers import GatherBuffers, is_gathered_first
from common.worker.staging.lanes import LANE_TIMEOUT_S, ROUND_TRIP_COUNT, Lane, LanePhase
from common.worker.staging.staged_transfer import (
    LaneFailed,
    LaneReady,
    MeasuringPut,
    SentPiece,
    SourceCounters,
    StagedTransfer,
    StagingEvent,
)

log = logging.getLogger(__name__)

REGION = "gather-buffers"
TAG_FIRST = 1 << 62
"""Transport tags of pieces start here. Smaller tags belong to direct transfers."""

REPEAT_S = 1.0
"""Interval of repeating an unanswered SlotFilled. A connection that breaks loses messages."""

RETRY_S = 0.005
"""Interval of retrying a message that could not be queued, while its lane is being dialled."""


class StagingSource:
    """Owner of the lanes, and of every transfer through them."""

    def __init__(
        self,
        transport: Transport,
        buffers: GatherBuffers,
        copies: CopyCosts,
        clock: Clock,
        curve: Curve | None = None,
    ) -> None:
        """copies: measured costs of gathering and scattering on this rank's device."""
        self._transport = transport
        self._buffers = buffers
        self._copies = copies
        self._clock = clock
        self._dialer = PeerDialer(curve)
        self._lanes: dict[str, Lane] = {}
        self._lane_of_link: dict[str, Lane] = {}
        self._transfers: deque[StagedTransfer] = deque()
        self._puts: dict[int, SentPiece | MeasuringPut] = {}
        self._unanswered: dict[str, dict[int, SentPiece]] = {}
        self._next_tag = TAG_FIRST
        self._events: list[StagingEvent] = []
        self.counters = SourceCounters()

    def sockets(self) -> tuple[SocketSet, ...]:
        return self._dialer.sockets()

    @property
    def is_idle(self) -> bool:
        return not self._transfers

    @property
    def region_index(self) -> int:
        """Number of the buffers' memory among the transport's."""
        return self._buffers.region_index

    @property
    def free_buffer_count(self) -> int:
        return self._buffers.free_count

    def lane(self, name: str) -> Lane | None:
        return self._lanes.get(name)

    def poll(self) -> list[StagingEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def next_wakeup(self) -> float | None:
        """When `tick` is due; None if nothing waits for an answer."""
        times = [sent.sent_at for pieces in self._unanswered.values() for sent in pieces.values()]
        times += [lane.asked_at for lane in self._lanes.values() if lane.phase is LanePhase.DIALING]
        if 0.0 in times:
            return self._clock.now() + RETRY_S
        return min(times) + REPEAT_S if times else None

    # ---- lanes -----------------------------------------------------------------------------------

    def open_lane(
        self,
        name: str,
        staging_buffer: StagingBufferDescriptor,
        ring: StagingRing,
        region: int,
        transports: str,
    ) -> None:
        """Dial and measure; ends in LaneReady or LaneFailed. The transport connection `name` is up.

        region: number of the staging buffer among the target's regions.
        transports: those that carry the connection's puts.
        """
        lane = Lane.of(name, staging_buffer, ring, region, transports, self._clock.now())
        if lane.link in self._lane_of_link:
            self._events.append(LaneFailed(name, f"{lane.link} is the address of another rank"))
            return
        try:
            self._dialer.dial(lane.link, lane.public_key)
        except ConfigError as exc:
            self._events.append(LaneFailed(name, str(exc)))
            return
        self._lanes[name] = lane
        self._lane_of_link[lane.link] = lane
        self._unanswered[name] = {}
        self._send_trial(lane)

    def close_lane(self, name: str, reason: str) -> None:
        """The connection is gone and its puts have settled. Its transfers settle with `reason`."""
        lane = self._lanes.pop(name, None)
        if lane is None:
            return
        del self._lane_of_link[lane.link]
        self._dialer.hang_up(lane.link)
        for sent in self._unanswered.pop(name).values():
            sent.transfer.open_count -= 1
            self._fail(sent.transfer, reason)
        for transfer in list(self._transfers):
            if transfer.lane is lane:
                self._fail(transfer, reason)

    def _send_trial(self, lane: Lane) -> None:
        """Send a SlotFilled without rows. Its answer shows that the lane works both ways."""
        message = SlotFilled(lane.ring, lane.take_sequence(), lane.free[0])
        is_sent = self._dialer.send(lane.link, encode(message)) is SendResult.SENT
        lane.asked_at = self._clock.now() if is_sent else 0.0

    def _apply_trial(self, lane: Lane, freed: SlotFreed) -> None:
        if freed.error:
            self._events.append(LaneFailed(lane.name, freed.error))
            return
        if freed.sequence != lane.next_sequence - 1:
            self.counters.stale += 1
            return
        lane.round_trips_s.append(self._clock.now() - lane.asked_at)
        if len(lane.round_trips_s) < ROUND_TRIP_COUNT:
            self._send_trial(lane)
        else:
            lane.phase = LanePhase.MEASURING
            self._measure(lane)

    def _measure(self, lane: Lane) -> None:
        nbytes = min(lane.slot_nbytes, self._buffers.nbytes)
        plan = lane.next_measurement(self._buffers.region_index, nbytes)
        if plan is None:
            lane.settle_measurement(nbytes, self._copies)
            lane.phase = LanePhase.READY
            self._events.append(LaneReady(lane.name))
            return
        tag = self._take_tag()
        try:
            self._transport.submit(lane.name, plan, tag)
        except TransportError as exc:
            self._events.append(LaneFailed(lane.name, str(exc)))
            return
        self._puts[tag] = MeasuringPut(lane, nbytes)

    # ---- transfers -------------------------------------------------------------------------------

    def start(
        self,
        tag: int,
        name: str,
        transfer_id: int,
        pair: StagedPair,
        source_pages: Pages,
        pieces: Sequence[StagedPiece],
    ) -> None:
        """Send pieces over a lane that is ready; settles once. `tag` is below TAG_FIRST."""
        lane = self._lanes[name]
        assert lane.phase is LanePhase.READY and pieces and tag < TAG_FIRST
        transfer = StagedTransfer(
            tag, lane, transfer_id, pair, source_pages, deque(pieces), self._clock.now()
        )
        self._transfers.append(transfer)
        self._pump()

    def pieces_nbytes_max(self, name: str) -> int:
        """The largest piece over this lane, in bytes."""
        return min(self._lanes[name].slot_nbytes, self._buffers.nbytes)

    def cancel(self, tag: int) -> None:
        """Send no further piece of a transfer. It settles when its sent pieces have settled."""
        for transfer in self._transfers:
            if transfer.tag == tag:
                self._fail(transfer, CANCELLED)
                return

    def _fail(self, transfer: StagedTransfer, error: str) -> None:
        """First cause wins. Puts that are under way are not cancelled: each is one slot long."""
        transfer.error = transfer.error or error
        transfer.waiting.clear()
        self._settle_if_done(transfer)

    def _settle_if_done(self, transfer: StagedTransfer) -> None:
        if transfer.waiting or transfer.open_count or transfer not in self._transfers:
            return
        self._transfers.remove(transfer)
        self._events.append(
            TransferSettled(
                peer=transfer.lane.name,
                tag=transfer.tag,
                error=transfer.error or None,
                is_quiet=True,
                nbytes=transfer.nbytes,
                run_count=transfer.put_count,
                seconds=self._clock.now() - transfer.started_at,
                issue_cpu_seconds=0.0,
            )
        )

    def _pump(self) -> None:
        """Send pieces, one of each transfer in turn, until none finds a slot and a buffer."""
        idle_count = 0
        while self._transfers and idle_count < len(self._transfers):
            transfer = self._transfers[0]
            self._transfers.rotate(-1)
            idle_count = 0 if self._launch(transfer) else idle_count + 1

    def _launch(self, transfer: StagedTransfer) -> bool:
        """Put the next piece of a transfer into a slot; False if it has to wait."""
        lane = transfer.lane
        if not transfer.waiting:
            return False
        needs_buffer = is_gathered_first(transfer, transfer.waiting[0])
        if needs_buffer and not self._has_buffer_for(lane):
            return False
        slot = lane.take_slot(transfer.transfer_id)
        if slot is None:
            return False
        buffer = self._buffers.take() if needs_buffer else None
        sent = SentPiece(transfer, transfer.waiting.popleft(), slot, buffer)
        plan = self._buffers.gather(sent)
        tag = self._take_tag()
        try:
            self._transport.submit(lane.name, plan, tag)
        except TransportError as exc:
            self._buffers.put_back(sent.buffer)
            lane.put_back(slot, transfer.transfer_id)
            self._fail(transfer, str(exc))
            return False
        transfer.open_count += 1
        self._puts[tag] = sent
        return True

    def _has_buffer_for(self, lane: Lane) -> bool:
        sent = (put for put in self._puts.values() if isinstance(put, SentPiece))
        taken_count = sum(put.transfer.lane is lane for put in sent)
        return self._buffers.has_room(taken_count, len(self._lanes))

    # ---- puts and slots that come back -----------------------------------------------------------

    def apply_settled(self, event: TransferSettled) -> None:
        """A put has returned: the slot is full, or the connection broke. Tags from TAG_FIRST."""
        put = self._puts.pop(event.tag)
        if isinstance(put, MeasuringPut):
            if event.error is None and self._lanes.get(put.lane.name) is put.lane:
                put.lane.measured_s.append(event.seconds)
                self._measure(put.lane)
            return
        self._buffers.put_back(put.buffer)
        transfer = put.transfer
        if event.error is not None:
            # The connection is gone, and the lane with it: the slot is not written again.
            transfer.open_count -= 1
            self._fail(transfer, event.error)
        else:
            transfer.nbytes += event.nbytes
            transfer.put_count += 1
            sequence = transfer.lane.take_sequence()
            self._unanswered[transfer.lane.name][sequence] = put
            self._report_filled(transfer.lane, sequence, put)
        self._pump()

    def _report_filled(self, lane: Lane, sequence: int, sent: SentPiece) -> None:
        piece = sent.piece
        message = SlotFilled(
            ring=lane.ring,
            sequence=sequence,
            slot=sent.slot,
            transfer_id=sent.transfer.transfer_id,
            group=piece.group,
            row_first=piece.row_first,
            row_stop=piece.row_stop,
            item_first=piece.item_first,
            item_stop=piece.item_stop,
        )
        is_sent = self._dialer.send(lane.link, encode(message)) is SendResult.SENT
        sent.sent_at = self._clock.now() if is_sent else 0.0

    def receive(self) -> None:
        """Take freed slots in, and send more pieces."""
        for link, payload in self._dialer.receive():
            try:
                freed = decode_slot_freed(payload)
            except ProtocolError as error:
                log.warning("dropped a message of a decode rank: %s", error)
                continue
            lane = self._lane_of_link.get(link)
            if lane is not None:
                self.apply_freed(lane, freed)
        for link, reason in self._dialer.take_refusals():
            log.warning("can't connect to a decode rank at %s: %s", link, reason)
        self._pump()

    def apply_freed(self, lane: Lane, freed: SlotFreed) -> None:
        if lane.phase is LanePhase.DIALING and freed.ring == lane.ring:
            self._apply_trial(lane, freed)
            return
        sent = self._unanswered[lane.name].get(freed.sequence)
        if sent is None or (freed.ring, freed.slot) != (lane.ring, sent.slot):
            self.counters.stale += 1
            return
        del self._unanswered[lane.name][freed.sequence]
        transfer = sent.transfer
        lane.put_back(sent.slot, transfer.transfer_id)
        transfer.open_count -= 1
        if freed.error:
            self._fail(transfer, f"refused by the target: {freed.error}")
        else:
            self.counters.pieces += 1
            self.counters.nbytes += transfer.pair.wire_nbytes(sent.piece)
            self._settle_if_done(transfer)

    def tick(self) -> None:
        """Repeat unanswered messages, and give up lanes that never answered."""
        now = self._clock.now()
        for lane in list(self._lanes.values()):
            if lane.phase is not LanePhase.READY and now - lane.opened_at > LANE_TIMEOUT_S:
                reason = f"{lane.link} does not answer: is it reachable from here?"
                self._events.append(LaneFailed(lane.name, reason))
                lane.opened_at = now
            elif lane.phase is LanePhase.DIALING and _is_due(lane.asked_at, now):
                self._send_trial(lane)
            for sequence, sent in self._unanswered[lane.name].items():
                if _is_due(sent.sent_at, now):
                    self.counters.repeated += 1
                    self._report_filled(lane, sequence, sent)

    def _take_tag(self) -> int:
        self._next_tag += 1
        return self._next_tag - 1

    def end(self) -> None:
        self._dialer.close()


def _is_due(sent_at: float, now: float) -> bool:
    """Whether to send a message again. 0.0: it could not be queued, for lack of a connection."""
    return sent_at == 0.0 or now - sent_at >= REPEAT_S
