"""Window groups: pages move along with the window, and never while somebody may still read them.

The oracle is a worker whose cache is token ids: every token of a step reads its whole window
through the page tables that the grants built, so that a page freed too early, granted to a wrong
place or shared by two sequences reads a token that is not there.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from common.layout.cache_layout import PageGroup, ServerLayout
from common.layout.component import FULL, CacheComponent, Live, LiveKind, Segment, Shard
from common.protocol.worker import Step, StepDone
from common.request import SamplingParams
from common.scheduling.batch_limits import BatchLimits
from common.scheduling.batcher import Batcher
from common.scheduling.in_flight import IN_FLIGHT_MAX
from common.scheduling.page_account import PageAccount, touched_page_max
from common.scheduling.sequence import PageSpan, Sequence


def layout_of(lives: tuple[Live, ...], page_size: int) -> ServerLayout:
    components = tuple(
        CacheComponent(f"c{index}", (0,), (Segment("head", 1, 8),), live, Shard.SPLIT, "float32")
        for index, live in enumerate(lives)
    )
    return ServerLayout(components, 1, ((0, 1),), page_size)


def window(size: int) -> Live:
    return Live(LiveKind.WINDOW, size)


@dataclass
class Reader:
    """The worker of the oracle: one dict of (page, row) -> (request, position) per group."""

    groups: tuple[PageGroup, ...]
    memory: list[dict[tuple[int, int], tuple[int, int]]] = field(default_factory=list)
    tables: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = [{} for _ in self.groups]

    def run(self, step: Step) -> StepDone:
        for request_id in step.retired:
            del self.lengths[request_id]
            for group in range(len(self.groups)):
                self.tables.pop((request_id, group), None)
        for new in step.new:
            self.lengths[new.request_id] = len(new.token_ids)
        for grant in step.grants:
            table = self.tables.setdefault((grant.request_id, grant.group), {})
            table.update(enumerate(grant.page_ids, grant.first_index))
        drawn: list[int] = []
        for chunk in step.chunks:
            self._compute(chunk.request_id, chunk.start, chunk.stop)
            if chunk.is_last:
                drawn.append(chunk.request_id)
        for request_id in step.decode:
            length = self.lengths[request_id]
            self._compute(request_id, length - 1, length)
            drawn.append(request_id)
        for request_id in drawn:
            self.lengths[request_id] += 1
        return StepDone(step.step_id, drawn, [1] * len(drawn))

    def _compute(self, request_id: int, start: int, stop: int) -> None:
        """As an engine does: write all new rows, then let every new token read what it may see."""
        for group, page_group in enumerate(self.groups):
            for position in range(start, stop):
                self.memory[group][self._place(request_id, group, position)] = (
                    request_id,
                    position,
                )
            width = page_group.live.size or stop
            for query in range(start, stop):
                for position in range(max(0, query - width + 1), query + 1):
                    found = self.memory[group][self._place(request_id, group, position)]
                    assert found == (request_id, position), (group, query, position, found)

    def _place(self, request_id: int, group: int, position: int) -> tuple[int, int]:
        items = self.groups[group].page_items
        return self.tables[request_id, group][position // items], position % items

    def receive(self, request_id: int, spans: list[PageSpan], token_count: int) -> None:
        """A transfer of exactly what is live after `token_count` tokens."""
        for group, (page_group, span) in enumerate(zip(self.groups, spans, strict=True)):
            for position in page_group.live.items(token_count):
                page = span.page_ids[position // page_group.page_items - span.first_index]
                row = position % page_group.page_items
                self.memory[group][page, row] = (request_id, position)


def sampling(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, seed=0)


def check_held(account: PageAccount, live: list[Sequence]) -> None:
    """No page has two owners, none is lost, and no window is held longer than it must be."""
    account.pool.check()
    for group, page_group in enumerate(account.groups):
        held = [page for sequence in live for page in sequence.spans[group].page_ids]
        assert len(set(held)) == len(held) == account.pool.used_count(group)
        if page_group.live.kind is LiveKind.WINDOW:
            for sequence in live:
                if sequence.output_count > 0:
                    assert len(sequence.spans[group].page_ids) <= account.decode_page_max(group)


@pytest.mark.parametrize("seed", range(40))
def test_every_token_reads_its_own_window_whatever_is_computed_beside_it(seed: int) -> None:
    rng = random.Random(seed)
    page_size = rng.choice((1, 2, 4, 8))
    widths = rng.sample((1, 2, 3, 5, 8, 9, 16, 21), rng.randint(1, 2))
    lives = [window(width) for width in widths]
    if rng.random() < 0.8:
        lives.insert(rng.randint(0, len(lives)), FULL)
    groups = layout_of(tuple(lives), page_size).groups
    counts = [
        rng.randint(60, 120) if group.live == FULL else touched_page_max(group, group.live.size) * 4
        for group in groups
    ]
    chunk_max = rng.randint(1, 40)
    account = PageAccount(groups, counts, has_prefix_cache=True, chunk_token_max=chunk_max)
    in_flight_max = 1 + seed % IN_FLIGHT_MAX
    token_max = min(60, account.token_capacity)
    limits = BatchLimits(chunk_max, 8, token_max, frozenset(), in_flight_max)
    batcher = Batcher(account, limits)
    reader = Reader(groups)
    live: dict[int, Sequence] = {}
    sent: deque[Step] = deque()
    left: list[Sequence] = []
    ended = 0
    for request_id in range(1, 400):
        if rng.random() < 0.7:
            length = rng.randint(1, limits.sequence_token_max - 1)
            params = sampling(rng.randint(1, 40))
            if rng.random() < 0.5:
                sequence = account.open(request_id, [1] * length, length, params)
            else:
                spans = account.spans_for_prompt(length)
                needs = account.needs(spans, length)
                sequence = None
                if account.can_allocate(needs):
                    for span, pages in zip(spans, account.allocate(needs), strict=True):
                        span.page_ids.extend(pages)
                    reader.receive(request_id, spans, length)
                    tokens = [1] * (length + 1)
                    sequence = Sequence(
                        request_id, tokens, length, params, spans, computed_count=length
                    )
            if sequence is not None:
                live[request_id] = sequence
                batcher.add(sequence)
        while (planned := batcher.plan_step()).step is not None or planned.retracted:
            for sequence in planned.retracted:
                del live[sequence.request_id]
            if planned.step is not None:
                sent.append(planned.step)
        check_held(account, [*live.values(), *left])
        if not sent:
            continue
        for token in batcher.apply_done(reader.run(sent.popleft())).tokens:
            if token.finish is not None or rng.random() < 0.02:
                left.append(live.pop(token.sequence.request_id))
                batcher.remove(left[-1])
                ended += 1
        left = [sequence for sequence in left if batcher.is_in_flight(sequence)]
        check_held(account, [*live.values(), *left])
    assert ended > 20
    for sequence in live.values():
        batcher.remove(sequence)
    for step in sent:
        batcher.apply_done(reader.run(step))
    assert [account.pool.free_count(group) for group in range(len(counts))] == counts


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 17])
@pytest.mark.parametrize("length", [1, 3, 4, 8, 9, 100])
def test_a_transfer_reserves_the_live_window_and_no_more(
    length: int, width: int, page_size: int
) -> None:
    (group,) = layout_of((window(width),), page_size).groups
    account = PageAccount([group], [1000], has_prefix_cache=False)
    (span,) = account.spans_for_prompt(length)
    (need,) = account.needs([span], length)
    live = range(max(0, length - width + 1), length)
    assert span.first_index == live.start // page_size
    touched = {position // page_size for position in live}
    # With a window of one token nothing is live; the next token's page may be taken beforehand.
    assert need == len(touched) or (width == 1 and need <= 1)


def test_window_groups_do_not_limit_how_long_a_request_may_be() -> None:
    groups = layout_of((FULL, window(8)), 4).groups
    assert PageAccount(groups, [100, 3], has_prefix_cache=False).token_capacity == 400
    assert PageAccount(groups, [100, 2], has_prefix_cache=False).token_capacity == 8
    only = layout_of((window(8),), 4).groups
    assert PageAccount(only, [3], has_prefix_cache=False).token_capacity > 1 << 30


def test_a_prompt_takes_the_window_and_one_chunk_and_keeps_the_window_at_its_end() -> None:
    groups = layout_of((FULL, window(8)), 4).groups
    account = PageAccount(groups, [100, 50], has_prefix_cache=False, chunk_token_max=20)
    batcher = Batcher(account, BatchLimits(20, 4, 400, frozenset()))
    sequence = account.open(1, [1] * 203, 203, sampling(4))
    assert sequence is not None
    assert [len(span.page_ids) for span in sequence.spans] == [51, 8]  # 7 + 20 tokens touch 8
    batcher.add(sequence)
    reader = Reader(groups)
    for _ in range(11):
        planned = batcher.plan_step()
        assert planned.step is not None
        assert sequence.spans[1].first_index <= max(0, sequence.computed_count - 7) // 4
        batcher.apply_done(reader.run(planned.step))
    assert sequence.computed_count == 203
    span = sequence.spans[1]
    assert (span.first_index, span.end_index) == ((203 - 7) // 4, 51)
    assert account.pool.used_count(1) == 2


def test_steps_that_are_sent_ahead_cut_no_prompt_smaller() -> None:
    """A window's pages move along when a chunk has returned; the next one waits for them."""
    groups = layout_of((FULL, window(8)), 4).groups
    spans: list[list[tuple[int, int]]] = []
    for in_flight_max in (1, IN_FLIGHT_MAX):
        account = PageAccount(groups, [100, 50], has_prefix_cache=False, chunk_token_max=20)
        batcher = Batcher(account, BatchLimits(20, 4, 400, frozenset(), in_flight_max))
        sequence = account.open(1, [1] * 203, 203, sampling(1))
        assert sequence is not None
        batcher.add(sequence)
        reader, sent = Reader(groups), deque[Step]()
        spans.append([])
        while sequence.output_count == 0:
            while (step := batcher.plan_step().step) is not None:
                sent.append(step)
                spans[-1] += [(chunk.start, chunk.stop) for chunk in step.chunks]
            batcher.apply_done(reader.run(sent.popleft()))
    assert spans[0] == spans[1] and len(spans[0]) == 11


