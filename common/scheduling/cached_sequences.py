"""What sequences find in the prefix cache, and what they leave there.

Knows nothing of steps: it says which pages the next one has to copy. Without a cache nothing is
found and nothing kept.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

from common.layout.cache_layout import PageGroup
from common.prefix_digests import DIGEST_NBYTES, digests_nbytes, extend_digests
from common.protocol.worker import PageCopies
from common.scheduling.prefix import Prefix
from common.scheduling.prefix_cache import Match, PrefixCache
from common.scheduling.prefix_tree import Checkpoint, Node
from common.scheduling.sequence import Sequence

# A long prompt gets a checkpoint every quarter, but no more often than this.
CHECKPOINT_TOKENS_MIN = 8192


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """Blocks of the cache that a request keeps while the rest of its cache is on its way.

    prefix: their tokens and pages.
    """

    node: Node
    block_count: int
    prefix: Prefix

    @property
    def token_count(self) -> int:
        return self.prefix.token_count


@dataclass(frozen=True, slots=True)
class LentCache:
    """A cache that is sent from the prefix cache, and kept while it is.

    pages: per group (first logical index, page ids), as Send carries them.
    """

    node: Node
    checkpoint: Checkpoint | None
    pages: list[tuple[int, list[int]]]


class CachedSequences:
    """Owner of what a sequence has of the cache: its node, blocks, copies, checkpoint and cuts.

    cache: None if there is none. host: of the tier in host memory. lookahead: of digests, see
    prefix_digests.py.
    """

    def __init__(
        self,
        cache: PrefixCache | None,
        groups: List[PageGroup],
        digest_tokens: int,
        host: PrefixCache | None = None,
        lookahead: int = 0,
    ) -> None:
        self.cache = cache
        self._host = host
        self._groups = tuple(groups)
        self._digest_tokens = digest_tokens
        self._lookahead = lookahead

    def whole_blocks(self, token_count: int) -> int:
        """Tokens of the whole blocks among so many; 0 without a cache."""
        if self.cache is None:
            return 0
        return self.cache.blocks_in(token_count) * self.cache.block_tokens

    def hold(self, match: Match) -> HeldPrefix | None:
        """Keep the blocks that were found for a cache whose rest is on its way."""
        if self.cache is None or match.node is None or not match.block_count:
            return None
        if not any(self.cache.page_counts):
            return None  # nothing grows: all of the cache always comes anew
        node = self.cache.lock(match.node, match.block_count)
        token_count = match.block_count * self.cache.block_tokens
        pages = self.cache.pages(node, match.block_count)
        return HeldPrefix(node, match.block_count, Prefix(token_count, pages))

    def digests_of(self, digests: bytes, token_ids: List[int]) -> bytes:
        """Of more tokens than they were made of: those that were generated since."""
        if self.cache is None or not digests:
            return b""
        return extend_digests(digests, token_ids, self._digest_tokens, self._lookahead)

    def let_go(self, held: HeldPrefix) -> None:
        """The rest did not come."""
        assert self.cache is not None
        self.cache.unlock(held.node)

    def digest_nbytes(self, token_count: int) -> int:
        """Of the seed and the digests of so many tokens."""
        return digests_nbytes(token_count, self._digest_tokens, self._lookahead)

    def digests_up_to(self, digests: bytes, token_count: int) -> bytes:
        """Those of the first tokens."""
        return digests[: self.digest_nbytes(token_count)]

    def lend(self, match: Match) -> LentCache | None:
        """Keep a cache that was found, to send it: all of its `token_count` tokens, with what their
        last one leaves. None if something of that is not there."""
        cache, checkpoint = self.cache, match.checkpoint
        if cache is None or match.node is None or not match.token_count:
            return None
        blocks = cache.blocks_in(match.token_count)
        if checkpoint is not None and checkpoint.block_count != blocks:
            return None
        node = cache.lock(match.node, blocks)
        pages = [(0, found) for found in cache.pages(node, blocks)]
        if checkpoint is not None:
            cache.checkpoints.use(checkpoint)
            indices = self._checkpoint_indices(checkpoint.token_count, checkpoint.least_count)
            for group, (one, own) in enumerate(zip(indices, checkpoint.pages, strict=True)):
                first, found = pages[group]
                pages[group] = (first, found + own) if found else (one.start, list(own))
        return LentCache(node, checkpoint, pages)

    def take_back(self, lent: LentCache) -> None:
        """It is sent, or not wanted any more."""
        assert self.cache is not None
        self.cache.unlock(lent.node)
        if lent.checkpoint is not None:
            self.cache.let_go(lent.checkpoint)

    # ---- they begin ------------------------------------------------------------------------------

    def begin(self, sequence: Sequence, match: Match) -> None:
        """Keep what a sequence goes on from, and say where its chunks have to end."""
        cache = self.cache
        if cache is None or not sequence.digests:
            return
        start, token_count = match.token_count, len(sequence.token_ids)
        sequence.block_count = cache.blocks_in(start)
        node = match.node or cache.tree.root(sequence.digests[:DIGEST_NBYTES])
        if match.checkpoint is not None and match.checkpoint.block_count > sequence.block_count:
            sequence.copied_node = cache.lock(node, match.checkpoint.block_count)
            node = sequence.copied_node
        sequence.node = cache.lock(node, sequence.block_count)
        pages = cache.pages(sequence.node, sequence.block_count)
        for span, of_blocks in zip(sequence.spans, pages, strict=True):
            span.page_ids += of_blocks
        if match.checkpoint is not None:
            cache.checkpoints.use(match.checkpoint)
            sequence.checkpoint = match.checkpoint
        if cache.needs_checkpoint:
            known = match.block_count * cache.block_tokens  # where it leaves what others computed
            every = max(CHECKPOINT_TOKENS_MIN, token_count // 4)
            every = -(-every // cache.block_tokens) * cache.block_tokens
            wanted = {known, token_count, *range(every, token_count, every)}
            if self._may_keep_inside(sequence):
                wanted.add(self._last_inside(sequence))
            sequence.cuts = sorted(cut for cut in wanted if start < cut <= token_count)

    def adopt(self, sequence: Sequence, held: HeldPrefix | None) -> None:
        """Its cache has come, behind the blocks that were held. Others find it from now on."""
        cache = self.cache
        if cache is None or not sequence.digests:
            return
        if held is not None:
            sequence.node, sequence.block_count = held.node, held.block_count
        else:
            sequence.node = cache.lock(cache.tree.root(sequence.digests[:DIGEST_NBYTES]), 0)
        sequence.received_count = sequence.computed_count
        if cache.needs_checkpoint:
            sequence.cuts = [sequence.computed_count]
        self.remember(sequence)

    # ---- checkpoints -----------------------------------------------------------------------------

    def next_stop(self, sequence: Sequence, start: int) -> int:
        """Where a chunk from a token on has to end at the latest, so that the next step can copy
        what is there by then."""
        stops = (cut for cut in sequence.cuts if cut > start and not self._is_inside(sequence, cut))
        return min(stops, default=len(sequence.token_ids))

    def can_keep_at(self, sequence: Sequence, token_count: int) -> bool:
        """Whether a checkpoint of so many tokens of a prompt is made, or can be yet."""
        is_ahead = sequence.chunk_start <= token_count < len(sequence.token_ids)
        return is_ahead or token_count in sequence.making

    def _may_keep_inside(self, sequence: Sequence) -> bool:
        """Whether chunks of a sequence can keep states inside a step; its workers tell of every
        chunk that reports log-probabilities, and of one in a step."""
        reports = sequence.sampling.logprob_start_len >= 0
        return self.cache is not None and self.cache.keeps_inside and not reports

    def _last_inside(self, sequence: Sequence) -> int:
        """Where an equal prompt can go on, which has its last token to compute."""
        return self.whole_blocks(len(sequence.token_ids) - 1)

    def _is_inside(self, sequence: Sequence, cut: int) -> bool:
        """Whether a step keeps a checkpoint at a cut while it computes on."""
        if self.cache is None or not self._may_keep_inside(sequence):
            return False
        return cut % self.cache.block_tokens == 0

    def _checkpoint_indices(self, token_count: int, least_count: int) -> list[range]:
        """Per group, the logical indices of the pages that a checkpoint has."""
        assert self.cache is not None
        blocks = self.cache.blocks_in(token_count)
        ranges: list[range] = []
        for group, each in zip(self._groups, self.cache.page_counts, strict=True):
            first = blocks * each if each else group.page_first(least_count)
            ranges.append(range(first, group.page_end(token_count)))
        return ranges

    def _new_checkpoint(self, sequence: Sequence, token_count: int) -> Checkpoint:
        """One without pages. It serves for a token less, if the rows for that are there.

        If a cache depends on the next token, and that is not known, it serves for that only.
        """
        assert self.cache is not None
        blocks = self.cache.blocks_in(token_count)
        known = sequence.token_ids[: token_count + self._lookahead]
        rest = tuple(known[blocks * self.cache.block_tokens :])
        has_rows = token_count > sequence.received_count or not self.cache.needs_checkpoint
        least = token_count - 1 if self.cache.can_step_back and has_rows else token_count
        first = [r.start for r in self._checkpoint_indices(token_count, least)]
        grown = [bool(count) for count in self.cache.page_counts]
        spans = zip(sequence.spans, first, grown, strict=True)
        if any(span.first_index > start for span, start, grows in spans if not grows):
            least = token_count
        return Checkpoint(token_count, least, blocks, rest, [[] for _ in self._groups])

    def copy_checkpoint(self, sequence: Sequence) -> None:
        """If a sequence goes on from one: its first step makes the pages its own."""
        checkpoint = sequence.checkpoint
        if checkpoint is None:
            return
        assert self.cache is not None
        indices = self._checkpoint_indices(checkpoint.token_count, checkpoint.least_count)
        blocks = range(sequence.block_count, checkpoint.block_count)  # one, or none
        of_blocks: list[list[int]] = [[] for _ in self._groups]
        if sequence.copied_node is not None:
            of_blocks = self.cache.pages(sequence.copied_node, checkpoint.block_count)
        for group, (span, each) in enumerate(
            zip(sequence.spans, self.cache.page_counts, strict=True)
        ):
            sources = of_blocks[group][blocks.start * each :] + checkpoint.pages[group]
            first = indices[group].start - len(blocks) * each
            start = max(first, span.first_index)
            if sources:
                own = span.between(range(start, indices[group].stop))
                sources = sources[start - first :]
                sequence.page_copies.append(PageCopies(group, sources, own))

    def note_copied(self, sequence: Sequence) -> None:
        """The first step of a sequence has returned."""
        if sequence.checkpoint is not None and self.cache is not None:
            self.cache.let_go(sequence.checkpoint)
            sequence.checkpoint = None
        if sequence.copied_node is not None and self.cache is not None:
            self.cache.unlock(sequence.copied_node)
            sequence.copied_node = None

    def begin_checkpoint(self, sequence: Sequence, token_count: int) -> Checkpoint | None:
        """If one is wanted of so many tokens, which the steps before the next compute: the next one
        copies it. None if there are no pages for it, or if it is there."""
        checkpoint = self._begin_checkpoint(sequence, token_count)
        if checkpoint is not None:
            indices = self._checkpoint_indices(token_count, checkpoint.least_count)
            for group, (one, pages) in enumerate(zip(indices, checkpoint.pages, strict=True)):
                if pages:
                    own = sequence.spans[group].between(one)
                    sequence.page_copies.append(PageCopies(group, own, pages))
        return checkpoint

    def begin_inside(self, sequence: Sequence, start: int, stop: int) -> list[Checkpoint]:
        """Those that the next step makes while it computes a chunk of a sequence: all they have is
        states, which it leaves in their pages."""
        inside = [cut for cut in sequence.cuts if start < cut < stop]
        cuts = sorted(cut for cut in inside if self._is_inside(sequence, cut))
        begun = [self._begin_checkpoint(sequence, cut) for cut in cuts]
        found = [checkpoint for checkpoint in begun if checkpoint is not None]
        for checkpoint in found:
            checkpoint.is_spare = checkpoint.token_count == self._last_inside(sequence)
        return found

    def _begin_checkpoint(self, sequence: Sequence, token_count: int) -> Checkpoint | None:
        """Take pages for one, if it is wanted."""
        if token_count not in sequence.cuts:
            return None
        sequence.cuts.remove(token_count)
        cache = self.cache
        if cache is None or not sequence.digests or sequence.node is None:
            return None
        checkpoint = self._new_checkpoint(sequence, token_count)
        indices = self._checkpoint_indices(token_count, checkpoint.least_count)
        if cache.checkpoints.renew(sequence.node, checkpoint) or not cache.checkpoints.begin():
            return None
        taken = cache.allocate([len(one) for one in indices])
        if taken is None:
            cache.checkpoints.give_up(checkpoint)
            return None
        checkpoint.pages = taken
        sequence.making.append(token_count)
        return checkpoint

    def end_checkpoint(self, sequence: Sequence, checkpoint: Checkpoint) -> None:
        """The step that made it has returned: it is found from now on, if its blocks are."""
        assert self.cache is not None
        sequence.making.remove(checkpoint.token_count)
        is_found = checkpoint.block_count <= sequence.block_count
        if sequence.node is not None and sequence.digests and is_found:
            self.cache.add(checkpoint, sequence.node)
            sequence.made.append(checkpoint)
        else:
            self.cache.checkpoints.give_up(checkpoint)

    def _leave_checkpoint(self, sequence: Sequence, cache: PrefixCache) -> None:
        """What a sequence that ends has beside its blocks becomes a checkpoint, without a copy."""
        count, node = sequence.computed_count, sequence.node
        if count > len(sequence.token_ids):
            return  # it left before its last token was known, which its slot and tails have
        checkpoint = self._new_checkpoint(sequence, count)
        is_whole = checkpoint.block_count == sequence.block_count and count > 0
        is_there = sequence.checkpoint is None and is_whole
        has_rest = count % cache.block_tokens > 0
        if node is None or not is_there or not (has_rest or cache.needs_checkpoint):
            return
        indices = self._checkpoint_indices(count, checkpoint.least_count)
        spans = sequence.spans
        for span, one in zip(spans, indices, strict=True):
            if one and not (span.first_index <= one.start and one.stop <= span.end_index):
                return
        if cache.checkpoints.renew(node, checkpoint) or not cache.checkpoints.begin():
            return
        for pages, span, one in zip(checkpoint.pages, spans, indices, strict=True):
            if one:
                pages += span.between(one)
                del span.page_ids[one.start - span.first_index : one.stop - span.first_index]
        cache.add(checkpoint, node)

    def remember(self, sequence: Sequence) -> None:
        """Whole blocks of a sequence that are computed are found from now on."""
        cache = self.cache
        if cache is None or not sequence.digests or sequence.node is None:
            return
        # A token that was drawn for who had left is computed, and not known.
        count = min(sequence.computed_count, len(sequence.token_ids) - self._lookahead)
        known, blocks = sequence.block_count, cache.blocks_in(count)
        if blocks <= known:
            return
        sequence.digests = self.digests_of(sequence.digests, sequence.token_ids)
        pages = [span.page_ids for span in sequence.spans]
        node, twice = cache.extend(sequence.node, sequence.digests, pages, blocks)
        sequence.node, sequence.block_count = node, blocks
        for span, copies, each in zip(
            sequence.spans, sequence.copies, cache.page_counts, strict=True
        ):
            for one in twice:
                copies += span.page_ids[one.start * each : one.stop * each]
        if sequence.added_from is None:
            twice_there = {block for one in twice for block in one}
            added = (block for block in range(known, blocks) if block not in twice_there)
            sequence.added_from = next(added, None)

    def withdraw(self, sequence: Sequence) -> None:
        """Its computation came out wrong: what it added to the prefix cache is not to be found, nor
        what others put behind that. What they had put there before stays."""
        if self.cache is not None and sequence.node is not None:
            if self._host is not None:
                self._host.forget_equal(sequence.digests, sequence.added_from, sequence.made)
            self.cache.checkpoints.withdraw(sequence.made)
            if sequence.added_from is not None:
                self.cache.tree.cut_off(sequence.node, sequence.added_from)
        sequence.digests, sequence.made = b"", []

    # ---- they end --------------------------------------------------------------------------------

    def leave(self, sequence: Sequence) -> None:
        """What is computed of a sequence that ends may be found."""
        if self.cache is not None and sequence.digests:
            self.remember(sequence)
            self._leave_checkpoint(sequence, self.cache)

    def leave_nothing(self, sequence: Sequence) -> None:
        """Of a sequence that ends, only the blocks that the cache has already hold anything."""
        sequence.digests = b""

    def end(self, sequence: Sequence) -> None:
        """Its pages are given back."""
        self.note_copied(sequence)
        if self.cache is not None and sequence.node is not None:
            self.cache.unlock(sequence.node)
        sequence.node, sequence.block_count, sequence.digests = None, 0, b""
        sequence.made = []
