"""Requests that wait for what another prompt computes, instead of computing it again.

Knows nothing of pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.scheduling.batcher import Batcher
from common.scheduling.sequence import Sequence
from prefill_server.queue import WaitingQueue
from prefill_server.request import PrefillRequest


@dataclass(slots=True)
class _Leader:
    """A sequence that is followed. followers: how many of its tokens each waits for.

    computed_count: of the sequence when they were looked at last.
    """

    sequence: Sequence
    computed_count: int
    followers: list[tuple[int, PrefillRequest]] = field(default_factory=list)


class Followers:
    """Owner of `Sequence.wanted_count`. Those that wait are set aside in the queue.

    count: how often a request began to wait.
    """

    def __init__(self, queue: WaitingQueue, batcher: Batcher) -> None:
        self._queue = queue
        self._batcher = batcher
        self._leaders: dict[int, _Leader] = {}
        self.count = 0

    def add(self, request: PrefillRequest, sequence: Sequence, token_count: int) -> None:
        """A request waits until so many tokens of a sequence are computed."""
        self.count += 1
        self._queue.set_aside(request)
        leader = self._leaders.setdefault(
            sequence.request_id, _Leader(sequence, sequence.computed_count)
        )
        leader.followers.append((token_count, request))
        self._batcher.stop_at(sequence, token_count)
        self._tell(leader)

    def wake(self) -> None:
        """Put back requests that have nothing to wait for any more."""
        for leader in list(self._leaders.values()):
            sequence = leader.sequence
            is_gone = not self._batcher.computes_prompt(sequence)
            if sequence.computed_count == leader.computed_count and not is_gone:
                continue
            leader.computed_count = sequence.computed_count
            waiting: list[tuple[int, PrefillRequest]] = []
            for token_count, request in leader.followers:
                if request.request_id not in self._queue:
                    continue  # it was given up meanwhile
                if is_gone or self._batcher.has_reached(sequence, token_count):
                    self._queue.put_back(request)
                else:
                    waiting.append((token_count, request))
            leader.followers = waiting
            self._tell(leader)
            if not waiting:
                del self._leaders[sequence.request_id]

    def _tell(self, leader: _Leader) -> None:
        counts = [token_count for token_count, _ in leader.followers]
        leader.sequence.wanted_count = min(counts, default=0)
