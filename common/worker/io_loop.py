"""The I/O thread of a worker: scheduler messages and transport events, while the engine computes.

It owns the scheduler's socket and the transport. It waits for both and for the engine at once, so
no event is late by a polling interval. Knows nothing of models.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import assert_never

from common.channel.local import LocalClient
from common.channel.poller import Poller
from common.channel.sockets import SendResult
from common.clock import Clock, SystemClock, thread_cpu_clock, thread_cpu_s
from common.errors import BatonError
from common.protocol.codec import decode_scheduler_to_worker, encode
from common.protocol.digests import Digest
from common.protocol.weights import DropWeights, LoadWeights
from common.protocol.worker import (
    Begin,
    CancelSends,
    ClosePeer,
    CloseTransfer,
    ConnectPeer,
    Expect,
    Forget,
    MovePages,
    OpenPeer,
    OpenTransfer,
    ReclaimPeer,
    Release,
    SchedulerToWorker,
    Send,
    Shutdown,
    Step,
    WorkerBeat,
    WorkerToScheduler,
)
from common.transport.transport import (
    ConnectionClosed,
    ConnectionFailed,
    ConnectionMade,
    TransferSettled,
    Transport,
    TransportEvent,
)
from common.worker.digester import DigestJobs
from common.worker.host_pages import PageMoves
from common.worker.peer_links import PeerLinks
from common.worker.sends import Computed, Sends
from common.worker.staging.io import StagingIo
from common.worker.succession import ForgetSequences, SequencesForgotten, Succession
from common.worker.weights import WeightLoader, WeightLoads

log = logging.getLogger(__name__)

Steps = SimpleQueue[Step | ForgetSequences | None]
"""From the I/O thread to the engine; None ends it. The scheduler bounds it: a worker has two steps
at most."""

FromEngine = WorkerToScheduler | Computed | SequencesForgotten


class SchedulerStuck(BatonError):
    """The scheduler has not read its messages for so long that the channel is full."""


CPU_TICKS_PER_S = 20
"""Ticks of computing time that count as progress: short against any stall timeout."""


@dataclass(slots=True)
class Progress:
    """How far the engine has come. The notifier counts layers; the I/O thread reads.

    One writer and one integer need no lock. cpu_clock: of the engine's thread, whose computing time
    is progress; None on a GPU, where the host thread may spin for ever.
    """

    layer_count: int = 0
    cpu_clock: int | None = None

    def follow_cpu(self) -> None:
        """Called by the engine's thread. Its computing time counts from now on."""
        self.cpu_clock = thread_cpu_clock(threading.get_ident())

    def count(self) -> int:
        if self.cpu_clock is None:
            return self.layer_count
        return self.layer_count + int(thread_cpu_s(self.cpu_clock) * CPU_TICKS_PER_S)


