"""Requests that wait for what another prompt computes, instead of computing it again.

Knows nothing of pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from common.request import Claim
from common.scheduling.batcher import Batcher
from common.scheduling.prefix_cache import Match
from common.scheduling.sequence import Sequence

# A prompt waits for another one if that spares it this much of what it lacks. For less it would
# lose a step that it could have been part of: all prompts of a template begin alike.
SPARED_SHARE_MIN = 1 / 8


class Waiting(Protocol):
    """A request that waits to be computed."""

    request_id: int

    @property
    def claim(self) -> Claim: ...


R = TypeVar("R", bound=Waiting)
R_contra = TypeVar("R_contra", contravariant=True)


class Queue(Protocol[R_contra]):
    """Requests that wait, of which some are set aside."""

    def __contains__(self, request_id: int, /) -> bool: ...

    def set_aside(self, request: R_contra, /) -> None: ...

    def put_back(self, request: R_contra, /) -> None: ...


@dataclass(slots=True)
class _Leader(Generic[R]):
    """A sequence that is followed. followers: how many of its tokens each waits for.

    computed_count: of the sequence when they were looked at last.
    """

    sequence: Sequence
    computed_count: int
    followers: list[tuple[int, R]] = field(default_factory=list)


class Followers(Generic[R]):
    """Owner of `Sequence.wanted_count`. Those that wait are set aside in the queue.

    count: how often a request began to wait.
    """

    def __init__(self, queue: Queue[R], batcher: Batcher) -> None:
        self._queue = queue
        self._batcher = batcher
        self._leaders: dict[int, _Leader[R]] = {}
        self.count = 0

    def follows(
        self, request: R, match: Match, digests: bytes, reusable_count: int, token_count: int
    ) -> bool:
        """Whether a request waits for a prompt that is being computed, because the two begin alike.

        match: what is there of its `token_count` tokens, of which it can reuse so many.
        """
        found = self._batcher.find_writer(match, digests, reusable_count)
        if found is None:
            return False
        leader, shared_count = found
        spared = shared_count - match.token_count
        if spared < SPARED_SHARE_MIN * (token_count - match.token_count):
            return False
        self._add(request, leader, shared_count)
        return True

    def _add(self, request: R, sequence: Sequence, token_count: int) -> None:
        """A request waits until so many tokens of a sequence are computed, which is as urgent as
        itself from now on."""
        self.count += 1
        sequence.priority = max(sequence.priority, request.claim.priority)
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
            waiting: list[tuple[int, R]] = []
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

    def _tell(self, leader: _Leader[R]) -> None:
        counts = [token_count for token_count, _ in leader.followers]
        leader.sequence.wanted_count = min(counts, default=0)
