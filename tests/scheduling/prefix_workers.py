"""The workers of a story: they compute steps in a memory that tells whose each row is.

Knows nothing of the batcher.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from common.layout.cache_layout import PageGroup
from common.protocol.worker import PageCopies, Step
from common.scheduling.page_pool import PagePool
from tests.scheduling.prefix_memory import KnownSequence, PrefixMemory
from tests.scheduling.prefix_setup import Request, first_name

TOKENS = 3


class PrefixWorkers:
    """may_be_bad: whether a request may read what came out wrong."""

    def __init__(
        self,
        groups: tuple[PageGroup, ...],
        pool: PagePool,
        requests: dict[int, Request],
        may_be_bad: Callable[[Request], bool],
        tally: Counter[str],
        *,
        has_draft: bool = False,
    ) -> None:
        self.memory = PrefixMemory(groups, pool, has_draft=has_draft)
        self._group_count = len(groups)
        self._requests = requests
        self._may_be_bad = may_be_bad
        self._tally = tally
        self._known: dict[int, KnownSequence] = {}

    def compute(self, step: Step) -> dict[int, int | None]:
        """What it draws, by request; None for who gets no token."""
        for request_id in step.retired:
            del self._known[request_id]
        for new in step.new:
            assert new.request_id not in self._known
            self._known[new.request_id] = self.known_of(
                self._requests[new.request_id], new.token_ids
            )
        for grant in step.grants:
            self._known[grant.request_id].grant(grant)
        self.copy(step.copies)
        drawn: dict[int, int | None] = {}
        for chunk in step.chunks:
            known = self._known[chunk.request_id]
            for position in range(chunk.start, chunk.stop):
                self._compute(chunk.request_id, position)
                if position + 2 < len(known.names):
                    self.memory.follow(known, position)
            for group, page in enumerate(chunk.state_pages):
                if page:
                    self.memory.copy([PageCopies(group, [known.pages[group][0]], [page])])
                    self._tally["states kept inside steps"] += 1
            if chunk.is_last:
                drawn[chunk.request_id] = self._draw(chunk.request_id)
                self.memory.follow(known, chunk.stop - 1)
        for request_id in step.decode:
            self._compute(request_id, len(self._known[request_id].names) - 2)
            drawn[request_id] = self._draw(request_id)
            known = self._known[request_id]
            self.memory.follow(known, len(known.names) - 3)
        self._tally["steps"] += 1
        return drawn

    def copy(self, copies: list[PageCopies]) -> None:
        self.memory.copy(copies)
        self._tally["pages copied"] += sum(len(one.source_ids) for one in copies)

    def known_of(self, request: Request, tokens: list[int]) -> KnownSequence:
        name = first_name(request.salt)
        return KnownSequence(name, tokens, self._group_count, request.bad_from)

    def _compute(self, request_id: int, position: int) -> None:
        known, request = self._known[request_id], self._requests[request_id]
        self.memory.compute(known, position)
        if known.is_bad and request.bad_from is None:
            assert self._may_be_bad(request), "what came out wrong is found"

    def _draw(self, request_id: int) -> int | None:
        known = self._known[request_id]
        token = drawn_token(known)
        known.add(token)
        return None if known.is_bad else token


def drawn_token(known: KnownSequence) -> int:
    """What the model says."""
    return known.names[-1] // 7 % TOKENS
