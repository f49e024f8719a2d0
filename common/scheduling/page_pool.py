"""Which pages of each page group are free, used or quarantined. The only owner of page ids.

Knows nothing of requests or memory. Page id 0 is the scratch page and is never given out.
Every page is in exactly one of three places, and the three add up to the pool:

    free  --allocate-->  used  --release-->  free
                         used  --quarantine-->  quarantined  --release_quarantined-->  free

A quarantined page belonged to a transfer whose writer may still reach it; only proof that the
writer is quiet lets it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PagePool:
    """Pages 1..page_counts[group] of every group. freed_count: pages that became free so far."""

    def __init__(self, page_counts: Sequence[int]) -> None:
        self.page_counts = tuple(page_counts)
        # Stacks with the smallest id on top, so that a fresh pool hands out adjacent pages,
        # which merge into long runs.
        self._free: list[list[int]] = [list(range(count, 0, -1)) for count in page_counts]
        self._all = [frozenset(free) for free in self._free]
        self._used: list[set[int]] = [set() for _ in page_counts]
        self._quarantined: list[set[int]] = [set() for _ in page_counts]
        self.freed_count = 0

    def free_count(self, group: int) -> int:
        return len(self._free[group])

    def used_count(self, group: int) -> int:
        return len(self._used[group])

    def quarantined_count(self, group: int) -> int:
        return len(self._quarantined[group])

    def shortfall(self, needs: Sequence[int]) -> list[int]:
        """Pages missing per group before `needs` could be allocated; zeros if it can be now."""
        return [max(0, need - len(free)) for need, free in zip(needs, self._free, strict=True)]

    def allocate(self, group: int, count: int) -> list[int]:
        """`count` free pages of a group. The caller has checked `free_count`."""
        free = self._free[group]
        assert 0 <= count <= len(free), f"group {group}: {count} pages asked, {len(free)} free"
        if count == 0:
            return []
        pages = free[-count:][::-1]
        del free[-count:]
        self._used[group].update(pages)
        return pages

    def release(self, group: int, pages: Iterable[int]) -> None:
        """Used pages become free again."""
        for page in pages:
            self._used[group].remove(page)
            self._free[group].append(page)
            self.freed_count += 1

    def quarantine(self, group: int, pages: Iterable[int]) -> None:
        """Used pages are set aside: a writer may still reach them."""
        for page in pages:
            self._used[group].remove(page)
            self._quarantined[group].add(page)

    def release_quarantined(self, group: int, pages: Iterable[int]) -> None:
        """The writer is proved quiet: quarantined pages become free."""
        for page in pages:
            self._quarantined[group].remove(page)
            self._free[group].append(page)
            self.freed_count += 1

    def check(self) -> None:
        """Every page is in exactly one place and the places add up to the pool."""
        for group, count in enumerate(self.page_counts):
            free, used, quarantined = self._free[group], self._used[group], self._quarantined[group]
            places = used.union(free, quarantined)
            total = len(free) + len(used) + len(quarantined)
            assert total == count and places == self._all[group], (
                f"group {group}: {len(free)} free + {len(used)} used + "
                f"{len(quarantined)} quarantined != {count} pages"
            )
