"""Every family verifies proposals: the same tokens, and afterwards the same cache, as without.

Pools begin as NaN, and prompts of every border of the family decode together, each with proposals
of its own, right and wrong ones in every order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from common.engine.speculation.ngram import NgramProposer
from tests.engine.guided import GuidedProposer
from tests.engine.tiny_checkpoints import VOCAB_SIZE, random_prompt
from tests.families.cases import CASES, Case
from tests.families.server import Sequence, Server, Shape, places_of

pytestmark = pytest.mark.slow

ALONE = Shape(page_size=16, chunk=48)
PAGED = Shape(page_size=4, chunk=40)
ERROR_MAX = 2e-4
"""Of cached values up to some units: products of more rows at once sum up in another order."""


@dataclass
class World:
    """A family, its prompts, and their outputs without proposals."""

    case: Case
    checkpoint: Path
    prompts: list[list[int]] = field(init=False)
    outputs: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.prompts = [random_prompt(length, seed=length) for length in self.case.lengths]
        plain = Server(self.checkpoint, ALONE)
        self.outputs = plain.generate(self.prompts, self.case.output_count)

    def server(self, shape: Shape, proposal_max: int, right: float) -> Server:
        texts = [p + o for p, o in zip(self.prompts, self.outputs, strict=True)]
        return Server(
            self.checkpoint,
            shape,
            proposer=lambda: GuidedProposer(texts, right, VOCAB_SIZE),
            proposal_max=proposal_max,
        )


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.recipe)
def world(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]) -> World:
    case: Case = request.param
    return World(case, tiny_checkpoint(case.recipe))


@pytest.mark.parametrize("proposal_max", [1, 3, 8])
def test_proposals_change_no_token(world: World, proposal_max: int) -> None:
    server = world.server(PAGED, proposal_max, right=0.75)
    assert server.generate(world.prompts, world.case.output_count) == world.outputs
    proposals = server.batcher.proposals
    assert 0 < sum(proposals.accepted_counts) < proposals.total.proposed_count
    server.account.pool.check()
    assert not any(map(server.account.pool.used_count, range(len(server.layout.groups))))


def test_what_was_taken_back_leaves_nothing_in_the_cache(world: World) -> None:
    """In every plane of every layer, in the middle of outputs, and as the next tokens show."""
    plain, server = Server(world.checkpoint, ALONE), world.server(ALONE, 4, right=0.6)
    taken = [server.open(prompt, world.case.output_count) for prompt in world.prompts]
    for _ in range(8):
        server.step(1)
        for sequence in taken:
            if sequence.computed_count == len(sequence.token_ids) - 1 > sequence.prompt_count:
                assert first_difference(plain, server, sequence) is None
    server.decode()
    assert [one.token_ids[one.prompt_count :] for one in taken] == world.outputs


def first_difference(plain: Server, server: Server, sequence: Sequence) -> str | None:
    """Where the cache of a sequence is another one than that of its tokens computed at once."""
    known = sequence.token_ids[: sequence.computed_count]
    (computed,) = plain.prefill([known], 8)
    found = None
    for one, other in zip(places_of(plain, computed), places_of(server, sequence), strict=True):
        values, others = (place.read().contiguous().view(torch.float32) for place in (one, other))
        if not torch.allclose(values, others, rtol=ERROR_MAX, atol=ERROR_MAX):
            found = found or f"{one.component} {one.segment} of layer {one.layer}"
    plain.close(computed)
    return found


def test_ranks_that_share_a_model_agree_on_what_is_accepted(world: World) -> None:
    server = world.server(Shape(tp_size=2, page_size=8, chunk=40), 4, right=0.8)
    assert server.generate(world.prompts, world.case.output_count) == world.outputs


def test_a_sequence_s_own_tokens_are_proposed(world: World) -> None:
    """Greedy output of tiny models soon repeats itself."""
    server = Server(world.checkpoint, ALONE, proposer=NgramProposer, proposal_max=4)
    assert server.generate(world.prompts, world.case.output_count) == world.outputs
