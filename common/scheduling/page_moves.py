"""Parts of a prefix cache on their way to another one of the same server: its pool's, or that of
the tier in host memory.

    source   | b1 | b2 | b3 | b4 | ^66        locked while they are read
    target   | b1 | b2 |   ..   .. |          taken, and found by nobody until they are there

A copy under way uses both pages. What it brings is in the target as if it had been computed there;
a copy that failed leaves nothing. Knows nothing of workers, nor of why anything moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.protocol.worker import PageCopies
from common.scheduling.prefix_cache import PrefixCache
from common.scheduling.prefix_tree import Checkpoint, Node


@dataclass(frozen=True, slots=True)
class Part:
    """The first blocks of a path of a cache, which end in a node, and checkpoints along it."""

    node: Node
    block_count: int
    checkpoints: Sequence[Checkpoint] = ()


@dataclass(slots=True, eq=False)
class Move:
    """A part on its way. start, stop: blocks of the path that are copied. pages: of them, in the
    target, per page group. source_node, target_node: what keeps them. checkpoints: each with the
    one that it becomes."""

    source: PrefixCache
    target: PrefixCache
    source_node: Node
    target_node: Node
    keys: bytes
    start: int
    stop: int
    pages: list[list[int]]
    checkpoints: list[tuple[Checkpoint, Checkpoint]]
    copies: list[PageCopies]

    @property
    def token_count(self) -> int:
        """Of the blocks that are copied."""
        return (self.stop - self.start) * self.source.block_tokens

    # ---- it ends ---------------------------------------------------------------------------------

    def end(self, *, is_use: bool) -> bool:
        """The copies are made: the target has them, unless they were withdrawn meanwhile. Returns
        whether it has. is_use: whether the source counts as used by that."""
        withdrawn = not self.source.tree.is_found(self.source_node)
        made = [one for one, _ in self.checkpoints if one.node and one in one.node.checkpoints]
        self._let_go(is_use=is_use)
        if withdrawn:
            self._give_up()
            return False
        node = self._place_blocks()
        for one, copy in self.checkpoints:
            if one in made:
                self.target.add(copy, node)
            else:
                self.target.checkpoints.give_up(copy)
        self.target.unlock(node)
        return True

    def fail(self) -> None:
        """The copies came to nothing."""
        self._let_go(is_use=False)
        self._give_up()

    def withdraw(self) -> None:
        """What was read is not what was kept: nobody is to find it in the source any more."""
        self.source.checkpoints.withdraw(one for one, _ in self.checkpoints)
        if self.stop > self.start:
            self.source.tree.cut_off(self.source_node, self.start)

    def _let_go(self, *, is_use: bool) -> None:
        self.source.unlock(self.source_node, is_use=is_use)
        for one, _ in self.checkpoints:
            self.source.let_go(one, is_use=is_use)

    def _place_blocks(self) -> Node:
        """Returns what keeps the path of the target. Blocks that came there meanwhile stay."""
        each = self.target.page_counts
        known = [[0] * (self.start * count) for count in each]
        pages = [before + own for before, own in zip(known, self.pages, strict=True)]
        node, twice = self.target.extend_by_keys(self.target_node, self.keys, pages, self.stop)
        for one in twice:
            blocks = [range(one.start * count, one.stop * count) for count in each]
            self.target.release([p[b.start : b.stop] for p, b in zip(pages, blocks, strict=True)])
        return node

    def _give_up(self) -> None:
        self.target.release(self.pages)
        for _, copy in self.checkpoints:
            self.target.checkpoints.give_up(copy)
        self.target.unlock(self.target_node, is_use=False)


def begin_move(
    source: PrefixCache, target: PrefixCache, part: Part, block_max: int | None = None
) -> Move | None:
    """Begin to copy what the target lacks of a part, of that the first `block_max` blocks; None if
    it lacks nothing that it has room for."""
    seed, keys = source.tree.keys(part.node)
    found, start = target.tree.find(seed, keys, part.block_count)
    stop = part.block_count if block_max is None else min(part.block_count, start + block_max)
    target_node = target.lock(found or target.tree.root(seed), start)
    wanted = [
        one
        for one in part.checkpoints
        if one.block_count <= stop
        and not (one.block_count <= start and target.checkpoints.renew(target_node, one))
    ]
    begun = [(one, _copy_of(one)) for one in wanted if target.checkpoints.begin()]
    needs = [(stop - start) * count for count in target.page_counts]
    for one, _ in begun:
        needs = [need + len(pages) for need, pages in zip(needs, one.pages, strict=True)]
    taken = target.allocate(needs) if stop > start or begun else None
    if taken is None:
        for _, copy in begun:
            target.checkpoints.give_up(copy)
        target.unlock(target_node, is_use=False)
        return None
    source_node = source.lock(part.node, part.block_count)  # those behind go next, and not before
    sources = source.pages(source_node, stop)
    pages: list[list[int]] = []
    copies: list[PageCopies] = []
    for group, (given, count) in enumerate(zip(taken, target.page_counts, strict=True)):
        block_pages = (stop - start) * count
        pages.append(given[:block_pages])
        read = sources[group][start * count :]
        left = given[block_pages:]
        for one, copy in begun:
            own = len(one.pages[group])
            read = read + one.pages[group]
            copy.pages[group], left = left[:own], left[own:]
        if read:
            copies.append(PageCopies(group, read, given))
    for one, _ in begun:
        source.checkpoints.hold(one)
    return Move(
        source, target, source_node, target_node, keys, start, stop, pages, begun, copies
    )  # fmt: skip


def _copy_of(one: Checkpoint) -> Checkpoint:
    """As this one, without pages."""
    return Checkpoint(
        one.token_count,
        one.least_count,
        one.block_count,
        one.rest,
        [[] for _ in one.pages],
        is_spare=one.is_spare,
    )
