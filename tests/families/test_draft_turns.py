"""Drafts behind all that a cache goes through: they accept as much as those of a cold server.

Caches that are given up and computed again, leave the pool for host memory and come back, or go
back to where prompts are computed. Answers are right without a draft's rows, so what counts is how
much of the guesses is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.prefix_digests import DIGEST_TOKENS
from common.request import SamplingParams
from common.scheduling import host_tier
from tests.engine.drafts import add_copying_nextn
from tests.engine.tiny_checkpoints import random_prompt
from tests.families.server import (
    Sequence,
    Server,
    Shape,
    digests_of,
    greedy,
    least_nbytes,
)
from tests.families.test_drafts import (
    ALONE,
    OUTPUT_COUNT,
    SOURCES,
    TOLERANCE,
    Count,
    World,
    output_of,
)
from tests.families.test_turns import CHECKPOINT_MAX, check_nothing_is_left, forget_all, spoil_free
from tests.families.tier import Tier
from tests.families.turns import Turned, give_back, turn, turn_alone

pytestmark = pytest.mark.slow

PAGED = Shape(page_size=4, chunk=40)
CROWDED_TOKEN_MAX = 400
"""Of a pool that has room for all prompts, and for a fifth of the answers to them."""


@pytest.fixture(scope="module", params=["deepseek_v3", "glm_dsa", "qwen3_5"])
def world(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    path = tmp_path_factory.mktemp("draft")
    return World(add_copying_nextn(tiny_checkpoint(request.param), path, noise=0.02))


def check_accepts(server: Server, before: Count, length: float) -> None:
    """At least as much since then as so many tokens a verification, within the tolerance. It may be
    more: a token that comes of a prompt is not verified, and may be one that is hard to guess."""
    found = Count.of(server).since(before)
    assert found > (1.0 - TOLERANCE) * length


# ---- retraction ----------------------------------------------------------------------------------


def reopen(server: Server, sequence: Sequence, token_ids: list[int]) -> Sequence:
    """Compute what a sequence has, tokens that were drawn included."""
    digests = digests_of(token_ids, server.lookahead)
    match = server.account.match(digests, token_ids, len(token_ids) - 1)
    opened = server.account.open(
        server.take_id(), token_ids, sequence.prompt_count, sequence.sampling, digests, match
    )
    assert opened is not None
    server.batcher.add(opened)
    return opened


def test_what_was_retracted_is_computed_again_and_accepts_as_much(world: World) -> None:
    server = world.new_server(PAGED, token_max=CROWDED_TOKEN_MAX)
    sequences = [server.open(prompt, OUTPUT_COUNT) for prompt in world.prompts]
    assert server.decode(lambda one: reopen(server, one, one.token_ids)) > 1
    assert [output_of(sequence) for sequence in sequences] == world.outputs
    check_accepts(server, Count(0, 0), world.length_alone)


@pytest.mark.parametrize("source_shape", SOURCES, ids=str)
def test_what_was_retracted_comes_again_and_accepts_as_much(
    source_shape: Shape, world: World
) -> None:
    source = world.server(source_shape)
    target = world.new_server(PAGED, token_max=CROWDED_TOKEN_MAX)

    def bring_back(sequence: Sequence) -> None:
        given = reopen(source, sequence, list(sequence.token_ids))
        source.compute([given])
        received, _ = target.receive(source, given)
        source.close(given)
        sequence.token_ids.append(given.token_ids[-1])
        received.token_ids = sequence.token_ids
        if target.batcher.limits.finish_of(received) is not None:
            target.batcher.remove(received)

    given = source.prefill(world.prompts, OUTPUT_COUNT)
    taken = [target.receive(source, sequence)[0] for sequence in given]
    for sequence in given:
        source.close(sequence)
    assert target.decode(bring_back) > 1
    assert [output_of(sequence) for sequence in taken] == world.outputs
    check_accepts(target, Count(0, 0), world.length_alone)


# ---- turns ---------------------------------------------------------------------------------------


@dataclass
class Talks:
    """Conversations of two turns. Their first answers end before, at and behind ends of blocks.

    outputs: of each turn, of a server without a draft. length: tokens of a verification in the
    second turn, of a pair that has nothing of the first one.
    """

    prompts: list[list[list[int]]]
    samplings: list[list[SamplingParams]]
    outputs: list[list[list[int]]]
    length: float

    @staticmethod
    def of(world: World) -> Talks:
        talks = Talks([world.prompts], [], [], 0.0)
        plain = Server(world.checkpoint, ALONE)
        counts = [20 + index for index in range(len(world.prompts))], [OUTPUT_COUNT] * 8
        for index in range(2):
            talks.samplings.append([greedy(count) for count in counts[index]])
            turned = turn_alone(plain, talks.prompts[index], talks.samplings[index])
            talks.outputs.append([one.output for one in turned])
            talks.prompts.append(talks.goes_on(index))
        source, target = world.new_server(SOURCES[0]), world.new_server(PAGED)
        talks.check(turn(source, target, talks.prompts[1], talks.samplings[1]), 1)
        talks.length = Count.of(target).since(Count(0, 0))
        return talks

    def goes_on(self, index: int) -> list[list[int]]:
        """The prompts behind a turn."""
        both = zip(self.prompts[index], self.outputs[index], strict=True)
        return [
            [*prompt, *output, *random_prompt(1 + 3 * place, seed=60 + place)]
            for place, (prompt, output) in enumerate(both)
        ]

    def check(self, turned: list[Turned], index: int) -> None:
        assert [one.output for one in turned] == self.outputs[index]


@pytest.fixture(scope="module")
def talks(world: World) -> Talks:
    return Talks.of(world)


@pytest.mark.parametrize("source_shape", SOURCES, ids=str)
def test_a_turn_behind_a_cache_that_came_back_computes_what_is_new_and_accepts_as_much(
    source_shape: Shape, world: World, talks: Talks
) -> None:
    computing = world.new_server(source_shape, CHECKPOINT_MAX)
    generating = world.new_server(PAGED, CHECKPOINT_MAX)
    talks.check(turn(computing, generating, talks.prompts[0], talks.samplings[0]), 0)
    ended: list[int] = []
    for prompt, output in zip(talks.prompts[0], talks.outputs[0], strict=True):
        returned = give_back(generating, computing, [*prompt, *output])
        # Of the last token of an answer there is no cache.
        assert returned.token_count == len(prompt) + len(output) - 1
        nbytes = least_nbytes(computing.layout, returned.token_count, returned.start)
        assert returned.nbytes == nbytes
        ended.append(returned.token_count)
    forget_all(generating)
    for server in (generating, computing):
        spoil_free(server)
    before = Count.of(generating)
    turned = turn(computing, generating, talks.prompts[1], talks.samplings[1])
    assert [one.cached_count for one in turned] == ended
    assert any(count % DIGEST_TOKENS == 0 for count in ended)
    talks.check(turned, 1)
    check_accepts(generating, before, talks.length)
    check_nothing_is_left(computing, generating)


def test_a_turn_behind_host_memory_accepts_as_much(
    world: World, talks: Talks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both sides of a pair; in the pool there is nothing but what came back."""
    monkeypatch.setattr(host_tier, "LOADED_TOKENS_MIN", 1)
    shapes = SOURCES[0], PAGED
    servers = [world.new_server(shape, CHECKPOINT_MAX, host_share=1.0) for shape in shapes]
    tiers = list(map(Tier, servers))
    talks.check(turn(*servers, talks.prompts[0], talks.samplings[0]), 0)
    for server, tier in zip(servers, tiers, strict=True):
        tier.empty_pool()
        assert server.account.cache is not None and not server.account.cache.tree.block_count
        spoil_free(server)
    for prompt in talks.prompts[1]:
        tiers[0].load(prompt, len(prompt) - 1)
        tiers[1].load(prompt, len(prompt), is_received=True)
    before = Count.of(servers[1])
    turned = turn(*servers, talks.prompts[1], talks.samplings[1])
    talks.check(turned, 1)
    check_accepts(servers[1], before, talks.length)
    assert all(tier.scheduled.counters["host_loaded_tokens"] for tier in tiers)
    check_nothing_is_left(*servers)
