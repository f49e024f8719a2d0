"""One scheduler after another over the same rank: what the last one left is ended first.

    Begin | Release -> sends are cancelled, peers closed, steps and copies run to their end,
                       sequences forgotten -> WorkerReady of the session, once one has begun

Pool and transport stay, and so does the model, unless other weights were loaded for the next
scheduler. Owned by the I/O thread. Knows nothing of models, and never decides that a peer is out of
reach: who could still write here is told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from common.protocol.digests import Digested
from common.protocol.worker import (
    Begin,
    PagesMoved,
    Release,
    WorkerReady,
    WorkerToScheduler,
)
from common.worker.peer_links import PeerLinks
from common.worker.sends import Sends

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ForgetSequences:
    """To the engine, behind the steps that came before. load_id: of weights to compute with from
    then on, "" for those that there are."""

    load_id: str = ""


@dataclass(frozen=True, slots=True)
class SequencesForgotten:
    """From the engine: every step before is computed, and no sequence is known. ready: what the
    rank says of itself from now on, None if that is what it said before."""

    ready: WorkerReady | None = None


class Succession:
    """is_ending: what an earlier scheduler began is being ended, and what comes of it is for
    nobody. Jobs beside the engine are counted here: none may run into the next session. to_engine:
    puts a message behind the steps that the engine has."""

    def __init__(
        self,
        links: PeerLinks,
        sends: Sends,
        ready: WorkerReady,
        to_engine: Callable[[ForgetSequences], None],
    ) -> None:
        self._links = links
        self._sends = sends
        self._ready = ready
        self._to_engine = to_engine
        self._session = ""
        self._next_session = ""
        self._job_count = 0
        self._has_engine = True
        self._is_quiet = False
        self.is_ending = False

    def begin(self, message: Begin) -> list[WorkerToScheduler]:
        """A scheduler takes over. What to say now."""
        if message.session == self._session and not self.is_ending:
            return [self._ready_again()]
        self._next_session = message.session
        if self.is_ending or not self._session:
            return self.advance()
        self._end_last()
        return []

    def release(self, message: Release) -> None:
        """The scheduler leaves, and another one is to take over."""
        self._is_quiet = message.is_quiet
        if self._session and not self.is_ending:
            self._end_last(message.load_id)

    def _end_last(self, load_id: str = "") -> None:
        """Begin to end what there is."""
        self.is_ending, self._has_engine = True, False
        self._session = ""
        for peer in self._sends.peers:
            self._sends.cancel_peer(peer, "its scheduler is gone")
        for peer in self._links.peers:
            self._links.close(peer)
        self._to_engine(ForgetSequences(load_id))
        log.info("another scheduler is to take over")

    def note_job(self) -> None:
        """A job beside the engine was given out."""
        self._job_count += 1

    def note_sent(self, message: WorkerToScheduler) -> None:
        """Something was done. An answer ends its job."""
        if isinstance(message, Digested | PagesMoved):
            self._job_count -= 1

    def note_forgotten(self, forgotten: SequencesForgotten) -> None:
        """The engine knows no sequence any more."""
        self._has_engine = True
        if forgotten.ready is not None:
            self._ready = forgotten.ready

    def advance(self) -> list[WorkerToScheduler]:
        """Once all that was under way has ended, the next scheduler is answered."""
        if self.is_ending:
            is_busy = self._sends.open_count or self._links.peers or self._job_count
            if is_busy or not self._has_engine:
                return []
            self._sends.forget_all()
            if self._is_quiet:
                for writer in self._links.writers:
                    self._links.reclaim(writer.incarnation)
            self.is_ending = self._is_quiet = False
        if not self._next_session:
            return []
        self._session, self._next_session = self._next_session, ""
        return [self._ready_again()]

    def _ready_again(self) -> WorkerReady:
        """What was said at the start, to another one."""
        return msgspec.structs.replace(
            self._ready, session=self._session, writers=self._links.writers
        )
