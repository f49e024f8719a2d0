"""What outputs are expected to need: learned from those there were, so that as many are admitted as
end in the pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, CacheComponent, Segment, Shard
from common.protocol.codec import encode_layout
from common.protocol.frontend import Failed, Submit
from common.protocol.worker import Step, StepDone
from common.request import SamplingParams
from common.scheduling.events import Effect, FromFrontend, FromWorker, ToFrontend, ToWorkers
from common.scheduling.facts import SchedulerLimits, ServerFacts
from decode_server.output_lengths import (
    BOUNDS,
    REMEMBERED_COUNT,
    UNKNOWN_LENGTH,
    Growing,
    OutputLengths,
)
from decode_server.scheduler import DecodeScheduler

EOS = 7
PAGE_SIZE = 16
POOL_TOKENS = 65_536
PROMPT_TOKENS = 512
RUNNING_MAX = 256


class Alone:
    """A decode server that computes its prompts itself; its outputs end where they are told to.

    prompt_token_count: computed, those of retracted requests again and again.
    """

    def __init__(self, length_of: Callable[[int], int]) -> None:
        component = CacheComponent("c", (0,), (Segment("h", 1, 8),), FULL, Shard.SPLIT, "float32")
        layout = ServerLayout((component,), 1, ((0, 1),), PAGE_SIZE)
        page_counts = (POOL_TOKENS // PAGE_SIZE,)
        facts = ServerFacts(
            "d", layout, encode_layout(layout), page_counts, {}, 8192, frozenset({EOS}), "", ()
        )
        limits = SchedulerLimits(2048, RUNNING_MAX, 4096, has_prefix_cache=False)
        self.core = DecodeScheduler(facts, limits, [], is_local=True)
        self._length_of = length_of
        self._steps: deque[Step] = deque()
        self._next_id = 1
        self.step_count = self.prompt_token_count = self.running_max = 0

    def run(self, request_count: int, max_new_tokens: int) -> None:
        """All of them at once, to the end of the last."""
        for _ in range(request_count):
            sampling = SamplingParams(max_new_tokens=max_new_tokens, seed=0)
            submit = Submit(self._next_id, [1] * PROMPT_TOKENS, sampling, 1e6)
            self._next_id += 1
            self._take(self.core.handle(FromFrontend(submit), 1.0))
        self._take(self.core.schedule(1.0))
        while self._steps:
            self._end(self._steps.popleft())
        assert self.core.is_idle

    @property
    def retracted_count(self) -> int:
        return int(self.core.requests.counters["retracted"])

    def _take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ToWorkers) and isinstance(effect.message, Step):
                self._steps.append(effect.message)
            assert not (isinstance(effect, ToFrontend) and isinstance(effect.message, Failed))

    def _end(self, step: Step) -> None:
        self.step_count += 1
        self.running_max = max(self.running_max, len(step.decode))
        self.prompt_token_count += sum(chunk.stop - chunk.start for chunk in step.chunks)
        ids = [chunk.request_id for chunk in step.chunks if chunk.is_last] + step.decode
        tokens = [EOS if self._is_last(request_id) else 1 for request_id in ids]
        self._take(self.core.handle(FromWorker(StepDone(step.step_id, ids, tokens)), 1.0))
        self._take(self.core.schedule(1.0))

    def _is_last(self, request_id: int) -> bool:
        request = self.core.requests.get(request_id)
        return request is not None and request.output_count + 1 >= self._length_of(request_id)


@pytest.mark.slow
def test_outputs_of_one_length_are_hardly_ever_retracted() -> None:
    alone = Alone(lambda request_id: 10**6)
    alone.run(200, 1024)
    assert alone.retracted_count <= 5
    assert alone.prompt_token_count < 1.05 * 200 * PROMPT_TOKENS
    assert alone.running_max >= POOL_TOKENS // (PROMPT_TOKENS + 1024) - 2


@pytest.mark.slow
def test_outputs_longer_than_assumed_are_learned_from_the_first() -> None:
    alone = Alone(lambda request_id: 10**6)
    alone.run(20, 3000)
    before = alone.prompt_token_count
    alone.run(36, 3000)
    assert alone.prompt_token_count - before < 1.2 * 36 * PROMPT_TOKENS


@pytest.mark.slow
def test_short_outputs_fill_the_pool_however_long_they_might_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As they did where every request was expected to need 64 tokens more."""

    def length_of(request_id: int) -> int:
        return 20 + request_id * 7919 % 60

    learning, fixed = Alone(length_of), Alone(length_of)
    learning.run(100, 4096)
    learning.step_count = 0
    learning.run(600, 4096)
    monkeypatch.setattr(OutputLengths, "expected_growth", lambda _, growing: 64 * len(growing))
    fixed.run(100, 4096)
    fixed.step_count = 0
    fixed.run(600, 4096)
    assert learning.step_count <= 1.02 * fixed.step_count
    assert learning.retracted_count <= fixed.retracted_count + 5


def growth(lengths: OutputLengths, left: int, output_count: int = 0, count: int = 1) -> int:
    """Of requests whose prompt is short."""
    return lengths.expected_growth([Growing(1 + output_count, output_count, left)] * count)


def test_nothing_is_known_at_the_start_and_much_is_expected() -> None:
    lengths = OutputLengths()
    assert growth(lengths, 10) == 10 and growth(lengths, 700) == 700
    assert UNKNOWN_LENGTH * 0.8 <= growth(lengths, 100_000) <= UNKNOWN_LENGTH * 1.25


def test_what_ends_early_is_expected_to_end_early() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        for length in range(1, 51):
            lengths.note_token(length)
        lengths.note_end(50)
    assert growth(lengths, 4096, count=100) <= 100 * 56
    assert growth(lengths, 20, count=100) == 100 * 20
    # Who has come further than all others goes on, for all that is known.
    assert growth(lengths, 4096, output_count=200) > 200


def test_outputs_that_were_cut_off_say_that_they_would_have_gone_on() -> None:
    lengths = OutputLengths()
    for _ in range(10):
        lengths.note_end(3)
    for _ in range(10):
        for length in range(1, 65):
            lengths.note_token(length)
    assert growth(lengths, 64, count=100) >= 100 * 0.4 * 64


def test_those_that_end_first_make_room_for_the_others() -> None:
    """Half of them have nearly done, and give more back than the others need."""
    lengths = OutputLengths()
    growing = [Growing(1000, 90, 10)] * 4 + [Growing(100, 0, 900)] * 4
    assert lengths.expected_growth(growing) == 8 * 10
    assert lengths.expected_growth([]) == 0


def test_old_lengths_are_forgotten_for_new_ones_in_bounded_memory() -> None:
    lengths = OutputLengths()
    for _ in range(10 * REMEMBERED_COUNT):
        lengths.note_end(2)
    assert growth(lengths, 100, count=100) < 100 * 8
    for _ in range(2 * REMEMBERED_COUNT):
        for length in range(1, 101):
            lengths.note_token(length)
    assert growth(lengths, 100, count=100) > 100 * 80
    assert len(lengths._ended) == len(lengths._passed) == len(BOUNDS) - 1 < 100
