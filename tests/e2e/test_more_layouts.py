"""More layouts than `make test` has time to start servers for, to every layout."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.layout_town import FLAGS, LENGTHS, OUTPUT_COUNT, Town, meet
from tests.e2e.test_layouts import DECODES, PREFILLS
from tests.engine.recipes.recipe import DEFAULT_ROPE
from tests.engine.tiny_checkpoints import Recipe, Reference, build_checkpoint, random_prompt

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.soak]

MORE_PREFILLS = {
    "tp2 page32": ("--tp-size", "2", "--page-size", "32"),
    "tp4": ("--tp-size", "4"),
    "pp2": ("--pp-size", "2", "--layer-group-count", "2"),
}
MORE_DECODES = {
    "pp2": ("--pp-size", "2"),
    "tp2": ("--tp-size", "2"),
    "page64": ("--page-size", "64"),
}
ALL_PREFILLS = PREFILLS | MORE_PREFILLS
ALL_DECODES = DECODES | MORE_DECODES
PAIRS = [
    (prefill, decode)
    for prefill, decode in product(ALL_PREFILLS, ALL_DECODES)
    if prefill in MORE_PREFILLS or decode in MORE_DECODES
]


@pytest.fixture(scope="module")
def town(fleet: Fleet, tiny_checkpoint: Callable[[str], Path]) -> Town:
    return Town.start(fleet, tiny_checkpoint("qwen3"), ALL_PREFILLS, ALL_DECODES)


@pytest.mark.parametrize(("prefill", "decode"), PAIRS, ids=[f"{p} to {d}" for p, d in PAIRS])
def test_tokens_equal_the_reference(fleet: Fleet, town: Town, prefill: str, decode: str) -> None:
    town.check_pair(fleet, prefill, decode)


def test_tp3_hands_six_heads_to_tp2(tmp_path_factory: pytest.TempPathFactory) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 32}
    recipe = Recipe("Qwen3ForCausalLM", {"rope_parameters": DEFAULT_ROPE, **heads}, seed=6)
    checkpoint = build_checkpoint(recipe, tmp_path_factory.mktemp("six heads"))
    with Fleet(tmp_path_factory.mktemp("six"), checkpoint) as fleet:
        prefill = fleet.prefill(*FLAGS, "--tp-size", "3")
        decode = fleet.decode([prefill], *FLAGS, "--tp-size", "2")
        fleet.wait_ready()
        oracle = Reference.load(checkpoint)
        for room, length in enumerate(LENGTHS, 1):
            tokens = meet(fleet, prefill, decode, room, length)
            assert tokens == oracle.greedy(random_prompt(length, seed=length), OUTPUT_COUNT)
