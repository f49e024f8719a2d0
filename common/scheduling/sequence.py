"""One request as the workers see it: its tokens and the pages that hold their cache.

Knows nothing of HTTP or peers. Tokens and pages of a sequence, page size 4:

    tokens     a b c d | e f g h | i j            10 known
    computed   ------------------------           9: cache of tokens 0..8 is in pages
    pending                            ?          1: drawn by a step in flight, after token 9
    pages      [ 7 ]     [ 3 ]     [ 12 ]         logical page indices 0, 1, 2

Pages of a window group go once no later token can see into them, mostly by taking the next logical
index of their own sequence: with a window of 4, page 7 holds tokens 12..15 once token 9 is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

from common.layout.cache_layout import PageGroup, ServerLayout
from common.layout.component import FULL, LiveKind
from common.protocol.frontend import PageGroupState
from common.protocol.worker import PageGrant
from common.request import SamplingParams
from common.scheduling.page_pool import PagePool
from common.scheduling.prefix_cache import CacheNode, PrefixCache

# Tokens of a pool without a group that grows with them; the context length is what limits then.
CAPACITY_UNLIMITED = 2**31 - 1

# Lengths of prompts whose needs are remembered.
PROMPT_LENGTH_COUNT_MAX = 4096


@dataclass(slots=True)
class PageSpan:
    """Pages of one group at logical indices first_index, first_index + 1, ...

    granted_count: how many of them the workers have been told of.
    """

    first_index: int
    page_ids: list[int]
    granted_count: int = 0

    @property
    def end_index(self) -> int:
        return self.first_index + len(self.page_ids)

    def drop_before(self, index: int) -> list[int]:
        """Let go of the pages before a logical index; returns their ids."""
        count = max(0, min(index - self.first_index, len(self.page_ids)))
        dropped = self.page_ids[:count]
        del self.page_ids[:count]
        self.first_index += count
        self.granted_count = max(0, self.granted_count - count)
        return dropped


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, sampling and pages of one request on this server.

    computed_count: tokens whose cache is in the pages; cached_count of them came from the prefix
    cache. nodes: of the prefix cache, for the pages at the head of group 0. Those pages belong to
    it, copies aside: pages of blocks that another sequence was first with.
    planned_count: tokens of the prompt up to the end of the last chunk that was sent.
    pending_count: tokens that steps in flight draw, not known yet.
    wanted_count: tokens of the prompt that another one waits for; 0 if none does.
    """

    request_id: int
    token_ids: list[int]
    prompt_count: int
    sampling: SamplingParams
    spans: list[PageSpan]
    computed_count: int = 0
    cached_count: int = 0
    planned_count: int = 0
    pending_count: int = 0
    wanted_count: int = 0
    nodes: list[CacheNode] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    is_known: bool = False

    @property
    def output_count(self) -> int:
        return len(self.token_ids) - self.prompt_count

    @property
    def token_count(self) -> int:
        """Tokens that there are once every step in flight has returned."""
        return len(self.token_ids) + self.pending_count

    @property
    def chunk_start(self) -> int:
        """The first token of the prompt's next chunk."""
        return max(self.computed_count, self.planned_count)

    @property
    def left_count(self) -> int:
        """Tokens of the prompt that are in no chunk yet, or as far as another one waits for it."""
        start = self.chunk_start
        return (self.wanted_count if self.wanted_count > start else len(self.token_ids)) - start

    def take_grants(self) -> list[PageGrant]:
        """What the workers have not been told of the pages yet."""
        grants: list[PageGrant] = []
        for group, span in enumerate(self.spans):
            if span.granted_count < len(span.page_ids):
                grants.append(
                    PageGrant(
                        self.request_id,
                        group,
                        span.first_index + span.granted_count,
                        span.page_ids[span.granted_count :],
                    )
                )
                span.granted_count = len(span.page_ids)
        return grants

    def owned_pages(self) -> list[list[int]]:
        """Per group, the pages that are this sequence's alone, and not the prefix cache's."""
        owned = [span.page_ids for span in self.spans]
        return [[*self.copies, *owned[0][len(self.nodes) :]], *owned[1:]]

    def page_lists(self) -> list[tuple[int, list[int]]]:
        """Per group (first logical index, page ids), as Send and TransferRequest carry them."""
        return [(span.first_index, list(span.page_ids)) for span in self.spans]


