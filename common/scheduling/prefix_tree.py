"""Blocks of earlier prompts and answers, as a tree of runs. Least recently used leaves go first.

A *block* is the least number of tokens that fills whole pages in every group that grows with the
tokens. Its key is the digest of its tokens and all before, so an equal key is an equal beginning.
A node is a run of blocks that one prompt follows the other in; it is split where prompts part:

    root ── b1 b2 b3 b4 ┬─ b5 b6        two prompts that have four blocks in common
                        └─ b5' b6' b7'

So what a prompt costs here grows with the places where prompts part, and not with its blocks. A
node is locked while somebody reads its last block, or a block below it. Knows nothing of requests,
of page groups' meaning, or of checkpoints but that they hang on nodes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from common.prefix_digests import DIGEST_NBYTES


class Node:
    """Blocks start + 1 .. end of a path from a root. A root has none, and the seed of its path.

    keys: of its blocks, one after the other. pages: per group that grows, those of its blocks.
    checkpoints: that begin in one of its blocks, or at its end.
    users: who reads its last block and none behind it. locked_child_count: children that are
    locked. used_at: of an idle one, when it was let go of last, on a clock that counts that.
    saved_end: its end when the tier in host memory had all of it.
    """

    __slots__ = (
        "checkpoints",
        "children",
        "keys",
        "locked_child_count",
        "pages",
        "parent",
        "saved_end",
        "seed",
        "start",
        "used_at",
        "users",
    )

    def __init__(self, parent: Node | None, start: int, group_count: int) -> None:
        self.parent = parent
        self.start = start
        self.seed = b""
        self.keys = b""
        self.pages = [array("i") for _ in range(group_count)]
        self.children: dict[bytes, Node] = {}
        self.checkpoints: list[Checkpoint] = []
        self.users = 0
        self.locked_child_count = 0
        self.used_at = 0
        self.saved_end = 0

    @property
    def block_count(self) -> int:
        return len(self.keys) // DIGEST_NBYTES

    @property
    def end(self) -> int:
        return self.start + len(self.keys) // DIGEST_NBYTES

    @property
    def is_locked(self) -> bool:
        return self.users > 0 or self.locked_child_count > 0

    @property
    def is_leaf(self) -> bool:
        return not self.children

    def path(self) -> Iterator[Node]:
        """This node and those above it, the root last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class Checkpoint:
    """What else is needed to go on from the first `token_count` tokens: pages of its own.

    least_count: tokens that it serves to go on from as well, the last one being computed again.
    block_count: whole blocks among them; rest: the tokens behind, and the next one if the cache
    depends on that and it is known. pages: per page group: those
    behind the last whole block, a window's, a tail, a slot. node: where it hangs; None while its
    pages are still to be filled. users: sequences that copy it. is_spare: serves equal prompts and
    few others, as there will be one of a few tokens more: until it is used it goes before the rest.
    is_saved: the tier in host memory was given it once.
    """

    token_count: int
    least_count: int
    block_count: int
    rest: tuple[int, ...]
    pages: list[list[int]]
    node: Node | None = None
    users: int = 0
    is_spare: bool = False
    is_saved: bool = False


