"""Every family goes on from what was in host memory as if it had never left the pool.

Between turns all of it is saved, and every free page of the pool is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from common.scheduling import host_tier
from tests.engine.tiny_checkpoints import random_prompt
from tests.families.cases import CASES, Case
from tests.families.server import Server, greedy
from tests.families.test_turns import (
    CHECKPOINT_MAX,
    Checked,
    World,
    check_nothing_is_left,
    spoil_free,
    talks_at_borders,
    write_script,
)
from tests.families.tier import Tier
from tests.families.turns import turn_alone

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.recipe)
def world(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]) -> World:
    case: Case = request.param
    return World(case, tiny_checkpoint(case.recipe))


def test_turns_go_on_from_host_memory_as_if_nothing_had_left_the_pool(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two turns through a pair, one on the decode side alone: found and moved is what would be."""
    monkeypatch.setattr(host_tier, "LOADED_TOKENS_MIN", 1)
    shapes = world.case.pairs[len(world.case.recipe) % len(world.case.pairs)]
    source, target = (Server(world.checkpoint, one, CHECKPOINT_MAX, 1.0) for one in shapes)
    tiers = Tier(source), Tier(target)
    pair = Checked(world, source, target)
    script = write_script(world, talks_at_borders((source, target), world.case.recipe, 3))
    turns = zip(script.prompts, script.samplings, script.outputs, strict=True)
    for index, (prompts, samplings, outputs) in enumerate(turns):
        for server, tier in zip((source, target), tiers, strict=True):
            tier.empty_pool()
            assert server.account.cache is not None and not server.account.cache.tree.block_count
            spoil_free(server)
        is_alone = index == 2
        for prompt in prompts:
            tiers[0].load(prompt, len(prompt) - 1)
            most = len(prompt) - is_alone
            tiers[1].load(prompt, most, is_received=not is_alone)
        check = pair.check_turn_alone if is_alone else pair.check_turn
        check(prompts, samplings, outputs)
    assert all(tier.scheduled.counters["host_loaded_tokens"] for tier in tiers)
    check_nothing_is_left(source, target)


def test_what_has_changed_in_host_memory_is_computed_again(world: World) -> None:
    """One bit of every page of a group; a conversation for each group, and one without a flip."""
    shape = world.case.pairs[len(world.case.recipe) % len(world.case.pairs)][1]
    server = Server(world.checkpoint, shape, CHECKPOINT_MAX, 1.0)
    tier, samplings = Tier(server), [greedy(8)]
    for group in (*range(len(server.layout.groups)), None):
        prompt = [1 + (group or 0), *random_prompt(80, seed=900 + (group or 0))]
        (first,) = turn_alone(server, [prompt], samplings)
        goes_on = [*prompt, *first.output, 9]
        expected = world.cold([goes_on], samplings)
        tier.empty_pool()
        if group is not None:
            tier.flip(group)
        tier.load(goes_on, len(goes_on) - 1)
        spoil_free(server)
        (second,) = turn_alone(server, [goes_on], samplings)
        assert [second.output] == expected
        assert second.cached_count == (0 if group is not None else len(prompt) + 7)
        check_nothing_is_left(server)
    assert tier.scheduled.counters["host_failed_loads"] >= len(server.layout.groups)
