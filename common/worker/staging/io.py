"""What the I/O thread does for staged transfers: the sockets between ranks, and what comes of them.

Either half may be missing: a rank that is written to has a `Landing`, one that writes a `Staging`,
and a server that hands over directly has none. Decides nothing.
"""

from __future__ import annotations

from typing import assert_never

from common.channel.sockets import SocketSet
from common.clock import Clock
from common.protocol.worker import Expect, Forget, Forgotten, ReclaimPeer, WorkerToScheduler
from common.transport.transport import TransferSettled
from common.worker.peer_links import PeerLinks
from common.worker.sends import Sends
from common.worker.staging.source import TAG_FIRST, Staging
from common.worker.staging.target import Landing


class StagedIo:
    """The staged side of a rank's transfers, as the loop sees it."""

    def __init__(
        self,
        sends: Sends,
        links: PeerLinks,
        landing: Landing | None,
        staging: Staging | None,
        clock: Clock,
    ) -> None:
        self._sends = sends
        self._links = links
        self._landing = landing
        self._staging = staging
        self._clock = clock

    def sockets(self) -> tuple[SocketSet, ...]:
        """For a `Poller`; they come and go with the peers."""
        landing = self._landing.sockets() if self._landing is not None else ()
        staging = self._staging.sockets() if self._staging is not None else ()
        return (*landing, *staging)

    def timeout_s(self) -> float | None:
        """How long may be waited for something to happen."""
        wakeup = self._staging.next_wakeup() if self._staging is not None else None
        return None if wakeup is None else max(0.0, wakeup - self._clock.now())

    def handle(self, message: Expect | Forget | ReclaimPeer) -> list[WorkerToScheduler]:
        """Without a landing region nothing is ever scattered, so all of it is true at once."""
        match message:
            case Expect():
                if self._landing is not None:
                    self._landing.expect(message)
            case Forget():
                if self._landing is not None:
                    return [self._landing.forget(message)]
                return [Forgotten(message.transfer_id, self._links.rank)]
            case ReclaimPeer():
                if self._landing is not None:
                    self._landing.reclaim(message.peer)
            case _:
                assert_never(message)
        return []

    def apply_settled(self, event: TransferSettled) -> bool:
        """Whether it was a put of a staged transfer."""
        if self._staging is None or event.tag < TAG_FIRST:
            return False
        self._staging.apply_settled(event)
        return True

    def receive(self) -> list[WorkerToScheduler]:
        """Everything that waits on the sockets, and what is due."""
        if self._landing is not None:
            self._landing.receive()
        if self._staging is not None:
            self._staging.receive()
            self._staging.tick()
        return self.take()

    def take(self) -> list[WorkerToScheduler]:
        """What staging has to say to the scheduler; notifier may cause more."""
        told: list[WorkerToScheduler] = []
        while self._staging is not None and (events := self._staging.poll()):
            for event in events:
                if isinstance(event, TransferSettled):
                    told += self._sends.apply_settled(event)
                else:
                    told += self._links.apply_lane(event)
        return told

    def close(self) -> None:
        """Hang up and stop listening."""
        if self._landing is not None:
            self._landing.end()
        if self._staging is not None:
            self._staging.end()