class EngineOutbox:
    """From the engine to the I/O thread: `Computed`, messages for the scheduler, and a descriptor
    that wakes the I/O thread.

    After `end` the I/O thread sends the remaining messages and ends.
    """

    def __init__(self) -> None:
        self._messages: SimpleQueue[FromEngine | None] = SimpleQueue()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._has_sent = threading.Event()

    def put(self, message: FromEngine) -> None:
        self._messages.put(message)
        os.eventfd_write(self._fd, 1)

    def put_and_wait(self, message: FromEngine, timeout_s: float) -> None:
        """`put`, then leave the interpreter to the I/O thread until it has sent the message, for
        `timeout_s` at most."""
        self._has_sent.clear()
        self.put(message)
        self._has_sent.wait(timeout_s)

    def end(self) -> None:
        self._messages.put(None)
        os.eventfd_write(self._fd, 1)

    def fileno(self) -> int:
        return self._fd

    def take(self) -> list[FromEngine | None]:
        """Messages since the last call; None comes last, after `end`."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return []
        taken: list[FromEngine | None] = []
        while True:
            try:
                taken.append(self._messages.get_nowait())
            except Empty:
                return taken

    def note_sent(self) -> None:
        """Called by the I/O thread when it has sent all messages that it took."""
        self._has_sent.set()

    def close(self) -> None:
        """Called when neither thread uses the outbox any more."""
        os.close(self._fd)


class IoLoop:
    """Everything the I/O thread does."""

    def __init__(
        self,
        client: LocalClient,
        transport: Transport,
        links: PeerLinks,
        sends: Sends,
        steps: Steps,
        outbox: EngineOutbox,
        digests: DigestJobs,
        moves: PageMoves,
        weights: WeightLoader,
        loads: WeightLoads,
        succession: Succession,
        staged: StagingIo | None = None,
        *,
        progress: Progress | None = None,
        beat_interval_s: float,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._progress = progress or Progress()
        self._beat_interval_s = beat_interval_s
        self._next_beat_at = self._clock.now()
        self._staged = staged or StagingIo(sends, links, None, None, SystemClock())
        self._client = client
        self._transport = transport
        self._links = links
        self._sends = sends
        self._steps = steps
        self._outbox = outbox
        self._digests = digests
        self._moves = moves
        self._weights = weights
        self._loads = loads
        self._succession = succession
        self._poller = Poller()
        self._poller.register(client)
        self._poller.register(transport.fileno())
        self._poller.register(outbox.fileno())
        self._poller.register(self._staged)

    def run(self) -> None:
        """Until the outbox has ended. Raises: SchedulerStuck."""
        is_ended = False
        while not is_ended:
            self._poller.poll(self._timeout_s())
            self._beat()
            # The engine's results go first: the next step and the transfers of computed layers wait
            # for them.
            for message in self._outbox.take():
                if message is None:
                    is_ended = True
                elif isinstance(message, Computed):
                    self._send(self._sends.apply_computed(message))
                elif isinstance(message, SequencesForgotten):
                    self._succession.note_forgotten(message)
                else:
                    self._send([message])
            self._outbox.note_sent()
            for event in self._transport.poll():
                self._send(self._apply(event))
            for payload in self._client.receive():
                self._send(self._handle(decode_scheduler_to_worker(payload)))
            self._send(self._staged.receive())
            if self._succession.is_ending:
                self._send(self._succession.advance())

    def _timeout_s(self) -> float:
        staged_s = self._staged.timeout_s()
        beat_s = max(0.0, self._next_beat_at - self._clock.now())
        return beat_s if staged_s is None else min(staged_s, beat_s)

    def _beat(self) -> None:
        now = self._clock.now()
        if now >= self._next_beat_at:
            self._next_beat_at = now + self._beat_interval_s
            self._send([WorkerBeat(self._links.rank, self._progress.count())])

    def _handle(self, message: SchedulerToWorker) -> Sequence[WorkerToScheduler]:
        match message:
            case Step():
                self._steps.put(message)
            case OpenTransfer():
                self._sends.open(message)
            case CloseTransfer():
                self._sends.close(message)
            case Send():
                return self._sends.send(message)
            case CancelSends():
                return self._sends.cancel(message)
            case OpenPeer():
                return [self._links.open(message)]
            case ConnectPeer():
                return self._links.connect(message)
            case ClosePeer():
                settled = self._sends.cancel_peer(message.peer, "the peer is closed")
                return [*settled, *self._links.close(message.peer)]
            case ReclaimPeer():
                self._links.reclaim(message.peer)
            case Expect() | Forget():
                return self._staged.handle(message)
            case Digest():
                self._succession.note_job()
                self._digests.put(message)
            case MovePages():
                self._succession.note_job()
                self._moves.put(message)
            case LoadWeights():
                self._weights.want(message)
                self._loads.put(message)
            case DropWeights():
                self._weights.drop()
            case Begin():
                return self._succession.begin(message)
            case Release():
                self._succession.release(message)
            case Shutdown():
                self._steps.put(None)
            case _:
                assert_never(message)
        return []

    def _apply(self, event: TransportEvent) -> Sequence[WorkerToScheduler]:
        match event:
            case TransferSettled():
                if self._staged.apply_settled(event):
                    return self._staged.take()
                return self._sends.apply_settled(event)
            case ConnectionMade():
                log.info("connected to %s over %s", event.peer, event.transports)
                return self._links.apply_connected(event)
            case ConnectionFailed():
                log.warning("lost %s: %s", event.peer, event.reason)
                return self._apply_gone(event)
            case ConnectionClosed():
                return self._apply_gone(event)
            case _:
                assert_never(event)

    def _apply_gone(
        self, event: ConnectionFailed | ConnectionClosed
    ) -> Sequence[WorkerToScheduler]:
        """Staged transfers of the connection settle first."""
        messages = self._links.apply_gone(event)
        return [*self._staged.take(), *messages]

    def _send(self, messages: Sequence[WorkerToScheduler]) -> None:
        for message in messages:
            self._succession.note_sent(message)
            if self._succession.is_ending:
                continue  # nobody knows any more what it is about
            if self._client.send(encode(message)) is not SendResult.SENT:
                raise SchedulerStuck("the scheduler does not read: its channel is full")
