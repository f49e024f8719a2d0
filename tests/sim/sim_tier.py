"""The tier in host memory of a simulated server: copies that take a while, and sometimes fail.

As the real one, it copies beside the steps, in the order of the messages. It asks at the beginning
and at the end of a copy whether both of its pages are somebody's. Knows nothing of what they hold.
"""

from __future__ import annotations

import random
from collections import Counter

from common.protocol.worker import MovePages, PagesMoved
from common.scheduling.facts import ServerFacts
from common.scheduling.page_pool import PagePool
from tests.sim.sim_cache import UNWRITTEN, SimCache
from tests.sim.sim_process import SimProcess

LASTS_S = (0.0005, 0.05)


class SimTier:
    """owner: whose word counts for the pages of the tier. changed_rate: of loads, how many find
    that host memory has changed."""

    def __init__(
        self,
        facts: ServerFacts,
        cache: SimCache,
        process: SimProcess,
        tally: Counter[str],
        rng: random.Random,
    ) -> None:
        self.owner: PagePool | None = None
        self.changed_rate = 0.0
        self._rank_count = facts.rank_count
        self._cache = cache
        self._process = process
        self._tally = tally
        self._rng = rng
        groups = facts.layout.groups
        self._pages = [
            [[UNWRITTEN] * group.page_items for _ in range(count + 1)]
            for count, group in zip(facts.host_page_counts, groups, strict=False)
        ]
        self._moves: list[MovePages] = []
        self._is_copying = False

    @property
    def is_moving(self) -> bool:
        return self._is_copying or bool(self._moves)

    def move(self, message: MovePages) -> None:
        self._moves.append(message)
        self._begin_next()

    def _begin_next(self) -> None:
        if self._is_copying or not self._moves:
            return
        self._is_copying = True
        message = self._moves.pop(0)
        rows = self._read(message)
        self._process.after(self._rng.uniform(*LASTS_S), lambda: self._end(message, rows))

    def _end(self, message: MovePages, begun: list[list[list[int]]]) -> None:
        if self._process.is_dead:
            return
        rows = self._read(message)
        assert rows == begun, "pages were written while they were copied"
        error = ""
        if not message.is_spill and self._rng.random() < self.changed_rate:
            error = "host memory has changed"
            rows = [[[UNWRITTEN] * len(row) for row in of_group] for of_group in rows]
        for copies, of_group in zip(message.pages, rows, strict=True):
            for page, row in zip(copies.target_ids, of_group, strict=True):
                self._page(copies.group, page, is_host=message.is_spill)[:] = row
            self._tally["pages saved" if message.is_spill else "pages loaded"] += len(of_group)
        self._tally["loads that failed"] += bool(error)
        self._is_copying = False
        for rank in range(self._rank_count):
            self._process.say(PagesMoved(message.move_id, rank, error))
        self._begin_next()

    def _read(self, message: MovePages) -> list[list[list[int]]]:
        """What the sources hold; and the targets are somebody's."""
        is_spill, rows = message.is_spill, []
        for copies in message.pages:
            for page in copies.target_ids:
                self._page(copies.group, page, is_host=is_spill)
            sources = (self._page(copies.group, p, is_host=not is_spill) for p in copies.source_ids)
            rows.append([list(row) for row in sources])
        return rows

    def _page(self, group: int, page: int, *, is_host: bool) -> list[int]:
        if not is_host:
            return self._cache.page(group, page)
        owner = self.owner
        assert owner is None or page in owner._used[group], f"host page {page} is nobody's"
        return self._pages[group][page]
