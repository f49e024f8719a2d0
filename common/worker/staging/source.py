"""Transfers of a prefill rank that go through staging: gather, one put per slot, Landed, credit.

    start(tag) -> pieces wait -> a slot at the target and a buffer here are free: gather, put
               -> put settled: the buffer is free, Landed is sent
               -> Credit: the slot is free; the last one settles the transfer

To whoever starts one it looks like a transfer of the transport: one `TransferSettled` per tag, and
without an error every byte is in its page at the target. It says `is_quiet` in any case: the puts
reach slots only, and a target that gives up a transfer makes sure itself that nothing of it is
scattered any more. Transfers take turns, so none waits for another that has stalled.

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
from common.planner.staging import Piece, StagedPair
from common.protocol.codec import decode_credit, encode
from common.protocol.descriptor import LandingDescriptor, LandingRing
from common.protocol.staging import Credit, Landed
from common.transport.transport import CANCELLED, TransferSettled, Transport
from common.worker.staging.gather_buffers import GatherBuffers, is_gathered_first
from common.worker.staging.lanes import LANE_TIMEOUT_S, ROUND_TRIP_COUNT, Lane, Phase
from common.worker.staging.source_jobs import (
    Job,
    LaneFailed,
    LaneReady,
    Measuring,
    Moving,
    StagingCounters,
    StagingEvent,
)

log = logging.getLogger(__name__)

REGION = "staging"
TAG_FIRST = 1 << 62
"""Tags of the transport from here on belong to pieces; smaller ones to direct transfers."""

REPEAT_S = 1.0
"""How often a Landed that was not answered is sent again: a connection that breaks loses some."""

RETRY_S = 0.005
"""How soon a message that could not be queued is tried again, while a lane is being dialled."""


class Staging:
    """Owner of the lanes, and of everything that is on its way through them."""

    def __init__(
        self,
        transport: Transport,
        buffers: GatherBuffers,
        copies: CopyCosts,
        clock: Clock,
        curve: Curve | None = None,
    ) -> None:
        """copies: what gathering and scattering cost on this rank's device."""
        self._transport = transport
        self._buffers = buffers
        self._copies = copies
        self._clock = clock
        self._dialer = PeerDialer(curve)
        self._lanes: dict[str, Lane] = {}
        self._lane_of_link: dict[str, Lane] = {}
        self._jobs: deque[Job] = deque()
        self._puts: dict[int, Moving | Measuring] = {}
        self._unanswered: dict[str, dict[int, Moving]] = {}
        self._next_tag = TAG_FIRST
        self._events: list[StagingEvent] = []
        self.counters = StagingCounters()

    def sockets(self) -> tuple[SocketSet, ...]:
        return self._dialer.sockets()

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    @property
    def free_buffer_count(self) -> int:
        return self._buffers.free_count

    def lane(self, name: str) -> Lane | None:
        return self._lanes.get(name)

    def poll(self) -> list[StagingEvent]:
        """What has happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def next_wakeup(self) -> float | None:
        """When `tick` wants to be called even if nothing happens."""
        sent = [m.sent_at for pieces in self._unanswered.values() for m in pieces.values()]
        sent += [lane.asked_at for lane in self._lanes.values() if lane.phase is Phase.DIALING]
        if 0.0 in sent:
            return self._clock.now() + RETRY_S
        return min(sent) + REPEAT_S if sent else None

    # ---- lanes -----------------------------------------------------------------------------------

    def open_lane(
        self,
        name: str,
        landing: LandingDescriptor,
        ring: LandingRing,
        region: int,
        transports: str,
    ) -> None:
        """Dial and measure; answered by LaneReady or LaneFailed. The connection `name` is up.

        region: number of the landing region among the target's. transports: what carries puts.
        """
        lane = Lane.of(name, landing, ring, region, transports, self._clock.now())
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
        self._try(lane)

    def close_lane(self, name: str, reason: str) -> None:
        """The connection is gone and its puts have settled: what waits for a credit settles too."""
        lane = self._lanes.pop(name, None)
        if lane is None:
            return
        del self._lane_of_link[lane.link]
        self._dialer.hang_up(lane.link)
        for moving in self._unanswered.pop(name).values():
            moving.job.open_count -= 1
            self._fail(moving.job, reason)
        for job in list(self._jobs):
            if job.lane is lane:
                self._fail(job, reason)

    def _try(self, lane: Lane) -> None:
        """Send a Landed without rows, whose credit shows that the lane works both ways."""
        message = Landed(lane.ring, lane.take_sequence(), lane.free[0])
        is_sent = self._dialer.send(lane.link, encode(message)) is SendResult.SENT
        lane.asked_at = self._clock.now() if is_sent else 0.0

    def _apply_tried(self, lane: Lane, credit: Credit) -> None:
        if credit.error:
            self._events.append(LaneFailed(lane.name, credit.error))
            return
        if credit.sequence != lane.next_sequence - 1:
            self.counters.stale += 1
            return
        lane.round_trips_s.append(self._clock.now() - lane.asked_at)
        if len(lane.round_trips_s) < ROUND_TRIP_COUNT:
            self._try(lane)
        else:
            lane.phase = Phase.MEASURING
            self._measure(lane)

    def _measure(self, lane: Lane) -> None:
        nbytes = min(lane.slot_nbytes, self._buffers.nbytes)
        plan = lane.next_measurement(self._buffers.region_index, nbytes)
        if plan is None:
            lane.settle_measurement(nbytes, self._copies)
            lane.phase = Phase.READY
            self._events.append(LaneReady(lane.name))
            return
        tag = self._take_tag()
        try:
            self._transport.submit(lane.name, plan, tag)
        except TransportError as exc:
            self._events.append(LaneFailed(lane.name, str(exc)))
            return
        self._puts[tag] = Measuring(lane, nbytes)

    # ---- transfers -------------------------------------------------------------------------------

    def start(
        self,
        tag: int,
        name: str,
        transfer_id: int,
        pair: StagedPair,
        source_pages: Pages,
        pieces: Sequence[Piece],
    ) -> None:
        """Send pieces over a lane that is ready; settles once. `tag` is below TAG_FIRST."""
        lane = self._lanes[name]
        assert lane.phase is Phase.READY and pieces and tag < TAG_FIRST
        job = Job(tag, lane, transfer_id, pair, source_pages, deque(pieces), self._clock.now())
        self._jobs.append(job)
        self._pump()

    def pieces_nbytes_max(self, name: str) -> int:
        """How large a piece over this lane may be."""
        return min(self._lanes[name].slot_nbytes, self._buffers.nbytes)

    def cancel(self, tag: int) -> None:
        """Nothing more of a transfer leaves; it settles when what is out has come back."""
        for job in self._jobs:
            if job.tag == tag:
                self._fail(job, CANCELLED)
                return

    def _fail(self, job: Job, error: str) -> None:
        """First cause wins. A put that is under way ends by itself: it is one slot long."""
        job.error = job.error or error
        job.waiting.clear()
        self._settle_if_done(job)

    def _settle_if_done(self, job: Job) -> None:
        if job.waiting or job.open_count or job not in self._jobs:
            return
        self._jobs.remove(job)
        self._events.append(
            TransferSettled(
                peer=job.lane.name,
                tag=job.tag,
                error=job.error or None,
                is_quiet=True,
                nbytes=job.nbytes,
                run_count=job.put_count,
                seconds=self._clock.now() - job.started_at,
                issue_cpu_seconds=0.0,
            )
        )

    def _pump(self) -> None:
        """Let pieces leave, one of each transfer in turn, as long as there is room for any."""
        idle_count = 0
        while self._jobs and idle_count < len(self._jobs):
            job = self._jobs[0]
            self._jobs.rotate(-1)
            idle_count = 0 if self._launch(job) else idle_count + 1

    def _launch(self, job: Job) -> bool:
        """Put the next piece of a transfer into a slot; False if it has to wait."""
        lane = job.lane
        if not job.waiting:
            return False
        needs_buffer = is_gathered_first(job, job.waiting[0])
        if needs_buffer and not self._has_buffer_for(lane):
            return False
        slot = lane.take_slot(job.transfer_id)
        if slot is None:
            return False
        buffer = self._buffers.take() if needs_buffer else None
        moving = Moving(job, job.waiting.popleft(), slot, buffer)
        plan = self._buffers.gather(moving)
        tag = self._take_tag()
        try:
            self._transport.submit(lane.name, plan, tag)
        except TransportError as exc:
            self._buffers.put_back(moving.buffer)
            lane.put_back(slot, job.transfer_id)
            self._fail(job, str(exc))
            return False
        job.open_count += 1
        self._puts[tag] = moving
        return True

    def _has_buffer_for(self, lane: Lane) -> bool:
        moving = (put for put in self._puts.values() if isinstance(put, Moving))
        taken_count = sum(put.job.lane is lane for put in moving)
        return self._buffers.has_room(taken_count, len(self._lanes))

    # ---- what comes back -------------------------------------------------------------------------

    def apply_settled(self, event: TransferSettled) -> None:
        """A put of ours has returned: the slot is full, or the connection is broken."""
        put = self._puts.pop(event.tag)
        if isinstance(put, Measuring):
            if event.error is None and self._lanes.get(put.lane.name) is put.lane:
                put.lane.measured_s.append(event.seconds)
                self._measure(put.lane)
            return
        self._buffers.put_back(put.buffer)
        job = put.job
        if event.error is not None:
            # Then the connection is gone, and the lane with it: nobody writes the slot again.
            job.open_count -= 1
            self._fail(job, event.error)
        else:
            job.nbytes += event.nbytes
            job.put_count += 1
            sequence = job.lane.take_sequence()
            self._unanswered[job.lane.name][sequence] = put
            self._tell(job.lane, sequence, put)
        self._pump()

    def _tell(self, lane: Lane, sequence: int, moving: Moving) -> None:
        piece = moving.piece
        message = Landed(
            ring=lane.ring,
            sequence=sequence,
            slot=moving.slot,
            transfer_id=moving.job.transfer_id,
            group=piece.group,
            row_first=piece.row_first,
            row_stop=piece.row_stop,
            item_first=piece.item_first,
            item_stop=piece.item_stop,
        )
        is_sent = self._dialer.send(lane.link, encode(message)) is SendResult.SENT
        moving.sent_at = self._clock.now() if is_sent else 0.0

    def receive(self) -> None:
        """Take credits in, and let more pieces leave."""
        for link, payload in self._dialer.receive():
            try:
                credit = decode_credit(payload)
            except ProtocolError as error:
                log.warning("dropped a message of a decode rank: %s", error)
                continue
            lane = self._lane_of_link.get(link)
            if lane is not None:
                self.apply_credit(lane, credit)
        for link, reason in self._dialer.take_refusals():
            log.warning("can't connect to a decode rank at %s: %s", link, reason)
        self._pump()

    def apply_credit(self, lane: Lane, credit: Credit) -> None:
        if lane.phase is Phase.DIALING and credit.ring == lane.ring:
            self._apply_tried(lane, credit)
            return
        moving = self._unanswered[lane.name].get(credit.sequence)
        if moving is None or (credit.ring, credit.slot) != (lane.ring, moving.slot):
            self.counters.stale += 1
            return
        del self._unanswered[lane.name][credit.sequence]
        job = moving.job
        lane.put_back(moving.slot, job.transfer_id)
        job.open_count -= 1
        if credit.error:
            self._fail(job, f"refused by the target: {credit.error}")
        else:
            self.counters.pieces += 1
            self.counters.nbytes += job.pair.wire_nbytes(moving.piece)
            self._settle_if_done(job)

    def tick(self) -> None:
        """Send again what was not answered, and give up lanes that never answered."""
        now = self._clock.now()
        for lane in list(self._lanes.values()):
            if lane.phase is not Phase.READY and now - lane.opened_at > LANE_TIMEOUT_S:
                reason = f"{lane.link} does not answer: is it reachable from here?"
                self._events.append(LaneFailed(lane.name, reason))
                lane.opened_at = now
            elif lane.phase is Phase.DIALING and _is_due(lane.asked_at, now):
                self._try(lane)
            for sequence, moving in self._unanswered[lane.name].items():
                if _is_due(moving.sent_at, now):
                    self.counters.repeated += 1
                    self._tell(lane, sequence, moving)

    def _take_tag(self) -> int:
        self._next_tag += 1
        return self._next_tag - 1

    def end(self) -> None:
        self._dialer.close()


def _is_due(sent_at: float, now: float) -> bool:
    """Whether a message is to be sent again; until a connection is there, none can be queued."""
    return sent_at == 0.0 or now - sent_at >= REPEAT_S
