"""What is kept of earlier prompts and answers for those that begin alike, of any family.

Groups that grow with every token (full, block) are kept as blocks in a tree. What else it takes to
go on from a prefix is kept as checkpoints, at single token counts: slots, tails, windows, and the
pages behind the last whole block. So a prompt is *found* as far as its blocks are there, and can be
*continued* from the last checkpoint on the way; where all groups grow, from any block.

    blocks        | b1 | b2 | b3 | b4 |
    checkpoints             ^37        ^66        page size 16: found 64 tokens, or 66 with the rest
    second prompt | b1 | b2 | b3 | x             found 48; of a model with slots, continued from 37

Knows nothing of sequences. A page in here is *used* in the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from common.layout.cache_layout import PageGroup
from common.layout.component import LiveKind
from common.prefix_digests import DIGEST_NBYTES
from common.scheduling.checkpoints import Checkpoints, equals_of
from common.scheduling.page_pool import PagePool
from common.scheduling.prefix_tree import Checkpoint, Node, PrefixTree

# A tree whose model has no group that grows holds no pages that would bound it.
BLOCK_COUNT_MAX = 1 << 20
MARK_NBYTES = 8
MARK_COUNT_MAX = 4096
# Of a long run of blocks, how far marks are from each other.
MARK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Match:
    """What is there of a prompt. node: where its last block is; None for nothing at all.

    block_count: blocks that are there. token_count: from where on it would be computed.
    checkpoint: to be copied for that, if there is one to be.
    """

    node: Node | None = None
    block_count: int = 0
    token_count: int = 0
    checkpoint: Checkpoint | None = None


NOTHING = Match()


def marks_in(told: bytes) -> list[bytes]:
    """The marks that a server tells of its cache."""
    ends = range(MARK_NBYTES, len(told) + 1, MARK_NBYTES)
    return [told[end - MARK_NBYTES : end] for end in ends]


class PrefixCache:
    """tree, checkpoints: of one server. pool: what its pages are of. block_tokens: of one block.

    page_counts: pages of a block per page group, 0 for groups that don't grow.
    lookahead: tokens behind a block that its digest covers (see prefix_digests.py).
    relief_count: pages so far that were adopted, or let go of by their last reader.
    evicted_token_count: so far.
    """

    def __init__(
        self,
        pool: PagePool,
        groups: Sequence[PageGroup],
        digest_tokens: int,
        checkpoint_max: int,
        lookahead: int = 0,
    ) -> None:
        self.pool = pool
        self._growing = [i for i, group in enumerate(groups) if group.live.is_streamable]
        self.block_tokens = lcm(digest_tokens, *(groups[i].page_tokens for i in self._growing))
        self._key_stride = self.block_tokens // digest_tokens
        self.lookahead = lookahead
        self.page_counts = [
            self.block_tokens // group.page_tokens if group.live.is_streamable else 0
            for group in groups
        ]
        self.needs_checkpoint = len(self._growing) < len(groups)
        # A checkpoint at the end of a block is states alone, and a pass can leave those anywhere.
        self.keeps_inside = self.needs_checkpoint and all(
            group.live.kind is LiveKind.SLOT or group.live.is_streamable for group in groups
        )
        # A recurrent state can't take a token back; rows are written again.
        self.can_step_back = all(group.live.kind is not LiveKind.SLOT for group in groups)
        self.tree = PrefixTree([self.page_counts[i] for i in self._growing])
        self.checkpoints = Checkpoints(self.tree, pool, checkpoint_max)
        self.relief_count = 0
        self.evicted_token_count = 0

    # ---- found -----------------------------------------------------------------------------------

    def keys_of(self, digests: bytes) -> tuple[bytes, bytes]:
        """The seed, and the keys of all whole blocks, from a prompt's digests."""
        stride = self._key_stride
        every = np.frombuffer(digests, dtype=f"V{DIGEST_NBYTES}")
        return digests[:DIGEST_NBYTES], every[stride::stride].tobytes()

    def match(self, digests: bytes, token_ids: Sequence[int], token_max: int) -> Match:
        """What is there of the first `token_max` tokens of a prompt."""
        if not digests or token_max < 1:
            return NOTHING
        seed, keys = self.keys_of(digests)
        node, count = self.tree.find(seed, keys, len(keys) // DIGEST_NBYTES)
        if node is None:
            return NOTHING
        match = self.without_checkpoint(Match(node, min(count, self.blocks_in(token_max))))
        checkpoint, start = self.checkpoints.find(
            node, count, self.block_tokens, token_ids, token_max, self.lookahead
        )
        if checkpoint is not None and start > match.token_count:
            return Match(node, match.block_count, start, checkpoint)
        return match

    def without_checkpoint(self, match: Match) -> Match:
        """The same blocks, to go on from the last one, or from none if that takes a checkpoint."""
        token_count = 0 if self.needs_checkpoint else match.block_count * self.block_tokens
        return Match(match.node, match.block_count, token_count)

    def blocks_in(self, token_count: int) -> int:
        return token_count // self.block_tokens

    def named_blocks(self, token_count: int) -> int:
        """Blocks of a text of so many tokens that have a digest."""
        return self.blocks_in(max(0, token_count - self.lookahead))

    def pages(self, node: Node, block_count: int) -> list[list[int]]:
        """Per page group, the pages of the first blocks of a path; none for those that don't
        grow."""
        found = iter(self.tree.pages(node, block_count))
        return [next(found) if count else [] for count in self.page_counts]

    @property
    def token_count(self) -> int:
        """Of all blocks."""
        return self.tree.block_count * self.block_tokens

    @property
    def token_max(self) -> int:
        """Of all blocks that its pages have room for."""
        rooms = (self.pool.page_counts[i] // self.page_counts[i] for i in self._growing)
        return min(rooms, default=BLOCK_COUNT_MAX) * self.block_tokens

    def kept_blocks(self, match: Match) -> int:
        """Blocks that are locked while a prompt goes on from a match: its own, and the one that it
        copies if it computes the last token of that again."""
        blocks = self.blocks_in(match.token_count)
        return max(blocks, match.checkpoint.block_count) if match.checkpoint is not None else blocks

    def idle_pages(self, match: Match, block_count: int) -> list[int]:
        """Per group, pages of a match that could be evicted now, and not once it is used."""
        idle_count = 0
        if match.node is not None:
            idle_count = self.tree.idle_count(match.node, block_count)
        idle = [idle_count * count for count in self.page_counts]
        if match.checkpoint is not None and match.checkpoint.users == 0:
            for group, pages in enumerate(match.checkpoint.pages):
                idle[group] += len(pages)
        return idle

    def evictable_count(self, group: int) -> int:
        blocks = self.tree.idle_block_count * self.page_counts[group]
        return blocks + self.checkpoints.idle_page_counts[group]

    # ---- kept and let go -------------------------------------------------------------------------

    def lock(self, node: Node, block_count: int) -> Node:
        """Keep the first blocks of the path that ends in a node; returns what `unlock` takes."""
        for one in node.path():
            if one.start < block_count or one.parent is None:
                return self.tree.lock(one, block_count)
        raise AssertionError("a path ends in its root")

    def unlock(self, node: Node, *, is_use: bool = True) -> None:
        """As `PrefixTree.unlock`."""
        before = self.tree.idle_block_count
        self.tree.unlock(node, is_use=is_use)
        self.relief_count += self.tree.idle_block_count - before

    def touch(self, match: Match) -> None:
        """What was found counts as used now."""
        if match.node is not None:
            self.unlock(self.lock(match.node, match.block_count))
        if match.checkpoint is not None:
            self.checkpoints.hold(match.checkpoint)
            self.let_go(match.checkpoint)

    def let_go(self, checkpoint: Checkpoint, *, is_use: bool = True) -> None:
        """Its pages are copied."""
        self.checkpoints.let_go(checkpoint, is_use=is_use)
        self.relief_count += 1

    def add(self, checkpoint: Checkpoint, node: Node) -> None:
        """As `Checkpoints.add`."""
        self.checkpoints.add(checkpoint, node)
        self.relief_count += 1

    def extend(
        self, node: Node, digests: bytes, pages: Sequence[Sequence[int]], block_count: int
    ) -> tuple[Node, list[range]]:
        """As `PrefixTree.extend`. pages: per page group."""
        _, keys = self.keys_of(digests)
        return self.extend_by_keys(node, keys, pages, block_count)

    def extend_by_keys(
        self, node: Node, keys: bytes, pages: Sequence[Sequence[int]], block_count: int
    ) -> tuple[Node, list[range]]:
        """As `extend`, of what has the keys of all blocks from the first one on."""
        before = self.tree.block_count
        node, twice = self.tree.extend(node, keys, [pages[i] for i in self._growing], block_count)
        self.relief_count += self.tree.block_count - before
        if self.tree.block_count > BLOCK_COUNT_MAX:
            self.evict_blocks(self.tree.block_count - BLOCK_COUNT_MAX)
        return node, twice

    # ---- gone ------------------------------------------------------------------------------------

    def evict(self, needs: Sequence[int]) -> None:
        """Make so many pages per group free, as far as there are any that nobody uses."""
        missing = self.pool.shortfall(needs)
        if count := self.blocks_with(missing):
            self.evict_blocks(count)
            missing = self.pool.shortfall(needs)
        if any(missing):
            self.checkpoints.evict(missing)

    def blocks_with(self, pages: Sequence[int]) -> int:
        """How many blocks have so many pages of each group that grows."""
        return max((-(-pages[i] // self.page_counts[i]) for i in self._growing), default=0)

    def allocate(self, needs: Sequence[int]) -> list[list[int]] | None:
        """Pages per group to be filled and found here; None if there are not enough."""
        for group, need in enumerate(needs):
            if need > self.pool.free_count(group) + self.evictable_count(group):
                return None
        self.evict(needs)
        return [self.pool.allocate(group, need) for group, need in enumerate(needs)]

    def release(self, pages: Sequence[Sequence[int]]) -> None:
        """Pages that `allocate` gave, and that are found by nobody."""
        for group, of_group in enumerate(pages):
            self.pool.release(group, of_group)

    def evict_blocks(self, count: int) -> None:
        """Forget up to so many blocks that nobody uses."""
        evicted = self.tree.evict(count)
        for group, pages in zip(self._growing, evicted.pages, strict=True):
            self.pool.release(group, pages)
        self.checkpoints.forget(evicted.checkpoints)
        self.evicted_token_count += evicted.block_count * self.block_tokens

    def forget_equal(
        self, digests: bytes, block_count: int | None, checkpoints: Sequence[Checkpoint]
    ) -> None:
        """What was copied here of a prompt turned out wrong in another cache: its blocks behind so
        many, and some of its checkpoints, are not to be found here either."""
        seed, keys = self.keys_of(digests)
        node, count = self.tree.find(seed, keys, len(keys) // DIGEST_NBYTES)
        if node is None:
            return
        for one in checkpoints:
            if one.block_count <= count:
                self.checkpoints.withdraw(equals_of(node, one))
        if block_count is not None and block_count < count:
            self.tree.cut_off(node, block_count)

    def flush(self) -> bool:
        """Forget all that nobody uses; whether nothing is left."""
        self.checkpoints.forget_idle()
        self.evict_blocks(self.tree.idle_block_count)
        return self.tree.block_count == 0 and self.checkpoints.count == 0

    # ---- told ------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Another number after every change."""
        return self.tree.version + self.checkpoints.version

    def marks(self) -> bytes:
        """From where prompts can be continued here: the first bytes of the keys, of so many at
        most. Of long runs of blocks, some."""
        found: list[bytes] = []
        for node in self.tree.nodes():
            if len(found) >= MARK_COUNT_MAX:
                break
            found += self._marks_of(node)
        return b"".join(found[:MARK_COUNT_MAX])

    def _marks_of(self, node: Node) -> list[bytes]:
        if self.needs_checkpoint:
            ends = {one.block_count for one in node.checkpoints if one.block_count > node.start}
        else:
            stride = max(1, MARK_TOKENS // self.block_tokens)
            first = (node.start // stride + 1) * stride
            ends = {*range(first, node.end + 1, stride), node.end} if node.block_count else set()
        starts = [(end - node.start - 1) * DIGEST_NBYTES for end in sorted(ends)]
        return [node.keys[start : start + MARK_NBYTES] for start in starts]
