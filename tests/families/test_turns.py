"""Every family keeps prompts: turns and branches of conversations give a cold server's tokens.

Nothing is computed twice and nothing is sent twice: what each turn finds, and the bytes that it
moves, are compared with what the tokens alone say. Whatever is not found is NaN meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from common.layout.component import LiveKind
from common.request import SamplingParams
from tests.engine.tiny_checkpoints import random_prompt
from tests.families.cases import CASES, Case
from tests.families.server import Server, Shape, greedy, least_nbytes
from tests.families.turns import (
    Kept,
    Turned,
    give_back,
    pages_found,
    pages_kept,
    spoil,
    spoil_all_but,
    turn,
    turn_alone,
)

pytestmark = pytest.mark.slow

COLD = Shape(page_size=16, chunk=48)
CHECKPOINT_MAX = 64
TALK_COUNT = 4
LENGTH_MAX = 130
OUTPUT_MAX = 20
NEW_COUNTS = (0, 1, 2, 17)
SAMPLED_INDEX = 1
"""Of the conversations, the one that is not greedy."""


@dataclass
class Talk:
    """A conversation. more: what the user adds, first turn first. output_counts: of each turn."""

    more: list[list[int]]
    output_counts: list[int]
    is_sampled: bool

    def sampling(self, index: int) -> SamplingParams:
        count = self.output_counts[index]
        if not self.is_sampled:
            return greedy(count)
        return SamplingParams(
            max_new_tokens=count, temperature=0.8, top_p=0.9, ignore_eos=True, seed=11
        )


@dataclass
class World:
    """A family's servers, made when first asked for."""

    case: Case
    checkpoint: Path

    def __post_init__(self) -> None:
        self.server = cache(lambda shape: Server(self.checkpoint, shape, CHECKPOINT_MAX))
        self.cold_server = Server(self.checkpoint, COLD)

    def pair(self) -> tuple[Server, Server]:
        """The first and the last of the layouts, which differ most, with nothing kept."""
        pairs = self.case.pairs
        source, target = map(self.server, pairs[len(self.case.recipe) % len(pairs)])
        for server in (source, target):
            assert server.account.flush_cache()
        return source, target

    def cold(self, prompts: list[list[int]], samplings: list[SamplingParams]) -> list[list[int]]:
        """What a server answers that keeps nothing."""
        return [one.output for one in turn_alone(self.cold_server, prompts, samplings)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.recipe)
def world(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]) -> World:
    case: Case = request.param
    return World(case, tiny_checkpoint(case.recipe))


def borders(servers: tuple[Server, Server]) -> list[int]:
    """Token counts at which something ends: pages, blocks, windows, chunks."""
    found = set()
    for server in servers:
        cache = server.account.cache
        assert cache is not None
        found |= {cache.block_tokens, 2 * cache.block_tokens, server.shape.chunk}
        for group in server.layout.groups:
            if group.live.kind is not LiveKind.SLOT:
                found |= {group.page_tokens, group.live.size, group.live.size + group.page_tokens}
    return sorted(count for count in found if 0 < count <= LENGTH_MAX)


def talks_at_borders(servers: tuple[Server, Server], seed: str, turn_count: int) -> list[Talk]:
    """Prompts, and their answers, that end one before, at and one behind borders. All differ from
    the first token on."""
    rng = random.Random(seed)
    ends = borders(servers)
    talks: list[Talk] = []
    for index in range(TALK_COUNT):
        length = max(1, rng.choice(ends) + index % 3 - 1)
        end = rng.choice([end for end in ends if length < end <= length + OUTPUT_MAX] or [length])
        # The last token of an answer is in no cache.
        first_count = max(1, end - length + 1 + rng.choice((-1, 0, 1)))
        more = [[index + 1, *random_prompt(length, seed=rng.randrange(10**6))][:length]]
        for _ in range(turn_count - 1):
            count = rng.choice(NEW_COUNTS)
            more.append(random_prompt(count, seed=rng.randrange(10**6)) if count else [])
        counts = [first_count] + [rng.randrange(1, 9) for _ in range(turn_count - 1)]
        talks.append(Talk(more, counts, index == SAMPLED_INDEX))
    return talks


@dataclass
class Script:
    """All prompts of some conversations, and a cold server's answers. Per turn, then per talk."""

    prompts: list[list[list[int]]]
    samplings: list[list[SamplingParams]]
    outputs: list[list[list[int]]]


def write_script(world: World, talks: list[Talk]) -> Script:
    script = Script([], [], [])
    so_far: list[list[int]] = [[] for _ in talks]
    for index in range(len(talks[0].more)):
        prompts = [[*one, *talk.more[index]] for one, talk in zip(so_far, talks, strict=True)]
        samplings = [talk.sampling(index) for talk in talks]
        outputs = world.cold(prompts, samplings)
        so_far = [[*one, *output] for one, output in zip(prompts, outputs, strict=True)]
        script.prompts.append(prompts)
        script.samplings.append(samplings)
        script.outputs.append(outputs)
    return script


