"""States of sequences behind each of their proposals, until it is known how many are accepted.

A recurrent state can't take a token back. So the rows of a pass leave their states in spare slots,
the last row of a sequence in the sequence's own; the state behind the last accepted proposal is
then copied there. Spare slots are the last pages of the pool's slot groups, of which no scheduler
knows. Knows nothing of proposals.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.engine.cache.kv_pool import KvPool
from common.engine.cache.page_copies import copy_pages
from common.layout.component import LiveKind
from common.protocol.worker import PageCopies


class SpareStates:
    """count: spare slots of every slot group."""

    def __init__(self, pool: KvPool, count: int) -> None:
        self._pool = pool
        self._groups = [
            index for index, group in enumerate(pool.groups) if group.live.kind is LiveKind.SLOT
        ]
        self._first_ids = {group: pool.page_counts[group] - count + 1 for group in self._groups}
        self.count = count if self._groups else None

    def fit(self, counts: Sequence[int]) -> list[int]:
        """As many proposals of each sequence as there are spare slots for."""
        if self.count is None:
            return list(counts)
        fitting: list[int] = []
        left = self.count
        for count in counts:
            fitting.append(min(count, left))
            left -= fitting[-1]
        return fitting

    def page_ids(self, number: int) -> list[int]:
        """Per page group, the page of the spare slot of a number; 0 where the group is no slot."""
        return [
            self._first_ids[group] + number if group in self._first_ids else 0
            for group in range(len(self._pool.groups))
        ]

    def take_over(self, kept: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Copy states from spare slots, by number, into sequences' own pages, one per group."""
        if self.count is None or not kept:
            return
        copy_pages(
            self._pool,
            [
                PageCopies(
                    group,
                    [self._first_ids[group] + number for number, _ in kept],
                    [own[group] for _, own in kept],
                )
                for group in self._groups
            ],
        )
