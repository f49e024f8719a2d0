"""Many sessions at once on servers that have room for few: prompts and checkpoints are evicted,
requests are retracted and given up, and every answer is the reference's."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.fleet import CHECKPOINT, Body, Fleet, Node, reply_of
from tests.e2e.replies import Reply
from tests.engine.drafts import add_copying_nextn
from tests.engine.tiny_checkpoints import Reference, random_prompt

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
SOAK = pytest.mark.soak

FLAGS = ("--dtype", "float32", "--tokenizer-path", str(CHECKPOINT))
PREFILL = ("--page-size", "8", "--chunked-prefill-size", "48", "--max-total-tokens", "768",
           "--max-checkpoints", "4")  # fmt: skip
DECODE = ("--page-size", "16", "--max-total-tokens", "640", "--max-checkpoints", "3",
          "--max-running-requests", "6")  # fmt: skip
TIER = ("--host-cache-gb", "0.02")
# A random model is sure of nothing.
DRAFT = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3")
DRAFT += ("--speculative-draft-p-min", "0")
CLIENT_COUNT = 12
SESSION_COUNT = 24
TURN_COUNT = 3
SHARED_LENGTHS = (40, 96, 131)
OUTPUT_COUNTS = (1, 2, 3, 5, 18, 110)
"""Mostly short, so that too many requests are let in."""

GIVEN_UP_SHARE = 0.15
IN_SHORT = ("qwen3_next", "auto", TIER)
"""Of the soak, what every test run has."""


@dataclass
class Turn:
    """given_up: its client has gone before its end; the answer is a beginning of the right one."""

    prompt: list[int]
    output: list[int]
    given_up: bool


def run_session(fleet: Fleet, node: Node, seed: int) -> list[Turn]:
    """Turns of one client, whose prompts begin as those of others do."""
    rng = random.Random(seed)
    shared = rng.choice(SHARED_LENGTHS)
    prompt = random_prompt(shared, seed=shared) + random_prompt(rng.randrange(1, 40), seed=seed)
    turns: list[Turn] = []
    for index in range(TURN_COUNT):
        count = rng.choice(OUTPUT_COUNTS)
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        rid = f"{seed} {index} {node.name}"
        body: Body = {"input_ids": prompt, "sampling_params": sampling, "rid": rid}
        is_given_up = rng.random() < GIVEN_UP_SHARE
        pending = fleet.in_background(node, body)
        if is_given_up:
            node.post("/abort_request", {"rid": rid})
        reply: Reply = reply_of(pending.result())
        assert reply.meta_info.cached_tokens <= len(prompt)
        turns.append(Turn(prompt, reply.output_ids, len(reply.output_ids) < count))
        if turns[-1].given_up:
            assert reply.finish.type == "abort"
        more = random_prompt(rng.randrange(1, 20), seed=seed * 10 + index)
        prompt = [*prompt, *reply.output_ids, *more]
    return turns


CASES = [
    pytest.param(recipe, mode, tier, marks=() if (recipe, mode, tier) == IN_SHORT else SOAK)
    for recipe in ("llama", "gemma3", "qwen3_next", "deepseek_v4")
    for mode in ("auto", "off", "alone")
    for tier in ((), TIER)
]
CASES += [
    pytest.param(recipe, "auto", (*TIER, *DRAFT), marks=SOAK)
    for recipe in ("deepseek_v3", "qwen3_5")
]


@pytest.mark.parametrize(("recipe", "mode", "tier"), CASES)
def test_crowded_sessions_are_answered_as_by_the_reference(
    recipe: str,
    mode: str,
    tier: tuple[str, ...],
    tmp_path: Path,
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    checkpoint, has_draft = tiny_checkpoint(recipe), tier[-len(DRAFT) :] == DRAFT
    if has_draft:
        checkpoint = add_copying_nextn(checkpoint, tmp_path / "draft", noise=0.02)
    flags = (*FLAGS, *tier)
    with Fleet(tmp_path, checkpoint) as fleet:
        if mode == "alone":
            node = fleet.decode([], *flags, *DECODE)
        else:
            prefill = fleet.prefill(*flags, *PREFILL)
            node = fleet.decode([prefill], *flags, *DECODE, "--local-prefill", mode)
        fleet.wait_ready()
        oracle = Reference.load(checkpoint)
        with ThreadPoolExecutor(CLIENT_COUNT) as clients:
            sessions = list(
                clients.map(lambda seed: run_session(fleet, node, seed), range(SESSION_COUNT))
            )
        fleet.wait_at_rest()
        counters = node.info().counters
    for turns in sessions:
        for turn in turns:
            if turn.output:
                assert turn.output == oracle.continues(turn.prompt, turn.output), len(turn.prompt)
    assert counters["prefix_evicted_tokens"] > 0
    if has_draft:
        # As much as with all of the draft's cache; without its layer it would be half of that.
        assert 1 + counters["spec_accepted_tokens"] / counters["spec_steps"] > 2.5
    assert not tier or (counters["host_saved_tokens"] > 0 and not counters["host_failed_loads"])