def spoil_free(server: Server) -> None:
    """Fill every page that nobody has with NaN."""
    spoil_all_but(server, pages_kept(server))


@dataclass
class Checked:
    """A pair whose every turn is compared with what the tokens alone say of it."""

    world: World
    source: Server
    target: Server

    def __post_init__(self) -> None:
        self.source_kept, self.target_kept = Kept.of(self.source), Kept.of(self.target)

    def check_turn(
        self, prompts: list[list[int]], samplings: list[SamplingParams], outputs: list[list[int]]
    ) -> None:
        turned = turn(self.source, self.target, prompts, samplings)
        assert [one.output for one in turned] == outputs
        for prompt, one in zip(prompts, turned, strict=True):
            assert one.cached_count in self.source_kept.starts(prompt), len(prompt)
            assert one.start == self.target_kept.blocks(prompt, len(prompt)), len(prompt)
            self.source_kept.note_computed(prompt, one.cached_count)
            self.target_kept.note_received(prompt)
            self.target_kept.lists.append([*prompt, *one.output[:-1]])
            self._check_nbytes(len(prompt), one)

    def _check_nbytes(self, token_count: int, one: Turned) -> None:
        layout = self.target.layout
        assert one.nbytes == least_nbytes(layout, token_count, one.start), token_count
        if len(layout.ranks) == 1:
            assert one.nbytes == self.world.case.rest_nbytes(token_count, one.start), token_count

    def check_turn_alone(
        self, prompts: list[list[int]], samplings: list[SamplingParams], outputs: list[list[int]]
    ) -> None:
        turned = turn_alone(self.target, prompts, samplings)
        assert [one.output for one in turned] == outputs
        for prompt, one in zip(prompts, turned, strict=True):
            assert one.cached_count in self.target_kept.starts(prompt), len(prompt)
            self.target_kept.note_computed(prompt, one.cached_count)
            self.target_kept.lists.append([*prompt, *one.output[:-1]])


def check_nothing_is_left(*servers: Server) -> None:
    for server in servers:
        assert server.account.flush_cache()
        server.account.pool.check()
        assert not any(map(server.account.pool.used_count, range(len(server.layout.groups))))


def test_turns_and_branches_give_a_cold_servers_tokens_and_move_only_what_is_new(
    world: World,
) -> None:
    """Two turns through the pair, one on the decode side alone, then branches and repeats."""
    source, target = world.pair()
    pair = Checked(world, source, target)
    talks = talks_at_borders((source, target), world.case.recipe, 3)
    script = write_script(world, talks)
    turns = list(zip(script.prompts, script.samplings, script.outputs, strict=True))
    for prompts, samplings, outputs in turns[:2]:
        spoil_free(source)
        spoil_free(target)
        pair.check_turn(prompts, samplings, outputs)
    spoil_free(target)
    pair.check_turn_alone(*turns[2])
    # One goes on otherwise behind the first answer; the other asks the first prompt once more.
    first = list(zip(script.prompts[0], script.outputs[0], strict=True))
    branches = [[*prompt, *output, 3, 1 + i] for i, (prompt, output) in enumerate(first)]
    for prompts in (branches, script.prompts[0], [[*prompt, 5] for prompt, _ in first]):
        spoil_free(source)
        spoil_free(target)
        samplings = script.samplings[1]
        pair.check_turn(prompts, samplings, world.cold(prompts, samplings))
    # What the last prompts find, and nothing else, is read.
    samplings = script.samplings[2]
    last = [[*prompt, 6] for prompt in branches]
    expected = world.cold(last, samplings)
    for server in (source, target):
        spoil_all_but(server, pages_found(server, last))
    pair.check_turn(last, samplings, expected)
    check_nothing_is_left(source, target)


