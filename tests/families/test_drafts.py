"""Drafts between layouts: the tokens of a server without one, and as many of them guessed right as
by a server alone.

The tiny checkpoint's draft is its own last layer, so that it guesses well, and its cache decides
how well: right answers alone would prove nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from common.speculative import SpeculativeAlgorithm
from demo.facts import make_question
from tests.e2e.fleet import CHECKPOINT
from tests.engine.drafts import add_copying_nextn, write_eagle3
from tests.engine.tiny_checkpoints import random_prompt
from tests.families.server import TOKEN_MAX, Sequence, Server, Shape, least_nbytes, places_of

pytestmark = pytest.mark.slow

DRAFT_CHECKPOINT = CHECKPOINT.parent / "draft_checkpoint"
ALONE = Shape(page_size=16, chunk=48)
SOURCES = (
    Shape(tp_size=2, page_size=8, chunk=40),
    Shape(pp_size=2, page_size=16, layer_group_count=2),
)
TARGETS = (Shape(page_size=4), Shape(tp_size=2, page_size=32))
LENGTHS = (1, 2, 15, 16, 17, 64, 65, 150)
OUTPUT_COUNT = 48
PROPOSAL_MAX = 3
TOLERANCE = 0.05


@dataclass
class World:
    """A family with a draft, its prompts, and what servers make of them."""

    checkpoint: Path

    def __post_init__(self) -> None:
        self.server = cache(self.new_server)
        self.prompts = [random_prompt(length, seed=length) for length in LENGTHS]
        plain = Server(self.checkpoint, ALONE)
        self.layer_count = plain.layout.stages[-1][1]
        self.outputs = plain.generate(self.prompts, OUTPUT_COUNT)
        self.length_alone = self._length_alone()

    def _length_alone(self) -> float:
        """Tokens of a verification, on average, on a server that computes all by itself."""
        server = self.new_server(ALONE)
        before = Count.of(server)
        assert server.generate(self.prompts, OUTPUT_COUNT) == self.outputs
        return Count.of(server).since(before)

    def new_server(
        self,
        shape: Shape,
        checkpoint_max: int | None = None,
        host_share: float = 0.0,
        token_max: int = TOKEN_MAX,
    ) -> Server:
        return Server(
            self.checkpoint,
            shape,
            checkpoint_max,
            host_share,
            proposal_max=PROPOSAL_MAX,
            algorithm=SpeculativeAlgorithm.NEXTN,
            token_max=token_max,
        )


@pytest.fixture(scope="module", params=["deepseek_v3", "deepseek_v32", "glm_dsa", "qwen3_5"])
def world(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    path = tmp_path_factory.mktemp("draft")
    return World(add_copying_nextn(tiny_checkpoint(request.param), path, noise=0.02))


@dataclass
class Count:
    """Verifications of a server so far, and how many proposals they accepted."""

    steps: int
    accepted: int

    @staticmethod
    def of(server: Server) -> Count:
        total = server.batcher.proposals.total
        return Count(total.step_count, total.accepted_count)

    def since(self, before: Count) -> float:
        """Tokens of a verification, on average."""
        return 1.0 + (self.accepted - before.accepted) / (self.steps - before.steps)


def output_of(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.prompt_count :]


def forget_draft(server: Server, sequences: list[Sequence], layer_count: int) -> None:
    """Zero what layers behind the model's own have cached. layer_count: of the model."""
    for sequence in sequences:
        for place in places_of(server, sequence):
            if place.layer >= layer_count:
                place.write(torch.zeros_like(place.read()))


def test_a_server_alone_gives_the_same_tokens_in_fewer_steps(world: World) -> None:
    assert world.length_alone > 2.0


@pytest.mark.parametrize("source_shape", SOURCES, ids=str)
@pytest.mark.parametrize("target_shape", TARGETS, ids=str)
def test_a_pair_accepts_as_much_as_a_server_alone(
    source_shape: Shape, target_shape: Shape, world: World
) -> None:
    source, target = world.server(source_shape), world.server(target_shape)
    before = Count.of(target)
    given = source.prefill(world.prompts, OUTPUT_COUNT)
    assert any(sequence.first_proposals for sequence in given)
    taken = []
    for sequence in given:
        received, nbytes = target.receive(source, sequence)
        assert nbytes == least_nbytes(target.layout, sequence.computed_count)
        taken.append(received)
    for sequence in given:
        source.close(sequence)
    target.decode()
    assert [output_of(sequence) for sequence in taken] == world.outputs
    length = Count.of(target).since(before)
    assert length == pytest.approx(world.length_alone, rel=TOLERANCE)


