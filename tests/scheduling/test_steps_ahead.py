"""A step that is planned while another is in flight: who is in it, and what becomes of what it
draws for those that the first one ended."""

from __future__ import annotations

import pytest

from common.failures import Failure, FailureKind
from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, CacheComponent, Segment, Shard
from common.prefix_digests import DIGEST_NBYTES, extend_digests
from common.protocol.worker import Step, StepDone
from common.request import FinishKind, SamplingParams
from common.scheduling.batch_limits import BatchLimits
from common.scheduling.batcher import Batcher
from common.scheduling.in_flight import IN_FLIGHT_MAX
from common.scheduling.page_account import PageAccount
from common.scheduling.sequence import Sequence
from common.scheduling.step_outcome import StepOutcome, Undrawn

EOS = 7
CHUNK_MAX = 8
PAGE_SIZE = 4


def digests_of(tokens: list[int]) -> bytes:
    return extend_digests(bytes(DIGEST_NBYTES), tokens, PAGE_SIZE)


class Rig:
    """A batcher over one page group; its workers draw what they are told to."""

    def __init__(
        self,
        *,
        page_count: int = 100,
        token_max: int = 400,
        is_prompt_only: bool = False,
        has_prefix_cache: bool = False,
    ) -> None:
        component = CacheComponent("c", (0,), (Segment("h", 1, 8),), FULL, Shard.SPLIT, "float32")
        layout = ServerLayout((component,), 1, ((0, 1),), PAGE_SIZE)
        self.account = PageAccount(
            layout.groups,
            (page_count,),
            has_prefix_cache=has_prefix_cache,
            digest_tokens=PAGE_SIZE,
        )
        limits = BatchLimits(
            CHUNK_MAX, 8, token_max, frozenset({EOS}), IN_FLIGHT_MAX, is_prompt_only
        )
        self.batcher = Batcher(self.account, limits)
        self.sent: list[Step] = []

    def add(self, request_id: int, prompt_count: int, max_new_tokens: int = 100) -> Sequence:
        return self.open(request_id, [1] * prompt_count, max_new_tokens)

    def open(self, request_id: int, prompt: list[int], max_new_tokens: int = 100) -> Sequence:
        sampling = SamplingParams(max_new_tokens=max_new_tokens, seed=0)
        digests = digests_of(prompt)
        match = self.account.match(digests, prompt, len(prompt) - 1)
        sequence = self.account.open(request_id, prompt, len(prompt), sampling, digests, match)
        assert sequence is not None
        self.batcher.add(sequence)
        return sequence

    def plan(self) -> Step | None:
        planned = self.batcher.plan_step()
        assert not planned.retracted
        if planned.step is not None:
            self.sent.append(planned.step)
        return planned.step

    def end(self, **drawn: int) -> StepOutcome:
        """The oldest step returns. drawn: "r3=5", a token other than 1 for request 3."""
        step = self.sent.pop(0)
        ids = [chunk.request_id for chunk in step.chunks if chunk.is_last] + step.decode
        tokens = [drawn.get(f"r{request_id}", 1) for request_id in ids]
        return self.batcher.apply_done(StepDone(step.step_id, ids, tokens))

    def decoding(self, *max_new_tokens: int) -> list[Sequence]:
        """Requests 1, 2, ... with a prompt of three tokens and their first token, none in flight.
        Each has a page, which its fourth token fills."""
        sequences = [self.add(i, 3, count) for i, count in enumerate(max_new_tokens, 1)]
        while self.batcher.prompt_count:
            assert self.plan() is not None
            self.end()
        return sequences


def told(outcome: StepOutcome) -> dict[int, int]:
    return {token.sequence.request_id: token.token_ids[0] for token in outcome.tokens}


def test_who_decodes_or_ends_its_prompt_in_a_step_decodes_in_the_next() -> None:
    rig = Rig()
    rig.decoding(9)
    rig.add(2, 4)
    first, second, third = rig.plan(), rig.plan(), rig.plan()
    assert first is not None and second is not None
    assert (first.decode, [chunk.request_id for chunk in first.chunks]) == ([1], [2])
    assert (second.decode, second.chunks) == ([1, 2], [])
    assert third is None, "one that runs and one behind it"
    assert told(rig.end(r1=10, r2=20)) == {1: 10, 2: 20}
    assert told(rig.end(r1=11, r2=21)) == {1: 11, 2: 21}


def test_a_token_that_is_not_known_yet_has_its_page() -> None:
    rig = Rig()
    (sequence,) = rig.decoding(9)
    assert len(sequence.token_ids) == PAGE_SIZE
    first, second = rig.plan(), rig.plan()
    assert first is not None and first.grants == []
    assert second is not None and [grant.first_index for grant in second.grants] == [1]


def test_no_step_is_planned_past_an_end_that_is_known() -> None:
    rig = Rig(token_max=5)
    rig.decoding(2, 9)
    first = rig.plan()
    assert first is not None and first.decode == [1, 2], "both draw their last token"
    assert rig.plan() is None
    ends = [token.finish for token in rig.end().tokens]
    assert [end.kind for end in ends if end is not None] == [FinishKind.LENGTH] * 2


def test_what_is_drawn_for_who_has_ended_is_dropped_and_its_pages_stay_until_then() -> None:
    rig = Rig()
    ending, going_on = rig.decoding(9, 9)
    rig.plan()
    rig.plan()
    ended = rig.end(r1=EOS)
    assert told(ended) == {1: EOS, 2: 1}
    pages = list(ending.spans[0].page_ids)
    rig.batcher.remove(ending)
    third = rig.plan()
    assert third is not None and (third.decode, third.retired) == ([2], [1])
    assert ending.spans[0].page_ids == pages, "the second step writes them"
    used = rig.account.pool.used_count(0)
    assert told(rig.end(r1=99, r2=5)) == {2: 5}
    assert ending.spans[0].page_ids == [] and ending.token_ids[-1] == EOS
    assert rig.account.pool.used_count(0) == used - len(pages)
    assert going_on.token_ids[-1] == 5


