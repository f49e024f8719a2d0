"""From where prompts go on whose model has more than pages that grow: found when it is right, and
never in the way."""

from __future__ import annotations

import pytest

from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.prefix_digests import DIGEST_NBYTES, extend_digests
from common.protocol.worker import Step, StepDone
from common.request import SamplingParams
from common.scheduling.batch_limits import BatchLimits
from common.scheduling.batcher import Batcher
from common.scheduling.page_account import PageAccount
from common.scheduling.prefix_cache import Match
from common.scheduling.sequence import Sequence

PAGE_SIZE = 4
CHUNK_MAX = 8
GREEDY = SamplingParams(max_new_tokens=40, seed=0)


def digests_of(tokens: list[int]) -> bytes:
    return extend_digests(bytes(DIGEST_NBYTES), tokens, PAGE_SIZE)


class Rig:
    """A batcher over a full group and others; each step draws token 1."""

    def __init__(
        self,
        *lives: Live,
        counts: tuple[int, ...],
        checkpoint_max: int = 8,
        in_flight_max: int = 1,
        chunk_max: int = CHUNK_MAX,
        host_counts: tuple[int, ...] = (),
    ) -> None:
        segment = (Segment("h", 1, 8),)
        components = tuple(
            CacheComponent(f"c{i}", (i,), segment, live, Shard.SPLIT, "float32")
            for i, live in enumerate(lives)
        )
        layout = ServerLayout(components, 1, ((0, len(lives)),), PAGE_SIZE)
        self.account = PageAccount(
            layout.groups,
            counts,
            has_prefix_cache=True,
            chunk_token_max=chunk_max,
            checkpoint_max=checkpoint_max,
            digest_tokens=PAGE_SIZE,
            host_page_counts=host_counts,
        )
        limits = BatchLimits(chunk_max, 8, 200, frozenset(), in_flight_max)
        self.batcher = Batcher(self.account, limits)
        self.sent: list[Step] = []

    def match(self, tokens: list[int]) -> Match:
        return self.account.match(digests_of(tokens), tokens, len(tokens) - 1)

    def open(self, request_id: int, tokens: list[int]) -> Sequence:
        match = self.match(tokens)
        sequence = self.account.open(
            request_id, list(tokens), len(tokens), GREEDY, digests_of(tokens), match
        )
        assert sequence is not None
        self.batcher.add(sequence)
        return sequence

    def plan(self) -> None:
        step = self.batcher.plan_step().step
        assert step is not None
        self.sent.append(step)

    def end(self, *failed: int) -> None:
        step = self.sent.pop(0)
        ids = [chunk.request_id for chunk in step.chunks if chunk.is_last] + step.decode
        reasons = dict.fromkeys(failed, "nan")
        done = StepDone(step.step_id, ids, [1] * len(ids), failed=reasons)
        for undrawn in self.batcher.apply_done(done).failed:
            self.batcher.remove(undrawn.sequence)

    def run(self, request_id: int, tokens: list[int], step_count: int) -> None:
        sequence = self.open(request_id, tokens)
        for _ in range(step_count):
            self.plan()
            self.end()
        self.batcher.remove(sequence)


def test_a_token_that_was_drawn_for_who_had_left_is_in_no_block_and_no_checkpoint() -> None:
    """Its cache is there, for the step behind the one that drew it computed it; nobody knows it."""
    rig = Rig(FULL, SLOT, counts=(20, 9), in_flight_max=2)
    sequence = rig.open(1, [1, 2])
    rig.plan()
    rig.plan()
    rig.end()
    assert len(sequence.token_ids) == 3, "the fourth token fills a block"
    rig.plan()
    rig.batcher.remove(sequence)
    rig.end()
    rig.end()
    cache = rig.account.cache
    assert cache is not None and cache.tree.block_count == 0
    assert rig.account.flush_cache()
    assert (rig.account.pool.free_count(0), rig.account.pool.free_count(1)) == (20, 9)


def test_a_step_keeps_states_inside_a_chunk_at_the_end_of_a_block() -> None:
    """Where an equal prompt can go on; one whose log-probabilities are told is not cut."""
    rig = Rig(FULL, SLOT, counts=(40, 9), chunk_max=32)
    tokens = [2] * 10
    rig.open(1, tokens)
    rig.plan()
    first, second = rig.sent[0].chunks
    (page,) = first.state_pages[1:]
    assert [(c.start, c.stop, c.is_last) for c in (first, second)] == [(0, 8, False), (8, 10, True)]
    assert page in rig.account.pool._used[1] and not rig.sent[0].copies
    assert not second.state_pages and first.state_pages[0] == 0
    assert rig.match(tokens).token_count == 0, "it is not computed yet"
    rig.end()
    match = rig.match(tokens)
    assert match.token_count == 8
    assert match.checkpoint is not None and match.checkpoint.pages == [[], [page]]
    told = SamplingParams(max_new_tokens=1, seed=0, return_logprob=True, logprob_start_len=0)
    other = [3] * 10
    scored = rig.account.open(2, other, 10, told, digests_of(other), rig.match(other))
    assert scored is not None
    rig.batcher.add(scored)
    rig.plan()
    assert [(chunk.start, chunk.stop) for chunk in rig.sent[0].chunks] == [(0, 10)]


def test_without_a_page_for_its_state_a_chunk_is_computed_whole() -> None:
    rig = Rig(FULL, SLOT, counts=(40, 1), chunk_max=32)
    rig.open(1, [2] * 10)
    rig.plan()
    assert [(chunk.start, chunk.stop) for chunk in rig.sent[0].chunks] == [(0, 10)]


