"""A pair with a draft: the tokens of servers without one, guessed as well as by a server alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.fleet import CHECKPOINT, Body, Fleet, Node, error_message, reply_of
from tests.e2e.replies import Reply, accept_length
from tests.engine.drafts import add_copying_nextn
from tests.engine.tiny_checkpoints import VOCAB_SIZE, Reference, random_prompt

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

FLAGS = ("--dtype", "float32", "--tokenizer-path", str(CHECKPOINT), "--context-length", "400")
# A random model is sure of nothing.
DRAFT = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3")
DRAFT += ("--speculative-draft-p-min", "0")
LENGTHS = (5, 16, 33, 64, 90)
OUTPUT_COUNT = 40
GREEDY: Body = {"temperature": 0, "max_new_tokens": OUTPUT_COUNT, "ignore_eos": True}
DRAWN: Body = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 7}
TOLERANCE = 0.05
SMALL_POOL_TOKENS = 512
CROWD = range(20, 60, 4)
"""Lengths of prompts that find room together, and whose answers don't."""

SHORT: Body = {"temperature": 0, "max_new_tokens": 40, "stop_token_ids": list(range(VOCAB_SIZE))}
SHORT_COUNT = 40


@dataclass
class House:
    """second: a decode server as the first one; alone: with the draft; other: one without."""

    prefill: Node
    decode: Node
    second: Node
    alone: Node
    other: Node
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def house(
    fleet: Fleet, tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> House:
    path = tmp_path_factory.mktemp("draft")
    fleet.model_path = add_copying_nextn(tiny_checkpoint("deepseek_v3"), path, noise=0.02)
    prefill = fleet.prefill(*FLAGS, *DRAFT, "--tp-size", "2", "--chunked-prefill-size", "48")
    flags = ("--page-size", "8", "--verify-transfer", "full")
    flags += ("--max-total-tokens", str(SMALL_POOL_TOKENS))
    decode = fleet.decode([prefill], *FLAGS, *DRAFT, *flags)
    second = fleet.decode([prefill], *FLAGS, *DRAFT, name="second")
    alone = fleet.decode([], *FLAGS, *DRAFT, name="alone")
    other = fleet.decode([prefill], *FLAGS, name="other")
    oracle = Reference.load(fleet.model_path)
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    expected = [oracle.greedy(prompt, OUTPUT_COUNT) for prompt in prompts]
    for node in (prefill, decode, second, alone):
        node.wait_ready()
    return House(prefill, decode, second, alone, other, prompts, expected)


def ask(fleet: Fleet, node: Node, prompts: list[list[int]], sampling: Body) -> list[list[int]]:
    return [reply.output_ids for reply in replies(fleet, node, prompts, sampling)]


def replies(fleet: Fleet, node: Node, prompts: list[list[int]], sampling: Body) -> list[Reply]:
    pending = [
        fleet.in_background(node, {"input_ids": prompt, "sampling_params": sampling})
        for prompt in prompts
    ]
    return [reply_of(future.result()) for future in pending]


def test_greedy_and_drawn_outputs_are_those_without_a_draft(fleet: Fleet, house: House) -> None:
    assert ask(fleet, house.alone, house.prompts, GREEDY) == house.expected
    assert ask(fleet, house.decode, house.prompts, GREEDY) == house.expected
    drawn = ask(fleet, house.decode, house.prompts, DRAWN)
    assert drawn == ask(fleet, house.alone, house.prompts, DRAWN)
    assert drawn != [tokens[:24] for tokens in house.expected]


def test_a_pair_accepts_as_much_as_a_server_alone_after_prefix_hits_too(
    fleet: Fleet, house: House
) -> None:
    """Prompts that go on from earlier ones and from their answers, or leave them inside."""
    turns = [
        prompt[: len(prompt) - cut] + more + random_prompt(9, seed=cut + len(prompt))
        for prompt, answer in zip(house.prompts, house.expected, strict=True)
        for cut, more in ((0, answer), (2, []))
    ]
    found = [replies(fleet, node, turns, GREEDY) for node in (house.decode, house.alone)]
    outputs = [[reply.output_ids for reply in of_node] for of_node in found]
    assert outputs[0] == outputs[1]
    assert any(reply.meta_info.cached_tokens_details.decode for reply in found[0])
    lengths = [accept_length(of_node) for of_node in found]
    assert lengths[0] == pytest.approx(lengths[1], rel=TOLERANCE)
    assert lengths[0] > 2.0


def test_a_turn_guesses_as_well_behind_an_answer_that_came_back(fleet: Fleet, house: House) -> None:
    """The next turn goes to another decode server: what it finds is the prefill server's."""
    prompts = [random_prompt(length, seed=1000 + length) for length in (16, 33, 64)]
    kept = house.prefill.info().counters["returns_kept"]
    answers = ask(fleet, house.decode, prompts, GREEDY)
    house.prefill.wait_counted("returns_kept", kept + len(prompts))
    turns = [
        prompt + answer + random_prompt(9, seed=len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    found = [replies(fleet, node, turns, GREEDY) for node in (house.second, house.alone)]
    outputs = [[reply.output_ids for reply in of_node] for of_node in found]
    assert outputs[0] == outputs[1]
    for prompt, reply in zip(prompts, found[0], strict=True):
        # A block that is known to its end, but for the last token of the answer.
        assert reply.meta_info.cached_tokens_details.prefill > len(prompt) + OUTPUT_COUNT - 18
    lengths = [accept_length(of_node) for of_node in found]
    assert lengths[0] == pytest.approx(lengths[1], rel=TOLERANCE)
    assert lengths[0] > 2.0


def test_what_was_retracted_accepts_as_much_when_it_has_come_again(
    fleet: Fleet, house: House
) -> None:
    prompts = [random_prompt(length, seed=length) for length in CROWD]
    # Who expects long answers lets no crowd in.
    for index in range(SHORT_COUNT):
        house.decode.generate({"input_ids": [7, 8, index], "sampling_params": SHORT})
    asked: Body = GREEDY | {"max_new_tokens": 90}
    found = [replies(fleet, node, prompts, asked) for node in (house.decode, house.alone)]
    outputs = [[reply.output_ids for reply in of_node] for of_node in found]
    assert outputs[0] == outputs[1]
    retracted = [sum(reply.meta_info.num_retractions for reply in of_node) for of_node in found]
    assert retracted[0] > 0 and retracted[1] == 0
    assert accept_length(found[0]) > (1.0 - TOLERANCE) * accept_length(found[1])


def test_samples_of_one_prompt_go_on_from_one_cache(fleet: Fleet, house: House) -> None:
    body: Body = {"input_ids": house.prompts[-1], "sampling_params": {**DRAWN, "n": 3}}
    outputs = [
        [reply.output_ids for reply in node.generate_list(body)]
        for node in (house.decode, house.alone)
    ]
    assert outputs[0] == outputs[1] and len(set(map(tuple, outputs[0]))) == 3


def test_a_server_without_the_draft_is_refused_and_told_so(house: House) -> None:
    house.other.wait_refused()
    (refused,) = house.other.refusals()
    assert "draft: ours NEXTN, layer 3" in refused.detail
    assert "theirs (none)" in refused.detail
    assert "draft" in error_message(house.other.get("/health"))