def test_who_leaves_while_two_steps_compute_it_keeps_its_pages_until_both_return() -> None:
    rig = Rig()
    (sequence,) = rig.decoding(9)
    rig.plan()
    rig.plan()
    rig.batcher.remove(sequence)
    assert told(rig.end()) == {} and rig.account.pool.used_count(0) == 2
    assert told(rig.end()) == {} and rig.account.pool.used_count(0) == 0


@pytest.mark.parametrize(
    ("unfit", "kind", "status"), [([], "bad_logits", 500), ([1], "no_token", 400)]
)
def test_a_sequence_that_fails_in_both_steps_is_told_once(
    unfit: list[int], kind: str, status: int
) -> None:
    rig = Rig()
    (sequence,) = rig.decoding(9)
    outcomes = []
    rig.plan()
    rig.plan()
    for step in rig.sent:
        done = StepDone(step.step_id, [1], [0], failed={1: "why"}, unfit=unfit)
        outcomes.append(rig.batcher.apply_done(done))
        for undrawn in outcomes[-1].failed:
            rig.batcher.remove(undrawn.sequence)
    failure = Failure(FailureKind(kind), "why")
    assert [outcome.failed for outcome in outcomes] == [[Undrawn(sequence, failure)], []]
    assert failure.status == status
    assert rig.account.pool.used_count(0) == 0


def test_a_prompt_goes_on_behind_the_chunk_that_is_in_flight() -> None:
    rig = Rig()
    rig.add(1, 3 * CHUNK_MAX)
    steps = [rig.plan(), rig.plan()]
    spans = [(c.start, c.stop, c.is_last) for step in steps if step for c in step.chunks]
    assert spans == [(0, 8, False), (8, 16, False)]
    assert [chunk.stop for chunk in rig.end().chunks] == [8]
    last = rig.plan()
    assert last is not None and [(c.start, c.stop, c.is_last) for c in last.chunks] == [
        (16, 24, True)
    ]


def test_a_step_of_prompts_that_another_may_join_is_not_planned_ahead() -> None:
    rig = Rig()
    rig.add(1, CHUNK_MAX + 2)
    assert rig.plan() is not None and rig.plan() is None
    rig.add(2, 6)
    joined = rig.plan()
    assert joined is not None
    assert [(c.request_id, c.start, c.stop) for c in joined.chunks] == [(1, 8, 10), (2, 0, 6)]


def test_nobody_decodes_where_prompts_only_are_computed() -> None:
    rig = Rig(is_prompt_only=True)
    sequence = rig.add(1, CHUNK_MAX)
    assert rig.plan() is not None and rig.plan() is None
    (token,) = rig.end().tokens
    assert token.sequence is sequence


@pytest.mark.parametrize("is_prompt_only", [False, True])
def test_the_last_token_of_a_request_that_comes_again_is_a_chunk_where_it_is_handed_over(
    is_prompt_only: bool,
) -> None:
    """A decode server gave it up with tokens drawn, and all but the last are in the cache here."""
    rig = Rig(is_prompt_only=is_prompt_only, has_prefix_cache=True)
    earlier = rig.add(1, CHUNK_MAX)
    rig.plan()
    rig.end()
    rig.batcher.remove(earlier)
    tokens, sampling = [1] * (CHUNK_MAX + 1), SamplingParams(max_new_tokens=9, seed=0)
    digests = digests_of(tokens)
    match = rig.account.match(digests, tokens, len(tokens) - 1)
    again = rig.account.open(2, tokens, 3, sampling, digests, match)
    assert again is not None and again.computed_count == CHUNK_MAX
    rig.batcher.add(again)
    step = rig.plan()
    assert step is not None
    chunks = [(chunk.start, chunk.stop, chunk.is_last) for chunk in step.chunks]
    if is_prompt_only:
        assert (chunks, step.decode) == ([(CHUNK_MAX, CHUNK_MAX + 1, True)], [])
        assert rig.plan() is None, "it leaves with the token that this step draws"
    else:
        assert (chunks, step.decode) == ([], [2])


def test_where_pages_are_short_nothing_is_planned_ahead_and_nobody_goes_for_it() -> None:
    """The sequence that ends with the first step leaves the other the page it needs."""
    rig = Rig(page_count=3)
    ending, going_on = rig.decoding(9, 9)
    assert rig.plan() is not None
    assert rig.plan() is None, "two pages are needed, one is free"
    assert [len(s.spans[0].page_ids) for s in (ending, going_on)] == [1, 1]
    rig.end(r1=EOS)
    rig.batcher.remove(ending)
    step = rig.plan()
    assert step is not None and step.decode == [2]


def test_where_waiting_frees_nothing_the_cheapest_goes_once_no_step_is_in_flight() -> None:
    rig = Rig(page_count=2)
    first, second = rig.decoding(9, 9)
    assert rig.plan() is not None and rig.plan() is None
    rig.end()
    planned = rig.batcher.plan_step()
    assert planned.retracted == [second] and planned.step is not None
    assert planned.step.decode == [first.request_id]


def test_nothing_else_is_known_of_tokens_ahead_so_no_step_tells_them() -> None:
    rig = Rig()
    rig.decoding(9)
    step = rig.plan()
    assert step is not None and step.decode == [1] and step.decode_tokens == []
