"""The pages of a server: given to sequences, taken back, kept in the prefix cache, evicted from it.

Knows nothing of HTTP, peers or steps.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from functools import lru_cache
from math import ceil
from typing import Protocol

from common.layout.cache_layout import PageGroup, ServerLayout
from common.layout.component import LiveKind
from common.prefix_digests import DIGEST_TOKENS
from common.protocol.frontend import PageGroupState, PrefixCacheState
from common.request import SamplingParams
from common.scheduling.cached_sequences import CachedSequences, HeldPrefix
from common.scheduling.facts import SchedulerLimits, ServerFacts
from common.scheduling.page_pool import PagePool
from common.scheduling.prefix_cache import NOTHING, Match, PrefixCache
from common.scheduling.sequence import PageSpan, Sequence

# Tokens of a pool without a group that grows with them; the context length is what limits then.
CAPACITY_UNLIMITED = 2**31 - 1

# Lengths of prompts whose needs are remembered.
PROMPT_LENGTH_COUNT_MAX = 4096


class Saver(Protocol):
    """Saves what is in pages before others get them."""

    @property
    def is_moving(self) -> bool:
        """Whether any pages are being saved, or come back."""

    def saves_for(self, needs: List[int]) -> bool:
        """Whether so many pages per group will be free once something is saved that is under way.
        Those that hold what is saved are free at once."""


class PageAccount:
    """Owner of the pool and of the prefix cache, and of what pages a sequence has.

    chunk_token_max: prompt tokens that are computed in one step; a window group keeps that many
    beside the window. None for whole prompts.
    digest_tokens, digest_lookahead: of a digest (see prefix_digests.py). checkpoint_max: of the
    prefix cache.
    shares_samples: samples of a prompt share its blocks. Where no prefix is kept, a block goes with
    the last of them.
    host_page_counts: of the tier in host memory, whose prefix cache is `host`; () without one.
    saver: who saves what is evicted; None if nobody does.
    """

    def __init__(
        self,
        groups: List[PageGroup],
        page_counts: List[int],
        *,
        has_prefix_cache: bool,
        chunk_token_max: int | None = None,
        checkpoint_max: int = 0,
        digest_tokens: int = DIGEST_TOKENS,
        shares_samples: bool = False,
        host_page_counts: List[int] = (),
        digest_lookahead: int = 0,
    ) -> None:
        self.groups = tuple(groups)
        self.pool = PagePool(page_counts)
        self._chunk_token_max = chunk_token_max
        # Who waits is looked at again with every event.
        self.needs_of_prompt = lru_cache(PROMPT_LENGTH_COUNT_MAX)(self._needs_of_prompt)
        self._windows = [
            index for index, group in enumerate(groups) if group.live.kind is LiveKind.WINDOW
        ]

        def new_cache(pool: PagePool, count_max: int) -> PrefixCache:
            return PrefixCache(pool, self.groups, digest_tokens, count_max, digest_lookahead)

        self.keeps_prefixes = has_prefix_cache
        self.cache: PrefixCache | None = None
        if has_prefix_cache or shares_samples:
            self.cache = new_cache(self.pool, checkpoint_max if has_prefix_cache else 0)
        self.host: PrefixCache | None = None
        if host_page_counts and has_prefix_cache:
            # The tier in host memory has its share of checkpoints.
            share = sum(host_page_counts) / sum(page_counts)
            self.host = new_cache(PagePool(host_page_counts), ceil(checkpoint_max * share))
        self.saver: Saver | None = None
        self.cached = CachedSequences(
            self.cache, self.groups, digest_tokens, self.host, digest_lookahead
        )

    @property
    def host_pool(self) -> PagePool | None:
        """The pages of the tier in host memory."""
        return self.host.pool if self.host is not None else None

    @property
    def token_capacity(self) -> int:
        """Tokens that fit if one request had the whole pool. A group that holds a window limits
        nothing, and one that does not holds no more than its pages do."""
        capacities = [CAPACITY_UNLIMITED]
        for index, (group, count) in enumerate(
            zip(self.groups, self.pool.page_counts, strict=True)
        ):
            if group.live.is_streamable:
                capacities.append(count * group.page_items * max(1, group.live.size))
            elif index in self._windows and count < self.decode_page_max(index):
                capacities.append(count * group.page_items)
        return min(capacities)

    def decode_page_max(self, group: int) -> int:
        """Pages that a decoding sequence has in a window group at most, its next token included."""
        page_group = self.groups[group]
        return touched_page_max(page_group, page_group.live.size)

    def available_count(self, group: int) -> int:
        """Free pages and those that eviction would free."""
        evictable = self.cache.evictable_count(group) if self.cache is not None else 0
        return self.pool.free_count(group) + evictable

    @property
    def relief_count(self) -> int:
        """Grows with everything that could let a sequence fit that did not: a page that comes back,
        and one that is found in the prefix cache from now on."""
        cached = self.cache.relief_count if self.cache is not None else 0
        return self.pool.freed_count + cached

    # ---- pages of sequences ----------------------------------------------------------------------

    def needs(self, spans: List[PageSpan], token_count: int) -> list[int]:
        """New pages per group for a sequence with these spans to hold `token_count` tokens."""
        return [
            max(0, group.page_end(token_count) - span.end_index)
            for group, span in zip(self.groups, spans, strict=True)
        ]

    def can_allocate(self, needs: List[int]) -> bool:
        return all(need <= self.available_count(group) for group, need in enumerate(needs))

    def allocate(self, needs: List[int]) -> list[list[int]]:
        """Pages per group, evicting cached prefixes if needed, after `can_allocate` said yes."""
        if self.cache is not None and any(self.pool.shortfall(needs)):
            self.cache.evict(needs)
        return [self.pool.allocate(group, need) for group, need in enumerate(needs)]

    @property
    def is_moving(self) -> bool:
        """Whether pages are on their way to the tier in host memory, or from there."""
        return self.saver is not None and self.saver.is_moving

    def saves_for(self, needs: List[int]) -> bool:
        """Whether so many pages will be free once what is in them is saved; see `Saver`."""
        return self.saver is not None and any(needs) and self.saver.saves_for(needs)

    def grow(self, sequence: Sequence, token_count: int) -> bool:
        """Add the pages that `token_count` tokens need; False, and nothing changed, if there are
        not enough."""
        needs = self.needs(sequence.spans, token_count)
        if not any(needs):
            return True
        if not self.can_allocate(needs):
            return False
        for span, pages in zip(sequence.spans, self.allocate(needs), strict=True):
            span.page_ids.extend(pages)
        return True

    def grow_all(self, sequences: List[Sequence]) -> bool:
        """Add the pages of all tokens to come, to every sequence or to none; False if there are not
        enough, or if a window would hold more of them than one step alone needs.

        A cached prefix may go for them. That is no loss: one token later it would have to. What is
        being saved is waited for.
        """
        growing = [(s, n) for s in sequences if any(n := self.needs(s.spans, s.token_count))]
        total = [sum(column) for column in zip(*(needs for _, needs in growing), strict=True)]
        if not self.can_allocate(total) or self.saves_for(total):
            return False
        for index in self._windows:
            page_max = self.decode_page_max(index)
            for sequence, needs in growing:
                if needs[index] and len(sequence.spans[index].page_ids) + needs[index] > page_max:
                    return False
        for sequence, _ in growing:
            self.grow(sequence, sequence.token_count)
        return True

    def spans_for_prompt(self, token_count: int) -> list[PageSpan]:
        """Empty spans that start at the first live page of each group."""
        return [PageSpan(group.page_first(token_count), []) for group in self.groups]

    def _needs_of_prompt(self, token_count: int) -> list[int]:
        """Pages per group for what is live of a prompt, and for its first token."""
        return self.needs(self.spans_for_prompt(token_count), token_count + 1)

    def needs_to_compute(self, token_count: int, start: int = 0) -> list[int]:
        """Pages per group to compute a prompt from a token on; those of blocks before it, which the
        prefix cache has, are not among them.

        Of a window group, those of the window and one chunk: they move along as chunks are done,
        so that two long prompts can't each wait for pages that the other one has. A pool that is
        smaller makes the chunks smaller.
        """
        needs = [group.page_end(token_count) for group in self.groups]
        if self.cache is not None and start:
            blocks = self.cache.blocks_in(start)
            needs = [n - blocks * c for n, c in zip(needs, self.cache.page_counts, strict=True)]
        for index in self._windows:
            group = self.groups[index]
            needs[index] -= group.page_first(start)
            if self._chunk_token_max is not None:
                items = group.live.size - 1 + self._chunk_token_max
                needs[index] = min(needs[index], touched_page_max(group, items))
            needs[index] = min(needs[index], self.pool.page_counts[index])
        return needs

    def recycle(self, sequence: Sequence) -> None:
        """Window pages that no later token reads go to where the next tokens do, or back to the
        pool. A step in flight reads no others either: it computes tokens behind those that steps
        which have returned did. Nor does a transfer: only the window of the whole prompt leaves,
        after the last chunk. Only a checkpoint that a step in flight copies may begin a token
        earlier."""
        if not self._windows:
            return
        count = min((sequence.computed_count, *(made - 1 for made in sequence.making)))
        for index in self._windows:
            group, span = self.groups[index], sequence.spans[index]
            dropped = span.drop_before(group.page_first(count))
            if dropped:
                wanted = max(0, group.page_end(sequence.token_count) - span.end_index)
                span.page_ids += dropped[:wanted]
                self.pool.release(index, dropped[wanted:])

    def chunk_stop_max(self, sequence: Sequence) -> int:
        """Tokens of a prompt, from its first, that have a page in every group."""
        stops = [
            sequence.spans[index].end_index * self.groups[index].page_items
            for index in self._windows
        ]
        return min([len(sequence.token_ids), *stops])

    # ---- what a request finds --------------------------------------------------------------------

    def match(self, digests: bytes, token_ids: List[int], token_max: int) -> Match:
        """What is there of the first `token_max` tokens of a prompt.

        A checkpoint and the pages that it is copied to may be more than the pool has. Who waited
        for them would wait for ever, so then the checkpoint is none to go on from.
        """
        if self.cache is None:
            return NOTHING
        match = self.cache.match(digests, token_ids, token_max)
        if match.checkpoint is not None and not self._has_ever(match, len(token_ids) + 1):
            return self.cache.without_checkpoint(match)
        return match

    def _has_ever(self, match: Match, token_count: int) -> bool:
        """Whether the pool has the pages of a prompt and of the checkpoint that it goes on from."""
        assert self.cache is not None and match.checkpoint is not None
        blocks = self.cache.kept_blocks(match)
        needs = self.needs_to_compute(token_count, match.token_count)
        return all(
            need + len(pages) + blocks * count <= total
            for need, pages, count, total in zip(
                needs,
                match.checkpoint.pages,
                self.cache.page_counts,
                self.pool.page_counts,
                strict=True,
            )
        )

    def needs_behind(self, match: Match, token_count: int) -> list[int]:
        """Pages per group to compute a prompt behind what was found, and those that could not be
        evicted any more."""
        needs = self.needs_to_compute(token_count, match.token_count)
        return self._with_idle(needs, match)

    def needs_to_receive(self, match: Match, token_count: int) -> list[int]:
        """As `needs_behind`, of a cache whose blocks are here and whose rest is sent."""
        needs = self.needs_of_rest(match, token_count, is_received=True)
        if self.cache is None or not match.block_count:
            return needs
        token_count = match.block_count * self.cache.block_tokens
        return self._with_idle(needs, Match(match.node, match.block_count, token_count))

    def needs_of_rest(self, match: Match, token_count: int, *, is_received: bool) -> list[int]:
        """New pages per group for what was not found, which is sent or computed."""
        if not is_received:
            return self.needs_to_compute(token_count, match.token_count)
        needs = self.needs_of_prompt(token_count)
        counts = self.cache.page_counts if self.cache is not None else [0] * len(needs)
        return [n - match.block_count * c for n, c in zip(needs, counts, strict=True)]

    def _with_idle(self, needs: list[int], match: Match) -> list[int]:
        if self.cache is None or match.node is None:
            return needs
        idle = self.cache.idle_pages(match, self.cache.kept_blocks(match))
        return [need + pages for need, pages in zip(needs, idle, strict=True)]

    # ---- sequences begin -------------------------------------------------------------------------

    def open(
        self,
        request_id: int,
        token_ids: list[int],
        prompt_count: int,
        sampling: SamplingParams,
        digests: bytes = b"",
        match: Match = NOTHING,
    ) -> Sequence | None:
        """A sequence to be computed here, with the pages that takes; None if they are not there
        now.

        match: what was found just now of all tokens but the last, to go on from.
        """
        if not self.can_allocate(self.needs_behind(match, len(token_ids))):
            return None
        start = match.token_count
        spans = [PageSpan(0, []) for _ in self.groups]
        for index in self._windows:
            spans[index].first_index = self.groups[index].page_first(start)
        sequence = Sequence(request_id, token_ids, prompt_count, sampling, spans, digests)
        sequence.computed_count = sequence.cached_count = start
        self.cached.begin(sequence, match)
        needs = self.needs_to_compute(len(token_ids), start)
        for span, pages in zip(spans, self.allocate(needs), strict=True):
            span.page_ids.extend(pages)
        self.cached.copy_checkpoint(sequence)
        return sequence

    def adopt(
        self,
        request_id: int,
        token_ids: list[int],
        prompt_count: int,
        sampling: SamplingParams,
        spans: list[PageSpan],
        computed_count: int,
        digests: bytes = b"",
        held: HeldPrefix | None = None,
    ) -> Sequence:
        """A sequence whose cache has come, behind the blocks that were held for it. Others find it
        from now on."""
        sequence = Sequence(request_id, token_ids, prompt_count, sampling, spans, digests)
        sequence.computed_count = computed_count
        self.cached.adopt(sequence, held)
        return sequence

    # ---- sequences end ---------------------------------------------------------------------------

    def owned_pages(self, sequence: Sequence) -> list[list[int]]:
        """Per group, the pages that are a sequence's alone, and not the prefix cache's."""
        if self.cache is None:
            return [span.page_ids for span in sequence.spans]
        counts = self.cache.page_counts
        return [
            [*copies, *span.page_ids[sequence.block_count * each :]]
            for span, copies, each in zip(sequence.spans, sequence.copies, counts, strict=True)
        ]

    def close(self, sequence: Sequence) -> None:
        """Take the pages of a sequence back; what is computed of it may be found. Nothing may be
        writing or reading them."""
        self.cached.leave(sequence)
        for group, pages in enumerate(self.owned_pages(sequence)):
            self.pool.release(group, pages)
            sequence.spans[group].page_ids = []
        sequence.copies = [[] for _ in self.groups]
        self.cached.end(sequence)
        if not self.keeps_prefixes:
            self.flush_cache()

    def flush_cache(self) -> bool:
        """Forget cached prefixes; True if nothing is left of them."""
        is_saved_gone = self.host is None or self.host.flush()
        return (self.cache is None or self.cache.flush()) and is_saved_gone

    def prefix_state(self, told_count: int = 0) -> PrefixCacheState:
        """What /server_info tells of the prefix cache. told_count: beginnings that peers know."""
        cache = self.cache
        if cache is None or not self.keeps_prefixes:
            return PrefixCacheState(reason="switched off by --disable-radix-cache")
        return PrefixCacheState(
            token_count=cache.token_count,
            block_tokens=cache.block_tokens,
            node_count=cache.tree.node_count,
            checkpoint_count=cache.checkpoints.count,
            checkpoint_max=cache.checkpoints.count_max,
            digest_count=told_count,
            host_token_count=self.host.token_count if self.host is not None else 0,
            host_token_max=self.host.token_max if self.host is not None else 0,
        )

    def prefix_counters(self) -> dict[str, float]:
        """What came of the prefix cache since the start."""
        if self.cache is None:
            return {}
        checkpoints = self.cache.checkpoints
        return {
            "prefix_evicted_tokens": float(self.cache.evicted_token_count),
            "checkpoints_made": float(checkpoints.made_count),
            "checkpoints_used": float(checkpoints.used_count),
            "checkpoints_evicted": float(checkpoints.evicted_count),
        }

    def states(self, layout: ServerLayout) -> list[PageGroupState]:
        """What /metrics and /server_info tell of the pages; sizes are those of all ranks."""
        states: list[PageGroupState] = []
        for index, group in enumerate(self.groups):
            cached = self.cache.evictable_count(index) if self.cache is not None else 0
            states.append(
                PageGroupState(
                    name=group.name,
                    is_window=index in self._windows,
                    page_items=group.page_items,
                    page_tokens=group.page_tokens,
                    page_nbytes=layout.page_nbytes(index),
                    total=self.pool.page_counts[index],
                    free=self.pool.free_count(index) + cached,
                    used=self.pool.used_count(index) - cached,
                    cached=cached,
                    quarantined=self.pool.quarantined_count(index),
                )
            )
        return states


def account_of(
    facts: ServerFacts, limits: SchedulerLimits, *, shares_samples: bool = False
) -> PageAccount:
    """The pages of a server that starts."""
    return PageAccount(
        facts.layout.groups,
        facts.page_counts,
        has_prefix_cache=limits.has_prefix_cache,
        chunk_token_max=limits.chunk_token_max,
        checkpoint_max=facts.checkpoint_max,
        digest_tokens=facts.digest_tokens,
        shares_samples=shares_samples,
        host_page_counts=facts.host_page_counts,
        digest_lookahead=facts.digest_lookahead,
    )


def touched_page_max(group: PageGroup, item_count: int) -> int:
    """Pages that `item_count` consecutive items touch at most, wherever they start."""
    return (item_count + group.page_items - 2) // group.page_items + 1
