"""A pair whose decode server verifies proposals gives what one without gives, through layouts that
differ, for a model with states that can't be taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.fleet import CHECKPOINT, Body, Fleet, Node, reply_of
from tests.e2e.replies import Reply
from tests.engine.tiny_checkpoints import Reference, random_prompt

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

FLAGS = ("--dtype", "float32", "--tokenizer-path", str(CHECKPOINT), "--metrics-names", "both")
OUTPUT_COUNT = 48
LENGTHS = (1, 15, 33, 70)
GREEDY: Body = {"temperature": 0, "max_new_tokens": OUTPUT_COUNT, "ignore_eos": True}
# Of few tokens, so that what stood before often comes again.
SAMPLED: Body = {
    "temperature": 0.3,
    "top_p": 0.9,
    "frequency_penalty": 0.01,
    "logit_bias": {"7": 12, "8": 12, "9": 12},
    "min_new_tokens": 20,
    "seed": 11,
    "max_new_tokens": OUTPUT_COUNT,
}


@dataclass
class Town:
    prefill: Node
    plain: Node
    speculating: Node
    oracle: Reference


@pytest.fixture(scope="module")
def started(fleet: Fleet, tiny_checkpoint: Callable[[str], Path]) -> Town:
    fleet.model_path = tiny_checkpoint("qwen3_next")
    prefill = fleet.prefill(*FLAGS, "--page-size", "8", "--chunked-prefill-size", "32")
    plain = fleet.decode([prefill], *FLAGS, name="plain")
    speculating = fleet.decode(
        [prefill],
        *(*FLAGS, "--page-size", "32", "--tp-size", "2"),
        *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6"),
        name="speculating",
    )
    fleet.wait_ready()
    return Town(prefill, plain, speculating, Reference.load(fleet.model_path))


@pytest.fixture
def town(started: Town, fleet: Fleet) -> Iterator[Town]:
    """The servers at rest; no slot or page may be left after any test."""
    yield started
    fleet.wait_at_rest()


def prompt(length: int) -> list[int]:
    """Its second half is its first, so that there is something to look up."""
    half = random_prompt(length - length // 2, seed=length)
    return half + half[: length // 2]


def body(length: int, sampling: Body, **more: object) -> Body:
    return {"input_ids": prompt(length), "sampling_params": sampling, **more}


def test_greedy_outputs_are_the_reference_s_beside_each_other(fleet: Fleet, town: Town) -> None:
    waiting = [fleet.in_background(town.speculating, body(n, GREEDY)) for n in LENGTHS]
    replies = [reply_of(one.result()) for one in waiting]
    for length, reply in zip(LENGTHS, replies, strict=True):
        assert reply.output_ids == town.oracle.greedy(prompt(length), OUTPUT_COUNT), length
        assert reply.finish.type == "length" and reply.timeline.transfer.nbytes > 0


def test_sampled_outputs_with_log_probabilities_are_those_without_proposals(town: Town) -> None:
    accepted = proposed = 0
    for length in LENGTHS:
        asked = body(length, SAMPLED, return_logprob=True, top_logprobs_num=2)
        plain, reply = town.plain.generate(asked), town.speculating.generate(asked)
        assert reply.output_ids == plain.output_ids
        told, expected = (one.meta_info.output_token_logprobs for one in (reply, plain))
        assert [token for _, token, _ in told] == reply.output_ids
        assert [value for value, _, _ in told] == pytest.approx(
            [value for value, _, _ in expected], abs=5e-4
        )
        meta = reply.meta_info
        accepted += meta.spec_accept_token_num
        proposed += meta.spec_draft_token_num
        assert meta.spec_accept_rate == meta.spec_accept_token_num / meta.spec_draft_token_num
        assert meta.spec_accept_length == 1 + meta.spec_accept_token_num / meta.spec_verify_ct
        assert plain.meta_info.spec_verify_ct == 0
    assert OUTPUT_COUNT // 2 < accepted < proposed, "some of both kinds"


def test_streams_stop_where_they_do_without_proposals(town: Town) -> None:
    greedy = town.oracle.greedy(prompt(33), OUTPUT_COUNT)
    stop = next(t for i, t in enumerate(greedy) if i > 8 and t not in greedy[:i])
    asked = body(33, GREEDY | {"stop_token_ids": [stop]}, stream=True)
    with town.speculating.stream(asked) as events:
        last: Reply = list(events)[-1]
    assert last.output_ids == greedy[: greedy.index(stop) + 1]
    assert last.finish.type == "stop" and last.finish.matched == stop


def test_samples_of_one_prompt_are_those_without_proposals(town: Town) -> None:
    asked = body(70, SAMPLED | {"n": 3})
    plain, replies = town.plain.generate_list(asked), town.speculating.generate_list(asked)
    assert [one.output_ids for one in replies] == [one.output_ids for one in plain]


def test_a_next_turn_goes_on_from_what_was_accepted(town: Town) -> None:
    """Its cache went back to the prefill server, state included, and comes again."""
    first = town.speculating.generate(body(70, SAMPLED))
    assert first.meta_info.spec_accept_token_num > 0
    turn = prompt(70) + first.output_ids + random_prompt(5, seed=5)
    reply = town.speculating.generate({"input_ids": turn, "sampling_params": GREEDY})
    assert reply.output_ids == town.oracle.greedy(turn, OUTPUT_COUNT)
    assert reply.meta_info.cached_tokens >= 70


def test_what_was_accepted_is_counted(town: Town) -> None:
    town.speculating.generate(body(33, SAMPLED))
    text = town.speculating.get("/metrics").text
    values = {
        line.split("{")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(("vllm:spec_decode", "sglang:spec_accept"))
    }
    accepted = values["vllm:spec_decode_num_accepted_tokens_total"]
    steps = values["vllm:spec_decode_num_drafts_total"]
    assert 0 < accepted <= values["vllm:spec_decode_num_draft_tokens_total"]
    assert values["sglang:spec_accept_length"] == pytest.approx(1 + accepted / steps)
    assert "sglang:spec_accept_length{" not in town.plain.get("/metrics").text