def _pairs(sequence: Sequence, first: int) -> Iterator[tuple[int, CacheNode]]:
    """Pages of group 0 with their nodes in the prefix cache, from a logical index on."""
    return zip(
        islice(sequence.spans[0].page_ids, first, None), sequence.nodes[first:], strict=False
    )


def reusable_count(token_ids: List[int], sampling: SamplingParams) -> int:
    """Tokens that a cached prefix may have at most. The last one is computed in any case."""
    count = len(token_ids) - 1
    if sampling.logprob_start_len >= 0:
        # The row before the first wanted token predicts it, so it has to be computed.
        count = min(count, max(0, sampling.logprob_start_len - 1))
    return count


def touched_page_max(group: PageGroup, item_count: int) -> int:
    """Pages that `item_count` consecutive items touch at most, wherever they start."""
    return (item_count + group.page_items - 2) // group.page_items + 1


class PageAccount:
    """Gives pages to sequences and takes them back; evicts cached prefixes when it must.

    chunk_token_max: prompt tokens that are computed in one step; a window group keeps that many
    beside the window. None for whole prompts.
    """

    def __init__(
        self,
        groups: List[PageGroup],
        page_counts: List[int],
        *,
        has_prefix_cache: bool,
        chunk_token_max: int | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.pool = PagePool(page_counts)
        self._chunk_token_max = chunk_token_max
        # Who waits is looked at again with every event.
        self.needs_of_prompt = lru_cache(PROMPT_LENGTH_COUNT_MAX)(self._needs_of_prompt)
        self._windows = [
            index for index, group in enumerate(groups) if group.live.kind is LiveKind.WINDOW
        ]
        self.cache: PrefixCache | None = None
        # A prefix is the cache of its tokens and nothing else: a slot is never that of a prefix.
        if has_prefix_cache and len(groups) == 1 and groups[0].live == FULL:
            self.cache = PrefixCache(self.pool, 0, groups[0].page_items)

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
        evictable = self.cache.evictable_count if self.cache is not None and group == 0 else 0
        return self.pool.free_count(group) + evictable

    @property
    def relief_count(self) -> int:
        """Grows with everything that could let a sequence fit that did not: a page that comes back,
        and one that is found in the prefix cache from now on."""
        cached = self.cache.relief_count if self.cache is not None else 0
        return self.pool.freed_count + cached

    def end_index(self, group: int, token_count: int) -> int:
        """Logical index behind the last page of a group that `token_count` tokens need."""
        return self.groups[group].page_end(token_count)

    def needs(self, spans: List[PageSpan], token_count: int) -> list[int]:
        """New pages per group for a sequence with these spans to hold `token_count` tokens."""
        return [
            max(0, group.page_end(token_count) - span.end_index)
            for group, span in zip(self.groups, spans, strict=True)
        ]

    def can_allocate(self, needs: List[int], headroom: int = 0) -> bool:
        return all(
            need + headroom <= self.available_count(group) for group, need in enumerate(needs)
        )

    def allocate(self, needs: List[int]) -> list[list[int]]:
        """Pages per group, evicting cached prefixes if needed, after `can_allocate` said yes."""
        missing = self.pool.shortfall(needs)
        if self.cache is not None and missing[0]:
            self.cache.evict(missing[0])
        return [self.pool.allocate(group, need) for group, need in enumerate(needs)]

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

        A cached prefix may go for them. That is no loss: one token later it would have to.
        """
        growing = [(s, n) for s in sequences if any(n := self.needs(s.spans, s.token_count))]
        total = [sum(column) for column in zip(*(needs for _, needs in growing), strict=True)]
        if not self.can_allocate(total):
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

    def needs_to_compute(self, token_count: int) -> list[int]:
        """Pages per group to compute a prompt from its first token on.

        Of a window group, those of the window and one chunk: they move along as chunks are done,
        so that two long prompts can't each wait for pages that the other one has. A pool that is
        smaller makes the chunks smaller.
        """
        needs = [group.page_end(token_count) for group in self.groups]
        if self._chunk_token_max is not None:
            for index in self._windows:
                group = self.groups[index]
                items = group.live.size - 1 + self._chunk_token_max
                needs[index] = min(needs[index], touched_page_max(group, items))
        for index in self._windows:
            needs[index] = min(needs[index], self.pool.page_counts[index])
        return needs

    def recycle(self, sequence: Sequence) -> None:
        """Window pages that no later token reads go to where the next tokens do, or back to the
        pool. A step in flight reads no others either: it computes tokens behind those that steps
        which have returned did. Nor does a transfer: only the window of the whole prompt leaves,
        after the last chunk."""
        for index in self._windows:
            group, span = self.groups[index], sequence.spans[index]
            dropped = span.drop_before(group.page_first(sequence.computed_count))
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

    def match(self, token_ids: list[int], sampling: SamplingParams) -> list[CacheNode]:
        """The cached prefix that a sequence of these tokens could reuse."""
        if self.cache is None:
            return []
        return self.cache.match(token_ids, reusable_count(token_ids, sampling))

    def open(
        self,
        request_id: int,
        token_ids: list[int],
        prompt_count: int,
        sampling: SamplingParams,
        nodes: list[CacheNode] | None = None,
    ) -> Sequence | None:
        """A sequence to be computed here, with the pages that takes; None if they are not there
        now. A cached prefix is reused, but at least one token is left to compute.

        nodes: what `match` has found just now, if it was asked.
        """
        if nodes is None:
            nodes = self.match(token_ids, sampling)
        needs = self.needs_to_compute(len(token_ids))
        needs[0] -= len(nodes)
        # Pages of the prefix without a reader could be evicted otherwise.
        unread_count = sum(node.lock_count == 0 for node in nodes)
        if not self.can_allocate([needs[0] + unread_count, *needs[1:]]):
            return None
        if self.cache is not None:
            self.cache.lock(nodes)
        spans = [PageSpan(0, []) for _ in self.groups]
        spans[0].page_ids = [node.page for node in nodes]
        sequence = Sequence(request_id, token_ids, prompt_count, sampling, spans, nodes=nodes)
        sequence.cached_count = len(nodes) * self.groups[0].page_items
        sequence.computed_count = sequence.cached_count
        for span, pages in zip(spans, self.allocate(needs), strict=True):
            span.page_ids.extend(pages)
        return sequence

    def remember(self, sequence: Sequence) -> None:
        """Offer the full computed pages of a sequence to the prefix cache."""
        if self.cache is None or sequence.spans[0].first_index != 0:
            return
        pages, known_count = sequence.spans[0].page_ids, len(sequence.nodes)
        sequence.nodes += self.cache.insert(
            sequence.token_ids, sequence.computed_count, pages, sequence.nodes
        )
        sequence.copies += [
            page for page, node in _pairs(sequence, known_count) if node.page != page
        ]

    def withdraw(self, sequence: Sequence) -> None:
        """Its computation came out wrong: what it added to the prefix cache is not to be found.
        What others had put there stays."""
        if self.cache is not None:
            found_count = sequence.cached_count // self.groups[0].page_items
            added = (node for page, node in _pairs(sequence, found_count) if node.page == page)
            for node in islice(added, 1):  # those behind it go with it
                self.cache.cut(node)

    def close(self, sequence: Sequence) -> None:
        """Take all pages of a sequence back. Nothing may be writing or reading them."""
        for group, pages in enumerate(sequence.owned_pages()):
            self.pool.release(group, pages)
            sequence.spans[group].page_ids = []
        if self.cache is not None:
            self.cache.unlock(sequence.nodes)
        sequence.nodes, sequence.copies = [], []

    def flush_cache(self) -> bool:
        """Forget cached prefixes; True if nothing is left of them."""
        if self.cache is None:
            return True
        while self.cache.evict(self.cache.evictable_count):
            pass
        return self.cache.node_count == 0

    def states(self, layout: ServerLayout) -> list[PageGroupState]:
        """What /metrics and /server_info tell of the pages; sizes are those of all ranks."""
        states: list[PageGroupState] = []
        for index, group in enumerate(self.groups):
            cached = self.cache.evictable_count if self.cache is not None and index == 0 else 0
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