def test_without_what_the_draft_cached_of_prompts_less_is_accepted(world: World) -> None:
    source, target = world.server(ALONE), world.server(Shape(page_size=4))
    before = Count.of(target)
    given = source.prefill(world.prompts, OUTPUT_COUNT)
    taken = [target.receive(source, sequence)[0] for sequence in given]
    forget_draft(target, taken, world.layer_count)
    for sequence in given:
        source.close(sequence)
    target.decode()
    assert [output_of(sequence) for sequence in taken] == world.outputs
    length = Count.of(target).since(before)
    assert length < (1.0 - 2 * TOLERANCE) * world.length_alone


@pytest.mark.parametrize("shared", [32, 50, 64])
def test_behind_a_cached_prefix_the_draft_has_the_rows_of_the_whole_prompt(
    shared: int, world: World
) -> None:
    """Also where the prompts part behind a block, whose last row is of the token behind it."""
    beginning = random_prompt(shared, seed=7)
    prompts = [beginning + random_prompt(40, seed=8 + number) for number in range(3)]
    caching, plain = world.new_server(ALONE, checkpoint_max=8), world.server(ALONE)
    cached_counts: list[int] = []
    for prompt in prompts:
        (found,) = caching.prefill([prompt], 2)
        (computed,) = plain.prefill([prompt], 2)
        cached_counts.append(found.cached_count)
        for one, other in zip(places_of(caching, found), places_of(plain, computed), strict=True):
            values, expected = (place.read().view(torch.float32) for place in (one, other))
            assert torch.allclose(values, expected, rtol=1e-4, atol=1e-4), (
                one.component,
                one.layer,
            )
        caching.close(found)
        plain.close(computed)
    # Of a state, the second prompt leaves a checkpoint where it parts from the first.
    assert cached_counts[0] == 0 < cached_counts[2]


@pytest.mark.parametrize("vocab_size", [0, 100])
def test_heads_of_their_own_guess_alike_on_every_layout_and_change_no_token(
    vocab_size: int, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tiny_checkpoint("qwen3")
    head = write_eagle3(path, tmp_path, vocab_size=vocab_size)
    prompts = [random_prompt(length, seed=length) for length in (3, 17, 70)]
    expected = Server(path, ALONE).generate(prompts, 12)

    def server(shape: Shape) -> Server:
        algorithm = SpeculativeAlgorithm.EAGLE3
        return Server(path, shape, proposal_max=PROPOSAL_MAX, algorithm=algorithm, head=head)

    source, target, alone = server(SOURCES[0]), server(TARGETS[1]), server(ALONE)
    assert alone.generate(prompts, 12) == expected
    given, same = source.prefill(prompts, 12), alone.prefill(prompts, 12)
    for one, other in zip(given, same, strict=True):
        shared = min(len(one.first_proposals), len(other.first_proposals))
        assert shared and one.first_proposals[:shared] == other.first_proposals[:shared]
    taken = [target.receive(source, sequence)[0] for sequence in given]
    target.decode()
    assert [output_of(sequence) for sequence in taken] == expected


def test_the_demo_head_guesses_as_well_through_a_pair() -> None:
    """Answers, and what the model goes on with: the head needs the facts to guess it."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    texts = [make_question(number, number).prompt for number in (12, 16, 20, 24)]
    prompts = [tokenizer.encode(text).ids for text in texts]
    plain = Server(CHECKPOINT, ALONE).generate(prompts, 24)

    def server(shape: Shape) -> Server:
        algorithm = SpeculativeAlgorithm.EAGLE3
        return Server(CHECKPOINT, shape, proposal_max=2, algorithm=algorithm, head=DRAFT_CHECKPOINT)

    def accepted_behind(source: Server, target: Server, *, is_whole: bool) -> float:
        given = source.prefill(prompts, 24)
        taken = [target.receive(source, sequence)[0] for sequence in given]
        if not is_whole:
            forget_draft(target, taken, layer_count)
        target.decode()
        assert [output_of(sequence) for sequence in taken] == plain
        return Count.of(target).since(Count(0, 0))

    alone, source = server(ALONE), server(SOURCES[0])
    layer_count = alone.layout.stages[-1][1] - 1
    assert alone.generate(prompts, 24) == plain
    length = Count.of(alone).since(Count(0, 0))
    assert length > 1.8
    whole = accepted_behind(source, server(TARGETS[0]), is_whole=True)
    assert whole == pytest.approx(length, rel=TOLERANCE)
    assert accepted_behind(source, server(TARGETS[0]), is_whole=False) < 0.9 * length
