"""The staged side of the I/O thread: sockets between ranks, and the events that come from them.

A prefill rank has a `StagingSource`, a decode rank a `StagingTarget`; a rank of a server that
transfers directly only has neither. Decides nothing.
"""

from __future__ import annotations

from typing import assert_never

from common.channel.sockets import SocketSet
from common.clock import Clock
from common.protocol.worker import Expect, Forget, Forgotten, WorkerToScheduler
from common.transport.transport import TransferSettled
from common.worker.peer_links import PeerLinks
from common.worker.sends import Sends
from common.worker.staging.source import TAG_FIRST, StagingSource
from common.worker.staging.target import StagingTarget


class StagingIo:
    """The staged side of a rank's transfers, for the I/O loop."""

    def __init__(
        self,
        sends: Sends,
        links: PeerLinks,
        target: StagingTarget | None,
        source: StagingSource | None,
        clock: Clock,
    ) -> None:
        self._sends = sends
        self._links = links
        self._target = target
        self._source = source
        self._clock = clock

    def sockets(self) -> tuple[SocketSet, ...]:
        """For a `Poller`; sockets open and close with the peers."""
        of_target = self._target.sockets() if self._target is not None else ()
        of_source = self._source.sockets() if self._source is not None else ()
        return (*of_target, *of_source)

    def timeout_s(self) -> float | None:
        """How long the loop may wait for an event; None: without limit."""
        wakeup = self._source.next_wakeup() if self._source is not None else None
        return None if wakeup is None else max(0.0, wakeup - self._clock.now())

    def handle(self, message: Expect | Forget) -> list[WorkerToScheduler]:
        """Without a target nothing is ever scattered, so `Forget` is answered at once."""
        match message:
            case Expect():
                if self._target is not None:
                    self._target.expect(message)
            case Forget():
                if self._target is not None:
                    return [self._target.forget(message)]
                return [Forgotten(message.transfer_id, self._links.rank)]
            case _:
                assert_never(message)
        return []

    def apply_settled(self, event: TransferSettled) -> bool:
        """Take a put of a staged transfer; False if the put is not of a staged transfer."""
        if self._source is None or event.tag < TAG_FIRST:
            return False
        self._source.apply_settled(event)
        return True

    def receive(self) -> list[WorkerToScheduler]:
        """Handle all waiting messages, and repeat those that are due."""
        if self._target is not None:
            self._target.receive()
        if self._source is not None:
            self._source.receive()
            self._source.tick()
        return self.take()

    def take(self) -> list[WorkerToScheduler]:
        """Messages for the scheduler. Settling one transfer may cause further events."""
        messages: list[WorkerToScheduler] = []
        while self._source is not None and (events := self._source.poll()):
            for event in events:
                if isinstance(event, TransferSettled):
                    messages += self._sends.apply_settled(event)
                else:
                    messages += self._links.apply_lane(event)
        return messages

    def close(self) -> None:
        """Hang up and stop listening."""
        if self._target is not None:
            self._target.end()
        if self._source is not None:
            self._source.end()
