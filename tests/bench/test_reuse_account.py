"""What the measurements of prefix reuse hold the servers against, worked out by hand."""

from __future__ import annotations

import json

import pytest

from bench.reuse_account import Least, least_of
from bench.reuse_models import MODELS, ReuseModel, written
from bench.serve.outcome import Outcome
from bench.serve.workload import Ask
from common.engine.models.registry import cache_components, read_model_config
from common.layout.cache_layout import ServerLayout
from common.planner.copies import PairPlan
from common.planner.pairing import TokenRange

SMALL = ReuseModel("small", {}, token_nbytes=10, window=5, window_token_nbytes=3, state_nbytes=7)


def turn_of(number: int, prompt_count: int, output_count: int) -> Outcome:
    ask = Ask(0, 0.0, (), output_count, number)
    return Outcome(ask, 0.0, prompt_count=prompt_count, output_count=output_count)


def test_what_a_turn_before_had_is_not_new() -> None:
    """The answer's last token was drawn, not computed: 20 + 5 - 1 are known, one page of them."""
    outcomes = [turn_of(0, 20, 5), turn_of(1, 40, 5), turn_of(0, 3, 1)]
    assert least_of(SMALL, outcomes[:1]) == Least(20, 200 + 3 * 4 + 7)
    assert least_of(SMALL, outcomes) == Least(
        20 + (40 - 24) + 3, 10 * (20 + 40 - 16 + 3) + 3 * (4 + 4 + 3) + 3 * 7
    )


@pytest.mark.parametrize("model", MODELS, ids=lambda model: str(model.name))
@pytest.mark.parametrize("prompt_count", [100, 511, 512, 1500])
def test_the_bytes_of_a_model_are_those_that_its_layout_moves(
    model: ReuseModel, prompt_count: int
) -> None:
    with written(model) as directory:
        config = read_model_config(directory)
        assert json.loads((directory / "config.json").read_text()) == model.config
    layout = ServerLayout(cache_components(config, "auto"), 1, ((0, config.layer_count),), 16)
    rank = layout.rank(0, 0)
    pages = []
    for group in rank.groups:
        needed = group.group.page_indices(group.group.live.items(prompt_count))
        pages.append((needed.start, list(range(1, len(needed) + 1))))
    plan = PairPlan(rank, rank).plan(pages, pages, TokenRange(0, prompt_count, is_final=True))
    assert plan.total_nbytes == model.new_nbytes(prompt_count, 0)