class PrefixTree:
    """Owner of all nodes. page_counts: pages of one block, per group that grows.

    block_count, node_count: of all. locked_block_count: of nodes that are locked. version: another
    number after every change of what is found.
    """

    def __init__(self, page_counts: Sequence[int]) -> None:
        self._page_counts = tuple(page_counts)
        self._roots: dict[bytes, Node] = {}
        self._idle_leaves: OrderedDict[Node, None] = OrderedDict()
        self._clock = 0
        self.block_count = 0
        self.locked_block_count = 0
        self.node_count = 0
        self.version = 0

    @property
    def idle_block_count(self) -> int:
        """Blocks that could be evicted, one after the other."""
        return self.block_count - self.locked_block_count

    @property
    def idle_leaves(self) -> Iterable[Node]:
        """Whose last blocks are evicted next, one after the other."""
        return self._idle_leaves.keys()

    def nodes(self) -> Iterator[Node]:
        """All that are found, parents first, roots included."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    # ---- found -----------------------------------------------------------------------------------

    def root(self, seed: bytes) -> Node:
        """Where prompts of a seed begin."""
        node = self._roots.get(seed)
        if node is None:
            node = self._roots[seed] = Node(None, 0, len(self._page_counts))
            node.seed = seed
        return node

    def find(self, seed: bytes, keys: bytes, block_max: int) -> tuple[Node | None, int]:
        """The deepest node with a block of this beginning, and how many blocks are there."""
        node, count = self._roots.get(seed), 0
        while node is not None and count < block_max:
            at = count * DIGEST_NBYTES
            child = node.children.get(keys[at : at + DIGEST_NBYTES])
            if child is None:
                break
            node = child
            count += equal_count(
                node.keys, 0, keys, count, min(node.block_count, block_max - count)
            )
            if count < node.end:
                break
        return node, count

    def is_found(self, node: Node) -> bool:
        """Whether prompts find all of the path to a node. Whoever reads it may be the last to know
        it: see `cut_off`."""
        for one in node.path():
            if one.parent is None:
                return self._roots.get(one.seed) is one
            if one.parent.children.get(one.keys[:DIGEST_NBYTES]) is not one:
                return False
        raise AssertionError("a path ends in a root")

    def keys(self, node: Node) -> tuple[bytes, bytes]:
        """The seed and all keys of the path to a node."""
        path = list(node.path())[::-1]
        return path[0].seed, b"".join(one.keys for one in path)

    def pages(self, node: Node, block_count: int) -> list[list[int]]:
        """Per group, the pages of the first blocks of the path that ends in a node."""
        pages: list[list[int]] = [[] for _ in self._page_counts]
        for one in reversed(list(node.path())):
            count = max(0, min(one.end, block_count) - one.start)
            for found, of_node, each in zip(pages, one.pages, self._page_counts, strict=True):
                found.extend(of_node[: count * each])
        return pages

    def idle_count(self, node: Node, block_count: int) -> int:
        """Of the first blocks of a path, those that nobody keeps from being evicted."""
        count = 0
        for one in node.path():
            if one.is_locked:
                break
            count += max(0, min(one.end, block_count) - one.start)
        return count

    # ---- kept ------------------------------------------------------------------------------------

    def lock(self, node: Node, block_count: int) -> Node:
        """Keep the first blocks of a path, which end in this node; returns what `unlock` takes."""
        if block_count < node.end:
            node = self._split(node, block_count)
        node.users += 1
        if node.users + node.locked_child_count == 1:
            self._note_locked(node)
        return node

    def unlock(self, node: Node, *, is_use: bool = True) -> None:
        """Let go of a path. is_use: whether it counts as used by that."""
        assert node.users > 0
        node.users -= 1
        if not node.is_locked:
            self._note_unlocked(node, is_use=is_use)

    def drop_if_empty(self, node: Node) -> None:
        """A root that leads nowhere goes. Harmless for any other node."""
        is_empty = node.is_leaf and not node.checkpoints and not node.is_locked
        if is_empty and self._roots.get(node.seed) is node:
            del self._roots[node.seed]

    def _note_locked(self, node: Node) -> None:
        """It was not locked; so those above it may not have been."""
        for one in node.path():
            self.locked_block_count += one.block_count
            self._idle_leaves.pop(one, None)
            if one.parent is None:
                return
            one.parent.locked_child_count += 1
            if one.parent.users + one.parent.locked_child_count > 1:
                return

    def _note_unlocked(self, node: Node, *, is_use: bool) -> None:
        """It is not locked any more; so those above it may not be."""
        self._clock += 1
        for one in node.path():
            self.locked_block_count -= one.block_count
            if is_use:
                one.used_at = self._clock
            if one.parent is None:
                self.drop_if_empty(one)
                return
            if one.is_leaf and is_use:
                self._idle_leaves[one] = None
            elif one.is_leaf:
                self._add_leaf(one)
            one.parent.locked_child_count -= 1
            if one.parent.is_locked:
                return

    # ---- grown -----------------------------------------------------------------------------------

    def extend(
        self, node: Node, keys: bytes, pages: Sequence[Sequence[int]], block_count: int
    ) -> tuple[Node, list[range]]:
        """Offer the blocks behind a locked path, up to `block_count`; the lock moves along.

        keys: of all blocks from the first one on. pages: per group likewise. Pages become the
        tree's, but for blocks that are there already: they are named, and their pages stay with
        the caller.
        """
        twice: list[range] = []
        count = node.end
        while count < block_count:
            at = count * DIGEST_NBYTES
            child = node.children.get(keys[at : at + DIGEST_NBYTES])
            if child is None:
                return self._append(node, keys, pages, block_count), twice
            most = min(child.block_count, block_count - count)
            known = equal_count(child.keys, 0, keys, count, most)
            twice.append(range(count, count + known))
            count += known
            below = self.lock(child, count)
            self.unlock(node)
            node = below
        return node, twice

    def _append(
        self, node: Node, keys: bytes, pages: Sequence[Sequence[int]], block_count: int
    ) -> Node:
        """Blocks that are in no child of a locked node. Where nobody else ends, it grows."""
        first = node.end
        is_alone = node.users == 1 and node.locked_child_count == 0
        is_own = is_alone and node.is_leaf and node.parent is not None
        target = node if is_own else Node(node, first, len(self._page_counts))
        target.keys += keys[first * DIGEST_NBYTES : block_count * DIGEST_NBYTES]
        for of_node, given, each in zip(target.pages, pages, self._page_counts, strict=True):
            of_node.extend(given[first * each : block_count * each])
        self.version += 1
        self.block_count += block_count - first
        self.locked_block_count += block_count - first
        if target is not node:
            node.children[target.keys[:DIGEST_NBYTES]] = target
            self.node_count += 1
            target.users = 1
            node.locked_child_count += 1
            node.users -= 1
        return target

    def _split(self, node: Node, block_count: int) -> Node:
        """Cut a node in two; the upper one, which is new, ends with so many blocks of the path."""
        count = block_count - node.start
        assert 0 < count < node.block_count, (node.start, block_count, node.end)
        upper = Node(node.parent, node.start, len(self._page_counts))
        at = count * DIGEST_NBYTES
        upper.keys, node.keys = node.keys[:at], node.keys[at:]
        for group, each in enumerate(self._page_counts):
            upper.pages[group] = node.pages[group][: count * each]
            del node.pages[group][: count * each]
        here = [one for one in node.checkpoints if one.block_count <= block_count]
        node.checkpoints = [one for one in node.checkpoints if one not in here]
        for one in here:
            one.node = upper
        upper.checkpoints = here
        upper.used_at = node.used_at
        upper.children = {node.keys[:DIGEST_NBYTES]: node}
        upper.locked_child_count = int(node.is_locked)
        parent = node.parent
        assert parent is not None, "a root has no blocks"
        if parent.children.get(upper.keys[:DIGEST_NBYTES]) is node:
            parent.children[upper.keys[:DIGEST_NBYTES]] = upper
        node.parent, node.start = upper, block_count
        self.node_count += 1
        return upper

    # ---- gone ------------------------------------------------------------------------------------

    def cut_off(self, node: Node, block_count: int) -> None:
        """The blocks of a path behind so many are not found any more, nor what hangs below them.
        Their readers go on and keep all that they read; without readers they are evicted as all
        others."""
        for one in node.path():
            if one.start <= block_count < one.end:
                if block_count > one.start:
                    self._split(one, block_count)
                self._hide(one)
                return

    def _hide(self, node: Node) -> None:
        """Its parent leads to it no more. It still knows its parent, which it keeps locked."""
        parent = node.parent
        assert parent is not None, "a root has no blocks"
        key = node.keys[:DIGEST_NBYTES]
        if parent.children.get(key) is not node:
            return  # it was cut off before, and another block may be there by now
        self.version += 1
        del parent.children[key]
        if parent.is_leaf and not parent.is_locked:
            self._add_leaf(parent)

    def evict(self, count: int) -> Evicted:
        """Take away up to `count` blocks, those of the least recently used leaf first, its last
        one first."""
        evicted = Evicted([[] for _ in self._page_counts], [])
        left = count
        while left > 0 and self._idle_leaves:
            node = next(iter(self._idle_leaves))
            taken = min(left, node.block_count)
            self._shorten(node, taken, evicted)
            left -= taken
        evicted.block_count = count - left
        return evicted

    def _shorten(self, node: Node, count: int, evicted: Evicted) -> None:
        """Take the last blocks of an idle leaf away; it goes with its last one."""
        self.version += 1
        end = node.end - count
        for pages, of_node, each in zip(evicted.pages, node.pages, self._page_counts, strict=True):
            at = len(of_node) - count * each
            pages.extend(of_node[at:])
            del of_node[at:]
        first_key = node.keys[:DIGEST_NBYTES]
        node.keys = node.keys[: (end - node.start) * DIGEST_NBYTES]
        self.block_count -= count
        evicted.checkpoints += [one for one in node.checkpoints if one.block_count > end]
        node.checkpoints = [one for one in node.checkpoints if one.block_count <= end]
        if node.keys:
            return
        assert not node.checkpoints, "each hangs on a block of its node"
        del self._idle_leaves[node]
        self.node_count -= 1
        parent = node.parent
        assert parent is not None, "roots are never among the leaves"
        if parent.children.get(first_key) is node:
            del parent.children[first_key]
            if parent.is_leaf and not parent.is_locked:
                self._add_leaf(parent)

    def _add_leaf(self, node: Node) -> None:
        """A leaf is idle, and not because it was used just now. It goes after the leaves that were
        used before it. Mostly it is the oldest; else those used since are not many."""
        if node.parent is None:
            self.drop_if_empty(node)
            return
        leaves = self._idle_leaves
        oldest = next(iter(leaves), None)
        leaves[node] = None
        if oldest is None or node.used_at <= oldest.used_at:
            leaves.move_to_end(node, last=False)
            return
        others = (one for one in reversed(leaves) if one is not node)
        for one in reversed(list(takewhile(lambda one: one.used_at > node.used_at, others))):
            leaves.move_to_end(one)


@dataclass(slots=True)
class Evicted:
    """What eviction takes out of the tree. pages: per group that grows. checkpoints: that hung on
    the evicted blocks."""

    pages: list[list[int]]
    checkpoints: list[Checkpoint]
    block_count: int = 0


def equal_count(ours: bytes, our_start: int, theirs: bytes, their_start: int, count: int) -> int:
    """How many of `count` keys are equal from here on. A key stands for all before it, so where one
    is equal, those before it are."""
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        our_at = (our_start + middle - 1) * DIGEST_NBYTES
        their_at = (their_start + middle - 1) * DIGEST_NBYTES
        if ours[our_at : our_at + DIGEST_NBYTES] == theirs[their_at : their_at + DIGEST_NBYTES]:
            low = middle
        else:
            high = middle - 1
    return low
