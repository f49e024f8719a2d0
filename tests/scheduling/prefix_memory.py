"""The memory of a worker in which every row says of which tokens it is, from the first one on.

A row that another prompt left, one that was computed too early or too late, and one that was copied
before it was written are all told apart. A draft's row says of the next token as well, and is
written once that is known. Knows nothing of who owns a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from common.layout.cache_layout import PageGroup
from common.layout.component import Live, LiveKind
from common.protocol.worker import PageCopies, PageGrant
from common.scheduling.page_pool import PagePool

UNWRITTEN = -1
# Of tokens that came out wrong, and of all that was computed from them.
BAD = -2
NAME_MODULUS = 2**61 - 1


def next_name(name: int, token: int) -> int:
    """The name of a prompt with one more token."""
    return (name * 1_000_003 + token + 1) % NAME_MODULUS


class KnownSequence:
    """A sequence as a worker knows it. names: of its first 0, 1, 2, ... tokens.

    pages: per group, page ids by logical index; the latest grant of an index counts.
    bad_from: the first token that comes out wrong; None for a sound sequence.
    """

    def __init__(
        self, first_name: int, tokens: Sequence[int], group_count: int, bad_from: int | None
    ) -> None:
        self.names = [first_name]
        self.pages: list[dict[int, int]] = [{} for _ in range(group_count)]
        self.bad_from = bad_from
        self.is_bad = False
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        self.names.append(next_name(self.names[-1], token))

    def grant(self, grant: PageGrant) -> None:
        self.pages[grant.group].update(enumerate(grant.page_ids, grant.first_index))


class PrefixMemory:
    """Pages 1.. of every group. pool: whose word counts for who may touch them.

    has_draft: whether rows of full groups are those of a draft.
    """

    def __init__(
        self, groups: Sequence[PageGroup], pool: PagePool, *, has_draft: bool = False
    ) -> None:
        self._has_draft = has_draft
        self._groups = tuple(groups)
        self._pool = pool
        self._pages = [
            [[UNWRITTEN] * group.page_items for _ in range(count + 1)]
            for group, count in zip(groups, pool.page_counts, strict=True)
        ]

    def copy(self, copies: Sequence[PageCopies]) -> None:
        """All sources are read before any target is written."""
        read = [
            (self._pages[one.group], target, list(self._pages[one.group][source]))
            for one in copies
            for source, target in zip(one.source_ids, one.target_ids, strict=True)
        ]
        for one in copies:
            for page in (*one.source_ids, *one.target_ids):
                self._check_used(one.group, page)
        targets = [(id(pages), target) for pages, target, _ in read]
        assert len(set(targets)) == len(targets), "two copies into one page"
        for pages, target, rows in read:
            pages[target] = rows

    def compute(self, known: KnownSequence, position: int) -> None:
        """One token: leaves its rows behind, and reads what it sees."""
        for group, page_group in enumerate(self._groups):
            if page_group.live.kind is LiveKind.SLOT and position:
                # A slot is never cleared: who starts does not read it.
                self._compare(known, group, 0, known.names[position])
        if known.bad_from is not None and position >= known.bad_from:
            known.is_bad = True
        count = position + 1
        for group, page_group in enumerate(self._groups):
            for item in () if self._is_draft(group) else written_items(page_group.live, count):
                self._put(known, group, item, BAD if known.is_bad else known.names[count])
        for group, page_group in enumerate(self._groups):
            for item in seen_items(page_group.live, count):
                if item < position or not self._is_draft(group):
                    self._compare(known, group, item, self._name(known, group, item, count))

    def follow(self, known: KnownSequence, position: int) -> None:
        """The draft's row of a token whose next one is known."""
        for group in range(len(self._groups)):
            if self._is_draft(group):
                name = BAD if known.is_bad else known.names[position + 2]
                self._put(known, group, position, name)

    def _is_draft(self, group: int) -> bool:
        return self._has_draft and self._groups[group].live.kind is LiveKind.FULL

    def _name(self, known: KnownSequence, group: int, item: int, count: int) -> int:
        tokens = row_tokens(self._groups[group].live, item, count)
        return known.names[tokens + self._is_draft(group)]

    def receive(self, known: KnownSequence, count: int, streamed_from: int) -> None:
        """What a transfer leaves of a prompt, behind the tokens that were here."""
        for group, page_group in enumerate(self._groups):
            live = page_group.live
            for item in live.items(count):
                tokens = row_tokens(live, item, count)
                if tokens > streamed_from or not live.is_streamable:
                    self._put(known, group, item, self._name(known, group, item, count))

    def check_streamed(self, known: KnownSequence, start: int, stop: int) -> None:
        """What tokens [start, stop) have left behind in groups that grow."""
        for group, page_group in enumerate(self._groups):
            live = page_group.live
            if live.is_streamable:
                for item in live.items(stop):
                    tokens = row_tokens(live, item, stop)
                    # A draft's last row is not to be read before the next token is known.
                    is_told = tokens + self._is_draft(group) < len(known.names)
                    if tokens > start and is_told:
                        self._compare(known, group, item, self._name(known, group, item, stop))

    def check_live(self, known: KnownSequence, start: int, count: int, least: int) -> None:
        """What is live after any of `least` to `count` tokens, once all of them are there; of
        groups that grow, what is behind `start`."""
        self.check_streamed(known, start, count)
        for group, page_group in enumerate(self._groups):
            live = page_group.live
            if not live.is_streamable:
                for item in range(live.items(least).start, live.items(count).stop):
                    tokens = row_tokens(live, item, count)
                    self._compare(known, group, item, known.names[tokens])

    def _compare(self, known: KnownSequence, group: int, item: int, expected: int) -> None:
        page, row = self._place(known, group, item)
        value = self._pages[group][page][row]
        if value == BAD:
            known.is_bad = True
            return
        assert value == expected, (
            f"group {group}, item {item}: page {page} row {row} is "
            f"{'unwritten' if value == UNWRITTEN else 'of other tokens'}"
        )

    def _put(self, known: KnownSequence, group: int, item: int, value: int) -> None:
        page, row = self._place(known, group, item)
        self._pages[group][page][row] = value

    def _place(self, known: KnownSequence, group: int, item: int) -> tuple[int, int]:
        page_group = self._groups[group]
        index, row = divmod(item, page_group.page_items)
        index = index if page_group.live.is_paged else 0
        assert index in known.pages[group], f"group {group}, item {item}: no page"
        self._check_used(group, known.pages[group][index])
        return known.pages[group][index], row

    def _check_used(self, group: int, page: int) -> None:
        assert page in self._pool._used[group], f"group {group}: page {page} is nobody's"


def written_items(live: Live, count: int) -> list[int]:
    """Items that the last of `count` tokens writes."""
    match live.kind:
        case LiveKind.FULL | LiveKind.WINDOW | LiveKind.TAIL:
            return [count - 1]
        case LiveKind.BLOCK:
            return [] if count % live.size else [count // live.size - 1]
        case LiveKind.SLOT:
            return [0]
        case _:
            assert_never(live.kind)


def seen_items(live: Live, count: int) -> range:
    """Items that the last of `count` tokens reads, its own included."""
    if live.kind is LiveKind.WINDOW:
        return range(max(0, count - live.size), count)
    return live.items(count)


def row_tokens(live: Live, item: int, count: int) -> int:
    """Of how many tokens an item is, once there are `count`."""
    match live.kind:
        case LiveKind.FULL | LiveKind.WINDOW | LiveKind.TAIL:
            return item + 1
        case LiveKind.BLOCK:
            return (item + 1) * live.size
        case LiveKind.SLOT:
            return count
        case _:
            assert_never(live.kind)