def test_a_small_pool_makes_small_chunks_and_the_prompt_still_ends() -> None:
    groups = layout_of((FULL, window(8)), 4).groups
    account = PageAccount(groups, [100, 3], has_prefix_cache=False, chunk_token_max=64)
    batcher = Batcher(account, BatchLimits(64, 4, 400, frozenset()))
    sequence = account.open(1, [1] * 90, 90, sampling(1))
    assert sequence is not None
    assert account.open(2, [1] * 90, 90, sampling(1)) is None
    batcher.add(sequence)
    reader = Reader(groups)
    while sequence.output_count == 0:
        planned = batcher.plan_step()
        assert planned.step is not None and planned.step.chunks[0].stop <= 90
        batcher.apply_done(reader.run(planned.step))


def test_pages_are_not_recycled_while_a_step_is_in_flight() -> None:
    (group,) = layout_of((window(4),), 2).groups
    account = PageAccount([group], [20], has_prefix_cache=False)
    batcher = Batcher(account, BatchLimits(8, 4, 400, frozenset()))
    sequence = account.open(1, [1] * 8, 8, sampling(9))
    assert sequence is not None
    batcher.add(sequence)
    first = batcher.plan_step().step
    assert first is not None
    before = list(sequence.spans[0].page_ids)
    assert batcher.plan_step().step is None
    assert sequence.spans[0].page_ids == before and account.pool.used_count(0) == len(before)
    batcher.remove(sequence)
    assert account.pool.used_count(0) == len(before)
    batcher.apply_done(Reader((group,)).run(first))
    assert account.pool.used_count(0) == 0


def test_a_span_forgets_only_what_lies_before() -> None:
    span = PageSpan(3, [7, 8, 9], granted_count=2)
    assert span.drop_before(2) == [] and span.drop_before(3) == []
    assert span.drop_before(5) == [7, 8]
    assert (span.first_index, span.page_ids, span.granted_count) == (5, [9], 0)
    assert span.drop_before(50) == [9]
    assert (span.first_index, span.end_index) == (6, 6)
