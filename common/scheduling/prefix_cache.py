"""Full pages of earlier prompts, kept for prompts that begin alike. A tree of pages, least recently
used leaves evicted first.

Knows nothing of requests. It serves one page group whose items are plain tokens; families with
state or windows do not use it. A page in the tree is *used* in the pool and owned by the tree; a
node is locked while a sequence reads its page, and a locked node's ancestors are locked with it, so
every unlocked node can be evicted sooner or later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.scheduling.page_pool import PagePool


@dataclass(slots=True, eq=False)
class CacheNode:
    """One full page of tokens below its parent's."""

    key: tuple[int, ...]
    page: int
    parent: CacheNode | None
    children: dict[tuple[int, ...], CacheNode] = field(default_factory=dict)
    lock_count: int = 0


class PrefixCache:
    """Tree of full pages of group `group`, `page_size` tokens each.

    relief_count: pages so far that were adopted, or let go of by their last reader.
    """

    def __init__(self, pool: PagePool, group: int, page_size: int) -> None:
        self._pool = pool
        self._group = group
        self._page_size = page_size
        self._roots: dict[tuple[int, ...], CacheNode] = {}
        self._unlocked: OrderedDict[int, CacheNode] = OrderedDict()
        self.node_count = 0
        self.relief_count = 0

    @property
    def evictable_count(self) -> int:
        return len(self._unlocked)

    def match(self, tokens: Sequence[int], token_max: int) -> list[CacheNode]:
        """Nodes of the longest cached prefix of `tokens`, at most `token_max` tokens long."""
        nodes: list[CacheNode] = []
        children = self._roots
        for start in range(0, min(token_max, len(tokens)) - self._page_size + 1, self._page_size):
            node = children.get(tuple(tokens[start : start + self._page_size]))
            if node is None:
                break
            nodes.append(node)
            children = node.children
        return nodes

    def lock(self, nodes: Sequence[CacheNode]) -> None:
        """Keep the pages of a path from its root downwards."""
        for node in nodes:
            node.lock_count += 1
            if node.lock_count == 1:
                self._unlocked.pop(id(node), None)

    def unlock(self, nodes: Sequence[CacheNode]) -> None:
        """Let go of a path. Leaves become older than their parents, so that they go first."""
        for node in reversed(nodes):
            assert node.lock_count > 0
            node.lock_count -= 1
            if node.lock_count == 0:
                self._unlocked[id(node)] = node
                self.relief_count += 1

    def insert(
        self,
        tokens: Sequence[int],
        computed_count: int,
        pages: Sequence[int],
        locked: list[CacheNode],
    ) -> list[CacheNode]:
        """Offer the full pages of the first `computed_count` tokens behind the already locked path.

        The nodes of these pages come back locked. A page of the caller is adopted, and belongs to
        the tree from now on, unless another prompt has put one there meanwhile: then the node has
        that page, and the caller keeps its own copy.
        """
        children = locked[-1].children if locked else self._roots
        parent = locked[-1] if locked else None
        path: list[CacheNode] = []
        for index in range(len(locked), computed_count // self._page_size):
            start = index * self._page_size
            key = tuple(tokens[start : start + self._page_size])
            node = children.get(key)
            if node is None:
                node = children[key] = CacheNode(key, pages[index], parent, lock_count=1)
                self.node_count += 1
                self.relief_count += 1
            else:
                self.lock([node])
            path.append(node)
            children, parent = node.children, node
        return path

    def cut(self, node: CacheNode) -> None:
        """A page and those behind it are not found any more. Their readers go on, and they are
        freed as all others. Harmless if it was cut before."""
        siblings = self._roots if node.parent is None else node.parent.children
        if siblings.get(node.key) is node:  # another page may be there by now
            del siblings[node.key]

    def evict(self, count: int) -> int:
        """Free up to `count` pages, least recently used first; returns how many."""
        freed = 0
        while freed < count and self._unlocked:
            _, node = self._unlocked.popitem(last=False)
            if node.children:
                # Its children were unlocked later than it was: they go first.
                self._unlocked[id(node)] = node
                continue
            self.cut(node)
            self._pool.release(self._group, [node.page])
            self.node_count -= 1
            self.relief_count -= 1  # the pool counts it again
            freed += 1
        return freed
