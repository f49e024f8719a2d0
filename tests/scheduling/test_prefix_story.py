"""Prompts that share beginnings: each reads what it would have computed, and no page is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.scheduling.prefix_mutations import DRAFT_PLANTS, PLANTS
from tests.scheduling.prefix_story import Story, problem_of, run_story, shortened, story_of

STORY_COUNT = 240
CHUNK_COUNT = 8
# A planted bug is found by one of these, most by the first few.
PLANTED_COUNT = 1000

TALLIES: dict[int, Counter[str]] = {}


def told(chunk: int) -> Counter[str]:
    """What happened in some of the stories."""
    if chunk not in TALLIES:
        tally: Counter[str] = Counter()
        for seed in range(chunk, STORY_COUNT, CHUNK_COUNT):
            tally += run_story(story_of(seed))
        TALLIES[chunk] = tally
    return TALLIES[chunk]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNK_COUNT))
def test_whatever_is_shared_each_prompt_reads_its_own_tokens_and_no_page_is_lost(
    chunk: int,
) -> None:
    assert told(chunk)["finished"] > 0


@pytest.mark.slow
def test_all_that_stories_are_for_happens_in_some() -> None:
    tally = told(0) + told(1) + told(2) + told(3)
    wanted = {
        "reused",
        "reused all but one",
        "checkpoints used",
        "found without a checkpoint",
        "pages copied",
        "waited",
        "held",
        "adopted",
        "did not come",
        "aborted",
        "retracted",
        "failed",
        "flushed",
    }
    assert {name: tally[name] for name in wanted if not tally[name]} == {}


@pytest.mark.slow
def test_rows_of_a_draft_are_found_with_the_next_token_that_they_were_made_of() -> None:
    tally: Counter[str] = Counter()
    for seed in range(STORY_COUNT // 6):
        tally += run_story(story_of(seed, has_draft=True))
    assert all(tally[name] for name in ("reused", "checkpoints used", "held", "adopted", "waited"))


@pytest.mark.slow
@pytest.mark.parametrize("plant", DRAFT_PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_of_sharing_a_drafts_rows_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(problem_of(story_of(seed, has_draft=True)) for seed in range(PLANTED_COUNT))


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_of_sharing_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(problem_of(story_of(seed)) for seed in range(PLANTED_COUNT))


@pytest.mark.slow
def test_a_failing_story_is_cut_short_and_fails_still(monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[0](monkeypatch)
    failing = next(story_of(seed) for seed in range(PLANTED_COUNT) if problem_of(story_of(seed)))
    short = shortened(failing)
    assert len(short.operations) < len(failing.operations) and problem_of(short)
    assert not problem_of(Story(short.server, ()))
