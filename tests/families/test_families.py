"""Every family between layouts: right tokens, least bytes, and nothing sent that does not matter.

The ranks of both servers are threads here; `tests/e2e` has the same with real processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import pytest
import torch

from tests.engine.tiny_checkpoints import Reference, random_prompt
from tests.families.cases import CASES, Case
from tests.families.digests import digests_found, digests_sent, first_difference
from tests.families.server import Place, Sequence, Server, Shape, least_nbytes, places_of

pytestmark = pytest.mark.slow

ALONE = Shape(page_size=16, chunk=48)


@dataclass
class World:
    """A family's servers, made when first asked for, and transformers' answers."""

    case: Case
    checkpoint: Path

    def __post_init__(self) -> None:
        self.server = cache(lambda shape: Server(self.checkpoint, shape))
        self.prompts = [random_prompt(length, seed=length) for length in self.case.lengths]

    @cached_property
    def alone(self) -> list[list[int]]:
        """What a server alone answers; `expected` says whether it is right."""
        return self.server(ALONE).generate(self.prompts, self.case.output_count)

    @cached_property
    def expected(self) -> list[list[int]]:
        reference = Reference.load(self.checkpoint)
        return list(map(reference.continues, self.prompts, self.alone))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.recipe)
def world(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]) -> World:
    case: Case = request.param
    return World(case, tiny_checkpoint(case.recipe))


def output_of(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.prompt_count :]


def test_a_server_alone_gives_the_tokens_of_the_reference(world: World) -> None:
    assert {len(output) for output in world.alone} == {world.case.output_count}
    assert world.alone == world.expected


def test_every_pair_gives_the_tokens_of_the_reference_for_the_least_bytes(world: World) -> None:
    case = world.case
    for source_shape, target_shape in case.pairs:
        source, target = world.server(source_shape), world.server(target_shape)
        given = source.prefill(world.prompts, case.output_count)
        taken = []
        for sequence in given:
            received, nbytes = target.receive(source, sequence)
            assert nbytes == least_nbytes(target.layout, sequence.computed_count)
            if len(target.pools) == 1:
                assert nbytes == case.nbytes(sequence.computed_count), sequence.computed_count
            taken.append(received)
        # The longest one, before anything is decoded.
        sent = digests_sent(source, given[-1], target)
        assert sent == digests_found(source, target, taken[-1])
        for sequence in given:
            source.close(sequence)
        target.decode()
        pair = f"{source_shape} to {target_shape}"
        assert [output_of(sequence) for sequence in taken] == world.expected, pair
        for server in (source, target):
            server.account.pool.check()
            assert not any(map(server.account.pool.used_count, range(len(server.layout.groups))))


def test_a_cache_that_was_handed_over_goes_on_as_one_that_was_computed_here(world: World) -> None:
    """Bit for bit, in every plane of every layer, after tokens were decoded on both."""
    # Pages of one size: how much padding is summed up along changes the last bit of a sum.
    here, there = world.server(ALONE), world.server(replace(ALONE, layer_group_count=2))
    prompts, count = world.prompts[-3:], 20
    computed = [here.open(prompt, count + 2) for prompt in prompts]
    while any(sequence.output_count == 0 for sequence in computed):
        here.step(1)
    # All of them have to be equally far, whenever their last chunk was.
    taken = [there.receive(here, sequence)[0] for sequence in computed]
    assert [s.output_count for s in computed] == [s.output_count for s in taken]
    here.step(8)
    there.step(8)
    for own, received in zip(computed, taken, strict=True):
        assert own.token_ids == received.token_ids
        for mine, other in zip(places_of(here, own), places_of(there, received), strict=True):
            assert torch.equal(mine.read(), other.read()), (mine.component, mine.layer)
    for server, sequences in ((here, computed), (there, taken)):
        for sequence in sequences:
            server.batcher.remove(sequence)


def test_every_plane_that_is_transferred_decides_tokens(world: World) -> None:
    """One sequence per plane, all of the same prompt, each with noise in that one plane."""
    case = world.case
    source, target = world.server(ALONE), world.server(Shape(page_size=4, chunk=48))
    prompt_index = len(case.lengths) - 1
    (given,) = source.prefill([world.prompts[prompt_index]], case.output_count)
    probe, _ = target.receive(source, given)
    sent = digests_sent(source, given, target)
    count = len(places_of(target, probe))
    taken = [probe] + [target.receive(source, given)[0] for _ in range(count - 1)]
    names = []
    generator = torch.Generator().manual_seed(1)
    for index, sequence in enumerate(taken):
        place = places_of(target, sequence)[index]
        names.append(f"{place.component} {place.segment} of layer {place.layer}")
        spoil_one_byte(place, index)
        found = first_difference(target, given.computed_count, sent,
                                 digests_found(source, target, sequence))  # fmt: skip
        assert found is not None, f"a byte of {names[-1]} was not compared"
        assert (found.component, found.segment, found.layer) == (
            place.component,
            place.segment,
            place.layer,
        )
        spoil(place, generator)
    target.decode()
    source.close(given)
    unchanged = [
        name
        for name, sequence in zip(names, taken, strict=True)
        if output_of(sequence) == world.expected[prompt_index]
    ]
    assert unchanged == [], "sent, but nobody reads it"


def spoil_one_byte(place: Place, seed: int) -> None:
    values = place.read()
    values.view(-1)[seed * 7919 % values.numel()] ^= 1
    place.write(values)


def spoil(place: Place, generator: torch.Generator) -> None:
    values = place.read().view(torch.float32)
    noise = torch.randn(values.shape, generator=generator) * max(1.0, float(values.std()))
    place.write(noise.view(torch.uint8))
