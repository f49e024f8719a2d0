"""Sequences that begin behind tokens whose cache others have computed, for every family.

What is whole is shared, all else is copied: slots, tails, windows, and pages that are not full yet.
Each is compared with a sequence that computes everything itself, in chunks with the same borders:
bit for bit, for the kernels see the same numbers then.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from common.protocol.worker import PageCopies, Step
from tests.engine.tiny_checkpoints import random_prompt
from tests.families.cases import CASES
from tests.families.page_copies import (
    Pages,
    Ranks,
    Traced,
    joined,
    private_pages,
    whole_pages,
)
from tests.families.server import Shape

pytestmark = pytest.mark.slow

STARTS = (1, 2, 3, 4, 7, 8, 9, 11, 12, 13, 15, 16, 17, 22, 23, 24, 25, 31, 32, 33, 63, 64, 65, 100)
"""Before, at and behind the ends of pages (8, 32), blocks (4, 16), windows (8, 12, 24), inputs of a
convolution (3), chosen keys (24) and chunks of a recurrence (64)."""

BEHIND = (1, 2, 9, 30)
OUTPUT_COUNT = 14
ALONE = Shape(page_size=8)
CUT = Shape(tp_size=2, pp_size=2, page_size=32, layer_group_count=2)

RanksOf = Callable[[Shape], Ranks]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.recipe)
def ranks_of(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]) -> RanksOf:
    checkpoint = tiny_checkpoint(request.param.recipe)
    return cache(lambda shape: Ranks(checkpoint, shape))


def prompts_behind(starts: tuple[int, ...], seed: int) -> list[list[int]]:
    """For each start, a prompt of some more tokens. Of two seeds, what is before is the same."""
    return [
        random_prompt(start, seed=start)
        + random_prompt(BEHIND[(index + seed) % len(BEHIND)], seed=1000 * seed + start)
        for index, start in enumerate(starts)
    ]


def compute_to(ranks: Ranks, sequences: list[Traced], starts: tuple[int, ...]) -> None:
    """The tokens before the starts, in two chunks each."""
    for stops in ([start // 2 for start in starts], starts):
        pairs = zip(sequences, stops, strict=True)
        ranks.step([(traced, stop) for traced, stop in pairs if stop > traced.computed])


def finish(ranks: Ranks, sequences: list[Traced]) -> None:
    ranks.step([(traced, traced.prompt_count) for traced in sequences])
    ranks.decode(sequences, OUTPUT_COUNT)


def open_from_zero(ranks: Ranks, prompts: list[list[int]], starts: tuple[int, ...]) -> list[Traced]:
    return [
        ranks.open(prompt, ranks.fresh(len(prompt) + OUTPUT_COUNT + 1), 0, start)
        for prompt, start in zip(prompts, starts, strict=True)
    ]


def open_behind(ranks: Ranks, prompt: list[int], start: int, whole: Pages, kept: Pages) -> Traced:
    """A sequence that shares what is whole, and gets copies of the rest with its first chunk."""
    pages = joined(whole, ranks.fresh(len(prompt) + OUTPUT_COUNT + 1, start))
    ranks.copy(kept, pages)
    return ranks.open(prompt, pages, start, start)


def check_equal(begun: list[Traced], alone: list[Traced]) -> None:
    for one, other in zip(begun, alone, strict=True):
        assert not one.has_failed and not other.has_failed, one.start
        assert one.output == other.output, one.start
        assert one.logprobs == other.logprobs, one.start
        assert len(one.logprobs) == len(one.tokens) - one.start - 1


@pytest.mark.parametrize("shape", [ALONE, CUT], ids=str)
def test_a_sequence_that_begins_with_copied_pages_goes_on_as_one_that_computed_them(
    ranks_of: RanksOf, shape: Shape
) -> None:
    """The copies are made in the step that goes on with the sequence they are of, and hold what
    the steps before have left."""
    ranks = ranks_of(shape)
    first = open_from_zero(ranks, prompts_behind(STARTS, 1), STARTS)
    compute_to(ranks, first, STARTS)
    kept = [ranks.private(start) for start in STARTS]
    for traced, pages in zip(first, kept, strict=True):
        ranks.copy(traced.pages, pages)
    finish(ranks, first)
    ranks.forget(first)
    whole = [
        whole_pages(ranks.groups, traced.pages, start)
        for traced, start in zip(first, STARTS, strict=True)
    ]
    # Nothing but this is read, neither of the first sequences nor of the pages to come.
    ranks.spoil_all_but([*whole, *kept])
    prompts = prompts_behind(STARTS, 2)
    begun = [open_behind(ranks, *one) for one in zip(prompts, STARTS, whole, kept, strict=True)]
    finish(ranks, begun)
    alone = open_from_zero(ranks, prompts, STARTS)
    compute_to(ranks, alone, STARTS)
    finish(ranks, alone)
    check_equal(begun, alone)
    ranks.forget(begun + alone)


def test_the_pages_of_a_sequence_that_has_ended_serve_several_others(ranks_of: RanksOf) -> None:
    """They are kept as they are, its output included; who goes on from them copies them."""
    ranks = ranks_of(ALONE)
    prompts = prompts_behind(STARTS[:8], 3)
    ended = open_from_zero(ranks, prompts, STARTS[:8])
    ranks.step([(traced, traced.prompt_count) for traced in ended])
    ranks.decode(ended, 13)
    ranks.forget(ended)
    counts = tuple(traced.computed for traced in ended)
    kept = []
    for traced in ended:
        places = [private_pages(group, traced.computed) for group in ranks.groups]
        kept.append(
            [
                {place: of_group[place] for place in wanted}
                for of_group, wanted in zip(traced.pages, places, strict=True)
            ]
        )
    whole = [whole_pages(ranks.groups, traced.pages, traced.computed) for traced in ended]
    ranks.spoil_all_but([*whole, *kept])
    for seed in (4, 5):
        prompts = [
            [*traced.tokens[: traced.computed], *random_prompt(BEHIND[index % 4], seed=seed)]
            for index, traced in enumerate(ended)
        ]
        begun = [open_behind(ranks, *one) for one in zip(prompts, counts, whole, kept, strict=True)]
        finish(ranks, begun)
        alone = open_from_zero(ranks, prompts, counts)
        # As its cache was computed: the prompt at once, then token by token.
        ranks.step([(a, e.prompt_count) for a, e in zip(alone, ended, strict=True)])
        for _ in range(13):
            ranks.step([(traced, traced.computed + 1) for traced in alone])
        assert tuple(traced.computed for traced in alone) == counts
        finish(ranks, alone)
        check_equal(begun, alone)
        ranks.forget(begun + alone)


def test_every_copied_page_that_holds_something_live_decides_tokens(ranks_of: RanksOf) -> None:
    """One sequence for every copied page, with NaN in that one page; and one without."""
    ranks = ranks_of(ALONE)
    starts = (3, 12, 24, 35, 70)
    first = open_from_zero(ranks, prompts_behind(starts, 6), starts)
    compute_to(ranks, first, starts)
    begun: list[tuple[Traced, bool, str]] = []
    spoiled: list[tuple[int, int]] = []
    plans = []
    for traced, start in zip(first, starts, strict=True):
        places = [
            (index, place)
            for index, group in enumerate(ranks.groups)
            for place in private_pages(group, start)
        ]
        for spot in [None, *places]:
            kept = ranks.private(start)
            ranks.copy(traced.pages, kept)
            plans.append((traced, start, kept, spot))
            if spot is not None:
                spoiled.append((spot[0], kept[spot[0]][spot[1]]))
    finish(ranks, first)
    for group, page in spoiled:
        ranks.spoil(group, page)
    for traced, start, kept, spot in plans:
        prompt = [*traced.tokens[:start], 7, 8, 9]
        whole = whole_pages(ranks.groups, traced.pages, start)
        one = open_behind(ranks, prompt, start, whole, kept)
        begun.append((one, spot is not None and holds_live(ranks, *spot, start), f"{spot}"))
    finish(ranks, [one for one, _, _ in begun])
    expected: dict[int, list[int]] = {}
    for one, is_read, spot_name in begun:
        output = expected.setdefault(one.start, one.output)
        has_changed = one.has_failed or one.output != output
        assert has_changed == is_read, (one.start, spot_name)
    ranks.forget(first + [one for one, _, _ in begun])


def holds_live(ranks: Ranks, group: int, place: int, count: int) -> bool:
    """Whether an item that a sequence behind `count` tokens needs lies in this page."""
    page_group = ranks.groups[group]
    return place in page_group.page_indices(page_group.live.items(count))


def test_a_step_that_only_copies_is_not_answered_before_every_rank_has_copied(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    """One rank answers for all: behind its answer the pages may get other owners."""
    ranks = Ranks(tiny_checkpoint("llama"), Shape(tp_size=2, pp_size=2))
    rows = [pool.buffers[0].view(-1, pool.layout.groups[0].page_nbytes) for pool in ranks.pools]
    for index, row in enumerate(rows):
        row[3] = index
    step = Step(step_id=1, copies=[PageCopies(0, [3], [5])])
    *others, last = ranks.runners
    with ThreadPoolExecutor(len(rows)) as threads:
        early = [threads.submit(runner.run, step) for runner in others]
        while ranks.meeting.all_ranks.n_waiting < len(others):
            assert not any(one.done() for one in early), "answered without the last rank"
        assert not any(one.done() for one in early)
        assert threads.submit(last.run, step).result().request_ids == []
        assert all(one.result().step_id == 1 for one in early)
    assert [row[5].unique().tolist() for row in rows] == [[0], [1], [2], [3]]
