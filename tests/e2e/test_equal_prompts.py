"""Prompts that come at once and are equal: computed once, by a pair and by a server alone.

And pairs whose caches travel through staging, compared byte for byte on arrival: only what a
session has new is sent, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.fleet import CHECKPOINT, Body, Fleet, Node, reply_of
from tests.e2e.replies import Reply
from tests.engine.tiny_checkpoints import random_prompt
from tests.families.cases import CASES, Case

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

FLAGS = ("--dtype", "float32", "--tokenizer-path", str(CHECKPOINT), "--page-size", "16",
         "--max-total-tokens", "16384")  # fmt: skip
PREFILL = ("--chunked-prefill-size", "64")
STAGED = ("--transfer-mode", "staged", "--verify-transfer", "full")
BLOCK_TOKENS = 16
EQUAL_COUNT = 10
# All but the last token are whole blocks, and so can be taken over.
EQUAL_LENGTH = 30 * BLOCK_TOKENS + 1
COMPUTED_SHARE_MAX = 1.1
OUTPUT_COUNT = 20
NEW_COUNT = 9


@dataclass
class Town:
    """Servers of one checkpoint. staged: a decode server whose pool no peer may write to."""

    case: Case
    prefill: Node
    decode: Node
    staged: Node
    alone: Node
    cold: Node
    fleet: Fleet


@pytest.fixture(scope="module", params=["llama", "qwen3_next"])
def town(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_checkpoint: Callable[[str], Path],
) -> Iterator[Town]:
    (case,) = [case for case in CASES if case.recipe == request.param]
    with Fleet(tmp_path_factory.mktemp("logs"), tiny_checkpoint(case.recipe)) as fleet:
        prefill = fleet.prefill(*FLAGS, *PREFILL, "--return-cache", "off")
        decode = fleet.decode([prefill], *FLAGS)
        # It computes nothing itself, and its transfers are all of sessions.
        only = ("--local-prefill", "off", "--self-test-interval", "0")
        staged = fleet.decode([prefill], *FLAGS, *STAGED, *only, name="staged")
        alone = fleet.decode([], *FLAGS, *PREFILL, name="alone")
        cold = fleet.decode([], *FLAGS, "--disable-radix-cache", name="cold")
        fleet.wait_ready()
        yield Town(case, prefill, decode, staged, alone, cold, fleet)
        fleet.wait_at_rest()


def body_of(token_ids: list[int]) -> Body:
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT_COUNT, "ignore_eos": True}
    return {"input_ids": token_ids, "sampling_params": sampling}


def ask_at_once(town: Town, node: Node, prompt: list[int]) -> list[Reply]:
    pending = [town.fleet.in_background(node, body_of(prompt)) for _ in range(EQUAL_COUNT)]
    return [reply_of(future.result()) for future in pending]


def computed_count(reply: Reply) -> int:
    """Tokens of a prompt that were computed, by the prefill server or behind what was here."""
    cached = reply.meta_info.cached_tokens_details
    return reply.meta_info.prompt_tokens - (cached.prefill or cached.decode)


@pytest.mark.parametrize("kind", ["pair", "alone"])
def test_ten_equal_prompts_are_computed_once(town: Town, kind: str) -> None:
    prompt = random_prompt(EQUAL_LENGTH, seed=len(kind))
    replies = ask_at_once(town, town.decode if kind == "pair" else town.alone, prompt)
    counts = list(map(computed_count, replies))
    assert sum(counts) <= COMPUTED_SHARE_MAX * EQUAL_LENGTH
    assert max(counts) == EQUAL_LENGTH, "one of them is first"
    expected = town.cold.generate(body_of(prompt)).output_ids
    assert [reply.output_ids for reply in replies] == [expected] * EQUAL_COUNT


def test_what_is_new_of_a_session_is_staged_and_compared(town: Town) -> None:
    prompt, ended = random_prompt(75, seed=3), 0
    for index in range(3):
        reply = town.staged.generate(body_of(prompt))
        assert reply.output_ids == town.cold.generate(body_of(prompt)).output_ids, index
        here = reply.meta_info.cached_tokens_details.decode
        assert here == (max(0, ended - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        assert reply.timeline.transfer.nbytes == town.case.rest_nbytes(len(prompt), here)
        ended = len(prompt) + OUTPUT_COUNT
        prompt = [*prompt, *reply.output_ids, *random_prompt(NEW_COUNT, seed=index)]
    counters = town.staged.info().counters
    assert (counters["verified"], counters["mismatched"]) == (3, 0)
    (peer,) = town.staged.info().peers
    assert peer.transfer_mode == ["staged"]
