"""The memory of a simulated server: per page group, pages of rows, each row one number.

Every access asks whether the server's scheduler has given the page to anybody: nothing may be read
from a free page, nor written to it. Knows nothing of steps or transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from common.layout.cache_layout import PageGroup
from common.layout.component import LiveKind
from common.scheduling.page_pool import PagePool
from tests.sim.oracle import drawn, fold

UNWRITTEN = -1
VERSION_STEP = 1 << 20  # more than there are tokens

# Per group (first logical index, page ids), as messages carry them.
PageLists = list[tuple[int, list[int]]]


@dataclass
class Known:
    """A sequence as a worker knows it. pages: per page group, page ids by logical index; the latest
    grant of an index counts. seed: of its sampling."""

    tokens: list[int]
    pages: list[dict[int, int]]
    seed: int = 0


class SimCache:
    """owner: whose word counts for the pages; None if nobody's does, as after a crash. version: of
    the weights; what others have computed reads as other tokens."""

    def __init__(self, groups: Sequence[PageGroup], page_counts: Sequence[int]) -> None:
        self.lives = [group.live for group in groups]
        self.owner: PagePool | None = None
        self.version = 0
        self._row_counts = [group.page_items for group in groups]
        self._is_paged = [live.is_paged for live in self.lives]
        self._pools = [
            [[UNWRITTEN] * group.page_items for _ in range(count + 1)]
            for count, group in zip(page_counts, groups, strict=True)
        ]

    # ---- of a sequence ---------------------------------------------------------------------------

    def write(self, known: Known, position: int) -> None:
        """What a step leaves behind for one token."""
        token = known.tokens[position]
        for group, live in enumerate(self.lives):
            match live.kind:
                case LiveKind.FULL | LiveKind.WINDOW | LiveKind.TAIL:
                    self.put(known, group, position, token + self.version * VERSION_STEP)
                case LiveKind.BLOCK:
                    if (position + 1) % live.size == 0:
                        block = known.tokens[position + 1 - live.size : position + 1]
                        self.put(known, group, position // live.size, fold(0, block))
                case LiveKind.SLOT:
                    # A slot is never cleared: who starts does not read it.
                    before = self.get(known, group, range(1))[0] if position else 0
                    self.put(known, group, 0, fold(before, [token]))
                case _:
                    assert_never(live.kind)

    def states(self, known: Known) -> list[tuple[int, int]]:
        """(group, state) of what a sequence has in slots."""
        slots = [group for group, live in enumerate(self.lives) if live.kind is LiveKind.SLOT]
        return [(group, self.get(known, group, range(1))[0]) for group in slots]

    def take_states(self, known: Known, states: list[tuple[int, int]]) -> None:
        for group, state in states:
            self.put(known, group, 0, state)

    def sample(self, known: Known, count: int) -> int:
        """All that is seen of the groups, one after the other."""
        values: list[int] = []
        for group in range(len(self.lives)):
            values += self.read(known, group, count)
        return drawn(values, known.seed)

    def read(self, known: Known, group: int, count: int) -> list[int]:
        """What the last of `count` tokens sees in a group."""
        live = self.lives[group]
        items = live.items(count)
        if live.kind is LiveKind.WINDOW:
            items = range(max(0, count - live.size), count)
        values = self.get(known, group, items)
        if not self.version or live.kind in (LiveKind.BLOCK, LiveKind.SLOT):
            return values
        return [value - self.version * VERSION_STEP for value in values]

    def get(self, known: Known, group: int, items: range) -> list[int]:
        pages, row_count = known.pages[group], self._row_counts[group]
        if not self._is_paged[group]:
            page = self.page(group, pages[0])
            return [page[item % row_count] for item in items]
        values: list[int] = []
        start = items.start
        while start < items.stop:
            index, row = divmod(start, row_count)
            assert index in pages, f"item {start} of group {group} never had a page"
            values += self.page(group, pages[index])[row : row + items.stop - start]
            start += row_count - row
        return values

    def put(self, known: Known, group: int, item: int, value: int) -> None:
        """Of what is not paged, all items go round in one page."""
        index, row = divmod(item, self._row_counts[group])
        index = index if self._is_paged[group] else 0
        assert index in known.pages[group], f"item {item} of group {group} never had a page"
        self.page(group, known.pages[group][index])[row] = value

    def copy(self, group: int, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Whole pages, all of them read before any is written."""
        rows = [list(self.page(group, page)) for page in source_ids]
        for page, values in zip(target_ids, rows, strict=True):
            self.page(group, page)[:] = values

    # ---- of a transfer --------------------------------------------------------------------------

    def take(self, lists: PageLists, group: int, item: int) -> int:
        page, row = self._place(lists, group, item)
        return self.page(group, page)[row]

    def peek(self, lists: PageLists, group: int, item: int) -> int:
        """Whoever compares may look at pages that were given back: nobody heeds what it says."""
        page, row = self._place(lists, group, item)
        return self._pools[group][page][row]

    def leave(self, lists: PageLists, group: int, item: int, value: int) -> None:
        page, row = self._place(lists, group, item)
        self.page(group, page)[row] = value

    def are_used(self, lists: PageLists) -> bool:
        """Whether any of these pages is somebody's."""
        used = self.owner._used if self.owner is not None else [set()] * len(lists)
        return any(one & {*pages} for one, (_, pages) in zip(used, lists, strict=True))

    def _place(self, lists: PageLists, group: int, item: int) -> tuple[int, int]:
        first, pages = lists[group]
        index, row = divmod(item, self._row_counts[group])
        index = index - first if self._is_paged[group] else 0
        assert 0 <= index < len(pages), f"item {item} is not in pages {first}.. of {group}"
        return pages[index], row

    def page(self, group: int, page: int) -> list[int]:
        owner = self.owner
        if owner is not None and page not in owner._used[group]:
            assert page in owner._quarantined[group], f"page {page} of group {group} is nobody's"
        return self._pools[group][page]
