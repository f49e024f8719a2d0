"""Sequences that fork: which pages are whose, and what the next step copies."""

from __future__ import annotations

from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.prefix_digests import DIGEST_NBYTES, extend_digests
from common.protocol.worker import SampleDraw, Step, StepDone
from common.request import SamplingParams
from common.scheduling.batch_limits import BatchLimits
from common.scheduling.batcher import Batcher
from common.scheduling.forks import Forks
from common.scheduling.in_flight import IN_FLIGHT_MAX
from common.scheduling.page_account import PageAccount
from common.scheduling.sequence import PageSpan, Sequence
from common.scheduling.step_outcome import StepOutcome

PAGE_SIZE = 4
WINDOW = Live(LiveKind.WINDOW, 6)
LIVES = (FULL, WINDOW, SLOT)
PAGE_COUNTS = (50, 40, 6)
PROMPT = list(range(10, 21))  # two whole blocks and three tokens
IDS = [2, 3, 4]


class Rig:
    """A batcher whose prefix cache keeps nothing, over three kinds of pages."""

    def __init__(self) -> None:
        components = tuple(
            CacheComponent(f"c{i}", (0,), (Segment("h", 1, 8),), live, Shard.SPLIT, "float32")
            for i, live in enumerate(LIVES)
        )
        layout = ServerLayout(components, 1, ((0, 1),), PAGE_SIZE)
        self.account = PageAccount(
            layout.groups,
            PAGE_COUNTS,
            has_prefix_cache=False,
            shares_samples=True,
            digest_tokens=PAGE_SIZE,
        )
        self.forks = Forks(self.account)
        limits = BatchLimits(64, 8, 400, frozenset(), IN_FLIGHT_MAX)
        self.batcher = Batcher(self.account, limits)
        self.sent: list[Step] = []

    def used(self) -> list[int]:
        return [self.account.pool.used_count(group) for group in range(len(LIVES))]

    def plan(self) -> Step | None:
        planned = self.batcher.plan_step()
        if planned.step is not None:
            self.sent.append(planned.step)
        return planned.step

    def end(self) -> StepOutcome:
        step = self.sent.pop(0)
        ids = [one for chunk in step.chunks for one in chunk.drawing] + step.decode
        return self.batcher.apply_done(StepDone(step.step_id, ids, [7] * len(ids)))

    def fork(self) -> list[Sequence]:
        """A prompt that is computed here, and its samples, which the next step copies for."""
        digests = extend_digests(bytes(DIGEST_NBYTES), PROMPT, PAGE_SIZE)
        sampling = SamplingParams(max_new_tokens=50, seed=0)
        prompt = self.account.open(1, list(PROMPT), len(PROMPT), sampling, digests)
        assert prompt is not None
        pages = self.forks.reserve(len(PROMPT), len(IDS))
        prompt.samples = [SampleDraw(request_id, request_id) for request_id in IDS]
        self.batcher.add(prompt)
        first = self.plan()
        assert first is not None and self.plan() is None, "nothing is planned ahead of a fork"
        (drawn,) = self.end().samples
        assert drawn.tokens == dict.fromkeys(IDS, 7) and drawn.sequence is prompt
        spans = [[PageSpan(0, []) for _ in LIVES] for _ in IDS]
        samples = [
            Sequence(one, [*PROMPT, 7], len(PROMPT), sampling, own, is_known=True)
            for one, own in zip(IDS, spans, strict=True)
        ]
        copies = self.forks.fork(prompt, samples, pages)
        self.batcher.add_samples(copies, samples[0])
        self.batcher.remove(prompt)
        return samples


def test_blocks_are_counted_once_and_all_else_for_each_sample() -> None:
    rig = Rig()
    samples = rig.fork()
    step = rig.plan()
    assert step is not None and step.decode == IDS and step.retired == [1]
    # Two blocks and an open page each. Of a window of 6, tokens 6 to 11 are in two pages.
    assert rig.used() == [2 + 3, 3 * 2, 3]
    full, window, slot = ([c for c in step.copies if c.group == group] for group in range(3))
    first = samples[0].spans
    for copies, span in zip((full, window, slot), first, strict=True):
        assert [copy.source_ids for copy in copies] == [copies[0].source_ids] * 2
        assert set(copies[0].source_ids) <= set(span.page_ids)
    assert [len(copies[0].source_ids) for copies in (full, window, slot)] == [1, 2, 1]
    pages = [sample.spans[0].page_ids for sample in samples]
    assert pages[0][:2] == pages[1][:2] == pages[2][:2]
    assert len({page for own in pages for page in own[2:]}) == 3


def test_the_needs_of_samples_are_what_a_fork_takes() -> None:
    rig = Rig()
    before = rig.account.needs_to_compute(len(PROMPT))
    beside = rig.forks.needs(len(PROMPT), len(IDS))
    rig.fork()
    full, window, slot = map(sum, zip(before, beside, strict=True))
    # A window has a page less once its chunk is computed.
    assert rig.used() == [full, window - 1, slot]
    assert rig.forks.needs(len(PROMPT), 1) == [0, 0, 0]
    assert rig.forks.count_max(len(PROMPT)) == PAGE_COUNTS[2], "one slot each"


def test_who_is_copied_keeps_its_pages_until_the_next_step_has_returned() -> None:
    rig = Rig()
    samples = rig.fork()
    rig.batcher.remove(samples[0])
    kept = rig.used()
    step = rig.plan()
    assert step is not None and step.decode == IDS[1:]
    assert rig.used() == kept, "the step reads them"
    rig.end()
    assert rig.used()[2] == 2


def test_the_last_one_that_would_be_copied_to_frees_who_would_be_copied() -> None:
    rig = Rig()
    for sample in rig.fork():
        rig.batcher.remove(sample)
    assert rig.used() == [0, 0, 0]
    assert rig.plan() is None


def test_a_sample_that_leaves_before_it_is_copied_leaves_no_checkpoint() -> None:
    """Its own pages hold nothing yet, though its tokens count as computed."""
    rig = Rig()
    rig.account.keeps_prefixes = True
    rig.account.cached.cache.checkpoints.count_max = 8  # type: ignore[union-attr]
    samples = rig.fork()
    rig.batcher.remove(samples[2])
    assert rig.account.prefix_state().checkpoint_count == 0


def test_a_prompt_that_leaves_with_its_last_chunk_in_flight_takes_its_samples_along() -> None:
    rig = Rig()
    sampling = SamplingParams(max_new_tokens=50, seed=0)
    digests = extend_digests(bytes(DIGEST_NBYTES), PROMPT, PAGE_SIZE)
    prompt = rig.account.open(1, list(PROMPT), len(PROMPT), sampling, digests)
    assert prompt is not None
    prompt.samples = [SampleDraw(request_id, 0) for request_id in IDS]
    rig.batcher.add(prompt)
    rig.plan()
    rig.batcher.remove(prompt)
    assert not rig.end().samples
    other = rig.account.open(9, [5] * 4, 4, sampling)
    assert other is not None
    rig.batcher.add(other)
    step = rig.plan()
    assert step is not None and step.retired == [1, *IDS], "workers know them all"
    assert rig.used()[2] == 1