@pytest.mark.parametrize("turn_count", [3, pytest.param(5, marks=pytest.mark.soak)])
def test_a_turn_is_computed_from_the_end_of_the_answer_that_came_back(
    world: World, turn_count: int
) -> None:
    """Each answer is generated by a server of another layout than the one that computes the next
    turn, and keeps nothing for it. What did not come back is NaN. The first turn is all computed
    where its answer is, so its prompt comes as well."""
    computing, generating = world.pair()
    talks = talks_at_borders((computing, generating), f"back {world.case.recipe}", turn_count)
    script = write_script(world, talks)
    ended: list[int] = []
    for prompts, samplings, outputs in zip(
        script.prompts, script.samplings, script.outputs, strict=True
    ):
        if not ended:
            turned = turn_alone(generating, prompts, samplings)
        else:
            turned = turn(computing, generating, prompts, samplings)
            assert [one.cached_count for one in turned] == ended
        assert [one.output for one in turned] == outputs
        ended = [
            check_returned(generating, computing, [*prompt, *output])
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        forget_all(generating)
        spoil_free(generating)
        spoil_free(computing)
    check_nothing_is_left(computing, generating)


def check_returned(source: Server, target: Server, token_ids: list[int]) -> int:
    """Give back what ended with these tokens; of how many the target has a cache then."""
    returned = give_back(source, target, token_ids)
    # Of the last token of an answer there is no cache.
    assert returned.token_count == len(token_ids) - 1
    nbytes = least_nbytes(target.layout, returned.token_count, returned.start)
    assert returned.nbytes == nbytes
    return returned.token_count


def test_what_was_evicted_between_turns_is_computed_or_sent_again(world: World) -> None:
    source, target = world.pair()
    talks = talks_at_borders((source, target), f"evicted {world.case.recipe}", 4)
    script = write_script(world, talks)
    turns = list(zip(script.prompts, script.samplings, script.outputs, strict=True))
    losses: list[Callable[[], object]] = [
        lambda: None,
        lambda: (forget_checkpoints(source), evict_half(target)),
        lambda: (evict_half(source), forget_checkpoints(target)),
        lambda: (evict_half(target), forget_all(source)),
    ]
    for index, (lose, (prompts, samplings, outputs)) in enumerate(zip(losses, turns, strict=True)):
        lose()
        spoil_free(source)
        spoil_free(target)
        both = (turn_alone(target, prompts, samplings) if index == 2
                else turn(source, target, prompts, samplings))  # fmt: skip
        assert [one.output for one in both] == outputs, index
    check_nothing_is_left(source, target)


@pytest.mark.parametrize("step_count", [1, 9])
def test_what_a_sequence_leaves_that_is_given_up_while_steps_compute_it_is_right(
    world: World, step_count: int
) -> None:
    """In the middle of a prompt, and of an answer. Others go on from what is known of it."""
    _, target = world.pair()
    prompts = [[1 + i, *random_prompt(n, seed=n)] for i, n in enumerate((5, 22, 46, 110))]
    sequences = [target.open(prompt, 40) for prompt in prompts]
    target.step(step_count)
    target.give_up(sequences)
    spoil_free(target)
    goes_on = [[*sequence.token_ids, 9] for sequence in sequences]
    samplings = [greedy(12)] * len(goes_on)
    turned = turn_alone(target, goes_on, samplings)
    assert [one.output for one in turned] == world.cold(goes_on, samplings)
    assert any(one.cached_count for one in turned)
    check_nothing_is_left(target)


def forget_checkpoints(server: Server) -> None:
    cache = server.account.cache
    assert cache is not None
    cache.checkpoints.forget_idle()


def evict_half(server: Server) -> None:
    """Half of what is kept, least recently used first: parts of conversations."""
    pool, cache = server.account.pool, server.account.cache
    assert cache is not None
    counts = range(len(pool.page_counts))
    cache.evict([pool.free_count(group) + pool.used_count(group) // 2 for group in counts])


def forget_all(server: Server) -> None:
    assert server.account.flush_cache()


@pytest.mark.parametrize("is_alone", [False, True])
def test_every_group_of_pages_that_are_found_decides_tokens(world: World, is_alone: bool) -> None:
    """One conversation for every page group of the server that computes, with noise in what it
    finds there; and one without."""
    source, target = world.pair()
    computing = target if is_alone else source
    groups = [None, *range(len(computing.layout.groups))]
    # Both the prompt (37) and its answer (46) end inside a page, a block and its tail.
    prompts = [[1 + i, *random_prompt(36, seed=500 + i)] for i in range(len(groups))]
    short, long = [greedy(10)] * len(groups), [greedy(32)] * len(groups)
    first = turn(source, target, prompts, short)
    goes_on = [[*p, *one.output, 9] for p, one in zip(prompts, first, strict=True)]
    expected = world.cold(goes_on, long)
    for group, prompt in zip(groups, goes_on, strict=True):
        found = pages_found(computing, [prompt])
        if group is not None:
            assert found[group], f"nothing is found of group {group}"
            chosen = [found[group] if g == group else set() for g in range(len(found))]
            spoil(computing, chosen, noise_seed=group + 1)
    if not is_alone:
        forget_all(target)  # it takes over all that comes of the noise
    turned = turn_alone(target, goes_on, long) if is_alone else turn(source, target, goes_on, long)
    outputs = [one.output for one in turned]
    unchanged = [
        g for g, mine, right in zip(groups, outputs, expected, strict=True) if mine == right
    ]
    assert unchanged == [None]
    check_nothing_is_left(source, target)
