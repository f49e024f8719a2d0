"""Who could still write into this server's memory without a connection: processes that were let in
by one that is closed, or by an earlier scheduler of these workers.

    closed without a fence      ─► one of the proofs below ─► its pages and slots may be used again
    let in by an earlier one    ─► the same                ─► once all are proved, caches may arrive

Proved are processes that have ended, and processes that greet anew: before a scheduler greets, its
workers have ended all that an earlier one began, and before one greets a server again, or answers
its greeting, it has closed what it shared with it, or with an earlier scheduler of the same workers
there. Who refuses a greeting has done the same before. Knows nothing of pages.
"""

from __future__ import annotations

from common.protocol.hosts import ProcessIds, peer_processes, process_ids
from common.protocol.peer import VERSION_OF_SUCCESSION, Hello, Welcome
from common.scheduling.facts import ServerFacts
from common.scheduling.peers import Outbox
from common.transfers.introduction import spoken_versions

# Peers that live greet within a second of a scheduler that starts again, those that are frozen not.
EARLIER_TIMEOUT_S = 10.0
# Closed ones that are remembered. One that is forgotten can only be proved by the end of its
# processes, which is watched from its first greeting on.
CLOSED_COUNT_MAX = 1024


class Writers:
    """Owner of what is known of them. Times are given; nothing is proved by time."""

    def __init__(self, facts: ServerFacts, outbox: Outbox) -> None:
        self._outbox = outbox
        self._closed: dict[str, ProcessIds] = {}
        self._earlier: dict[str, ProcessIds] = {}
        self._since: float | None = None
        for writer in facts.earlier_writers:
            processes = peer_processes(writer.host_ids, writer.pids, facts.host_ids)
            if processes.is_elsewhere:
                continue  # our workers have closed what it wrote through
            self._earlier[writer.incarnation] = process_ids(writer.host_ids, writer.pids)
            if processes.watched_pids and not processes.has_unwatched:
                outbox.watch_processes(writer.incarnation, processes.watched_pids)

    @property
    def trouble(self) -> str:
        """Why no cache may arrive here yet; "" if all may."""
        if not self._earlier:
            return ""
        names = ", ".join(self._earlier)
        return f"servers that were let in by an earlier scheduler may still write here: {names}"

    def add_closed(self, incarnation: str, ids: ProcessIds) -> None:
        """A connection is closed, and its peer not proved to be out of reach."""
        self._closed[incarnation] = ids
        if len(self._closed) > CLOSED_COUNT_MAX:
            del self._closed[next(iter(self._closed))]

    def take_greeted(self, message: Hello | Welcome) -> list[str]:
        """Those that a greeting proves to be out of reach."""
        ids = process_ids(message.host_ids, message.pids)
        knows = spoken_versions(message)[1] >= VERSION_OF_SUCCESSION
        succeeded = [
            one
            for known in (self._closed, self._earlier)
            for one, found in known.items()
            if one != message.incarnation and ids and found == ids
        ]
        if knows and message.incarnation in self._earlier:
            succeeded.append(message.incarnation)
        for one in succeeded:
            self.forget(one)
        return succeeded

    def take_refusing(self, incarnation: str) -> bool:
        """Whether a refusal that says so proves that a writer is out of reach, as a greeting would:
        of one that an earlier scheduler let in."""
        is_earlier = incarnation in self._earlier
        if is_earlier:
            self.forget(incarnation)
        return is_earlier

    def forget(self, incarnation: str) -> None:
        """Nothing of it can write here any more. Harmless if it is not known."""
        self._closed.pop(incarnation, None)
        self._earlier.pop(incarnation, None)

    def review(self, now: float) -> None:
        """Give this process up if somebody can't be proved: a new pool is the only way out then."""
        if not self._earlier:
            return
        if self._since is None:
            self._since = now
        if now > self._since + EARLIER_TIMEOUT_S:
            self._outbox.give_up(self.trouble)
