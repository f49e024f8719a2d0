"""Checkpoints of the prefix tree: spare ones go first, then least recently used ones, and never
those in use.

Knows nothing of sequences, nor of what a page group is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from common.scheduling.page_pool import PagePool
from common.scheduling.prefix_tree import Checkpoint, Node, PrefixTree


class Checkpoints:
    """Owner of all checkpoints of a tree, and of their pages.

    count_max: how many there may be. idle_page_counts: per page group, pages of those that nobody
    copies. version: another number after every change of what is found. made_count, used_count,
    evicted_count, withdrawn_count: so far; of the last, those that were being copied.
    """

    def __init__(self, tree: PrefixTree, pool: PagePool, count_max: int) -> None:
        self._tree = tree
        self._pool = pool
        self.count_max = count_max
        self.count = 0
        self.idle_page_counts = [0] * len(pool.page_counts)
        self._idle: OrderedDict[Checkpoint, None] = OrderedDict()
        self._spare: OrderedDict[Checkpoint, None] = OrderedDict()
        self.made_count = 0
        self.used_count = 0
        self.evicted_count = 0
        self.withdrawn_count = 0

    @property
    def version(self) -> int:
        return self.made_count + self.evicted_count + self.withdrawn_count

    def find(
        self,
        node: Node,
        block_count: int,
        block_tokens: int,
        token_ids: Sequence[int],
        token_max: int,
        lookahead: int = 0,
    ) -> tuple[Checkpoint | None, int]:
        """Which one lets a prompt go on from the most tokens, at most `token_max`, and from how
        many; None and 0 if there is none.

        block_count: of the prompt that are on the path to this node. lookahead: tokens behind those
        that have to be equal as well.
        """
        for one in node.path():
            best: tuple[Checkpoint | None, int] = (None, 0)
            for checkpoint in one.checkpoints:
                if checkpoint.block_count > block_count:
                    continue
                most = min(checkpoint.token_count, token_max)
                start = checkpoint.block_count * block_tokens
                for count in range(most, max(best[1], checkpoint.least_count - 1), -1):
                    rest = token_ids[start : count + lookahead]
                    if _serves(checkpoint, count, rest):
                        best = (checkpoint, count)
                        break
                    if not lookahead:
                        break
            if best[1]:
                return best
        return None, 0

    # ---- made ------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Whether one more may be made. If so it is counted, and `add` or `give_up` follows."""
        if self.count >= self.count_max:
            self.forget(list(islice(self.idle(), 1)))
        if self.count >= self.count_max:
            return False
        self.count += 1
        return True

    def give_up(self, checkpoint: Checkpoint) -> None:
        """It was begun and is of no use: its pages come back."""
        self.count -= 1
        for group, pages in enumerate(checkpoint.pages):
            self._pool.release(group, pages)

    def add(self, checkpoint: Checkpoint, node: Node) -> None:
        """Its pages are filled: it hangs on its place in a locked path from now on. One of the same
        tokens may be there; then this one is of no use."""
        if self.renew(node, checkpoint):
            self.give_up(checkpoint)
            return
        node = place_of(node, checkpoint)
        checkpoint.node = node
        node.checkpoints.append(checkpoint)
        self.made_count += 1
        self._note_idle(checkpoint)

    def renew(self, node: Node, checkpoint: Checkpoint) -> bool:
        """Whether one is there that serves wherever this one would; that counts as used now."""
        for other in equals_of(node, checkpoint):
            if other.least_count <= checkpoint.least_count:
                if other.users == 0:
                    self._table_of(other).move_to_end(other)
                return True
        return False

    # ---- used ------------------------------------------------------------------------------------

    def use(self, checkpoint: Checkpoint) -> None:
        """A prompt goes on from it: its pages are copied from now on, until `let_go`."""
        self.hold(checkpoint)
        self.used_count += 1
        checkpoint.is_spare = False

    def hold(self, checkpoint: Checkpoint) -> None:
        """Its pages are read from now on, until `let_go`."""
        checkpoint.users += 1
        if checkpoint.users == 1:
            self._note_busy(checkpoint)

    def let_go(self, checkpoint: Checkpoint, *, is_use: bool = True) -> None:
        """is_use: whether it counts as used by that; else it is the first to go."""
        checkpoint.users -= 1
        if checkpoint.users == 0:
            self._note_idle(checkpoint)
            if not is_use:
                self._table_of(checkpoint).move_to_end(checkpoint, last=False)

    def _table_of(self, checkpoint: Checkpoint) -> OrderedDict[Checkpoint, None]:
        return self._spare if checkpoint.is_spare else self._idle

    def idle(self) -> Iterator[Checkpoint]:
        """Those that nobody copies, the first to go first. The latest of the spare ones goes last:
        equal prompts may have come just now."""
        spare = list(self._spare)
        return chain(spare[:-1], self._idle, spare[-1:])

    def _note_idle(self, checkpoint: Checkpoint) -> None:
        self._table_of(checkpoint)[checkpoint] = None
        for group, pages in enumerate(checkpoint.pages):
            self.idle_page_counts[group] += len(pages)

    def _note_busy(self, checkpoint: Checkpoint) -> None:
        del self._table_of(checkpoint)[checkpoint]
        for group, pages in enumerate(checkpoint.pages):
            self.idle_page_counts[group] -= len(pages)

    # ---- gone ------------------------------------------------------------------------------------

    def forget(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Idle ones go, and their pages are free."""
        for checkpoint in checkpoints:
            assert checkpoint.users == 0, "its pages are being copied"
            self._note_busy(checkpoint)
            node = checkpoint.node
            assert node is not None
            if checkpoint in node.checkpoints:
                node.checkpoints.remove(checkpoint)
            self._tree.drop_if_empty(node)
            checkpoint.node = None
            self.evicted_count += 1
            self.give_up(checkpoint)

    def withdraw(self, checkpoints: Iterable[Checkpoint]) -> None:
        """They are not found any more. One that is being copied goes with the idle ones later."""
        for checkpoint in checkpoints:
            node = checkpoint.node
            if node is None:
                continue  # it has gone
            if checkpoint.users == 0:
                self.forget([checkpoint])
            elif checkpoint in node.checkpoints:
                node.checkpoints.remove(checkpoint)
                self.withdrawn_count += 1

    def forget_idle(self) -> None:
        self.forget(list(self.idle()))

    def evict(self, missing: Sequence[int]) -> None:
        """Free so many pages per group, as far as idle ones have them."""
        left = list(missing)
        for checkpoint in list(self.idle()):
            if not any(count > 0 for count in left):
                return
            helps = [bool(pages) and left[g] > 0 for g, pages in enumerate(checkpoint.pages)]
            if any(helps):
                self.forget([checkpoint])
                left = [n - len(pages) for n, pages in zip(left, checkpoint.pages, strict=True)]


def _serves(checkpoint: Checkpoint, count: int, rest: Sequence[int]) -> bool:
    """Whether a prompt can go on from so many tokens.

    rest: of the prompt, behind the checkpoint's blocks. What a checkpoint does not know of it, for
    it was made before the next token was there, has to be as it was for whoever can't take a token
    back, who has nothing else.
    """
    known = checkpoint.rest[: len(rest)]
    is_known = len(known) == len(rest) or checkpoint.least_count == count
    return is_known and tuple(rest[: len(known)]) == known


def equals_of(node: Node, checkpoint: Checkpoint) -> list[Checkpoint]:
    """Those of the same tokens along a path."""
    tokens = checkpoint.token_count, checkpoint.rest
    here = place_of(node, checkpoint).checkpoints
    return [other for other in here if (other.token_count, other.rest) == tokens]


def place_of(node: Node, checkpoint: Checkpoint) -> Node:
    """Where a checkpoint hangs along a path: at its last block, or at the root."""
    for one in node.path():
        if one.start < checkpoint.block_count or one.parent is None:
            return one
    raise AssertionError("a path ends in a root")