@pytest.mark.parametrize("chunk_max", [8, 32])
def test_a_checkpoint_of_a_prompt_that_failed_is_nothing_to_go_on_from(chunk_max: int) -> None:
    """Made between two steps, or inside one."""
    rig = Rig(FULL, SLOT, counts=(40, 9), chunk_max=chunk_max)
    shared = [2] * 8
    failing = rig.open(1, [*shared, 4, 4])
    assert failing.cuts == [8, 10]
    if chunk_max == 8:
        rig.plan()
        rig.end()
    rig.plan()
    rig.end(1)
    match = rig.match([*shared, 9])
    assert (match.block_count, match.token_count) == (0, 0)
    assert rig.account.flush_cache()
    assert (rig.account.pool.free_count(0), rig.account.pool.free_count(1)) == (40, 9)


def test_a_checkpoint_of_a_failed_prompt_that_is_being_copied_is_not_found_again() -> None:
    rig = Rig(FULL, SLOT, counts=(40, 9))
    shared = [2] * 8
    rig.open(2, [*shared, 4, 4])
    for _ in range(2):
        rig.plan()
        rig.end()
    reader = rig.open(3, [*shared, 9])
    assert reader.cached_count == 8
    rig.batcher.stop(reader)
    rig.plan()
    rig.end(2)
    assert rig.match([*shared, 9]).token_count == 0
    rig.batcher.remove(reader)
    assert rig.account.flush_cache()
    assert (rig.account.pool.free_count(0), rig.account.pool.free_count(1)) == (40, 9)


def test_a_window_that_has_come_is_not_gone_on_from_a_token_earlier() -> None:
    """It came without the row that only the token before needs. A window that was computed here
    has it."""
    for kind in (Live(LiveKind.WINDOW, 3), Live(LiveKind.TAIL, 4, 4)):
        rig = Rig(FULL, kind, counts=(40, 40))
        tokens = [2] * 8
        spans = rig.account.spans_for_prompt(8)
        for span, pages in zip(spans, rig.account.allocate([3, 2]), strict=True):
            span.page_ids += pages
        came = rig.account.adopt(1, [*tokens, 1], 8, GREEDY, spans, 8, digests_of(tokens))
        rig.batcher.add(came)
        rig.batcher.remove(came)
        assert rig.match([*tokens, 1]).token_count == 8
        assert rig.match(tokens).token_count == 0
        rig.run(2, tokens, 2)
        assert rig.match(tokens).token_count == 7


def test_window_pages_that_a_step_in_flight_copies_are_not_given_back() -> None:
    """The token before the last needs a page more than the next one."""
    rig = Rig(FULL, Live(LiveKind.WINDOW, 4), counts=(40, 40), in_flight_max=2)
    sequence = rig.open(1, [2] * 7)
    rig.plan()
    rig.plan()
    copied = [page for one in rig.sent[1].copies if one.group == 1 for page in one.source_ids]
    assert len(copied) == 2
    rig.end()
    assert rig.account.pool._used[1].issuperset(copied)
    assert sequence.spans[1].first_index == 0
    rig.end()
    rig.plan()
    assert sequence.spans[1].first_index == 1


def test_who_could_never_have_a_checkpoint_and_a_slot_begins_without_it() -> None:
    """There is one slot: who waited for both would wait for ever."""
    rig = Rig(FULL, SLOT, counts=(20, 1))
    rig.run(1, [2] * 8, 1)
    match = rig.match([2] * 9)
    assert (match.block_count, match.token_count, match.checkpoint) == (2, 0, None)
    rig.run(2, [2] * 9, 2)


def test_a_prompt_that_fills_the_pool_begins_without_the_rest_of_a_page() -> None:
    rig = Rig(FULL, counts=(4,))
    rig.run(1, [2] * 7, 1)
    assert rig.match([2] * 9).token_count == 7
    assert rig.match([2] * 13).token_count == 4, "its four pages are all that there are"
    rig.run(2, [2] * 13, 2)


def test_what_serves_equal_prompts_alone_goes_before_what_other_turns_need() -> None:
    rig = Rig(FULL, SLOT, counts=(60, 9), checkpoint_max=4)
    prompts = [[token] * 8 for token in range(2, 6)]
    for request_id, prompt in enumerate(prompts):
        rig.run(request_id, prompt, 1)
    assert [rig.match([*prompt, 1]).token_count for prompt in prompts[1:]] == [8, 8, 8]
    assert [rig.match(prompt).token_count for prompt in prompts] == [0, 0, 0, 4]


def test_a_prompt_that_comes_again_takes_no_place_of_another_checkpoint() -> None:
    """Each has two: at its end, and at its last block but one."""
    rig = Rig(FULL, SLOT, counts=(40, 9), checkpoint_max=4)
    first, second = [2] * 8, [3] * 8
    rig.run(1, first, 1)
    for request_id in range(2, 9):
        rig.run(request_id, second, 1)
    assert rig.match([*first, 1]).token_count == 8
    assert rig.match([*second, 1]).token_count == 8


def test_a_checkpoint_that_is_reached_again_counts_as_used() -> None:
    rig = Rig(FULL, SLOT, counts=(40, 9), checkpoint_max=4)
    first, second, third = [2] * 8, [3] * 8, [4] * 8
    rig.run(1, first, 1)
    rig.run(2, second, 1)
    rig.run(3, first, 1)
    rig.run(4, third, 1)
    assert rig.match([*first, 1]).token_count == 8
    assert rig.match([*second, 1]).token_count == 0
