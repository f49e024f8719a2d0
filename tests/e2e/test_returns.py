"""Caches of answers that go back: the next turn is computed from where the answer ended.

Each turn goes to a decode server that knows nothing of the one before, so what a turn finds is the
prefill server's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.fleet import CHECKPOINT, Body, Fleet, Node
from tests.engine.tiny_checkpoints import random_prompt

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

COMMON = ("--dtype", "float32", "--tokenizer-path", str(CHECKPOINT), "--return-cache", "auto")
PREFILL = (*COMMON, "--page-size", "32", "--chunked-prefill-size", "64", "--pp-size", "2")
DECODE = (*COMMON, "--page-size", "8", "--tp-size", "2")
DECODE += ("--self-test-interval", "0", "--verify-transfer", "full")
BLOCK_TOKENS = 32
OUTPUT_COUNT = 40
TURN_COUNT = 3
FLUSHED_TURN_COUNT_MAX = 12


@dataclass
class Town:
    """Servers of one checkpoint. decodes: take turns; the second one may compute rests, and its
    caches are staged, both ways."""

    recipe: str
    prefill: Node
    decodes: list[Node]
    cold: Node


@pytest.fixture(
    scope="module", params=[pytest.param("llama", marks=pytest.mark.soak), "qwen3_next"]
)
def town(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_checkpoint: Callable[[str], Path],
) -> Iterator[Town]:
    with Fleet(tmp_path_factory.mktemp("logs"), tiny_checkpoint(request.param)) as fleet:
        prefill = fleet.prefill(*PREFILL)
        decodes = [
            fleet.decode([prefill], *DECODE, "--local-prefill", "off", name="decode-off"),
            fleet.decode([prefill], *DECODE, "--transfer-mode", "staged", name="decode-auto"),
        ]
        cold = fleet.decode([], *COMMON[:4], "--disable-radix-cache", name="cold")
        fleet.wait_ready()
        yield Town(request.param, prefill, decodes, cold)
        fleet.wait_at_rest()


def body_of(token_ids: list[int]) -> Body:
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT_COUNT, "ignore_eos": True}
    return {"input_ids": token_ids, "sampling_params": sampling}


def test_a_turn_is_computed_from_where_the_last_answer_ended(town: Town) -> None:
    prompt, ended = random_prompt(75, seed=3), 0
    for index in range(TURN_COUNT):
        kept = town.prefill.info().counters["returns_kept"]
        reply = town.decodes[index % 2].generate(body_of(prompt))
        assert reply.output_ids == town.cold.generate(body_of(prompt)).output_ids, index
        cached = reply.meta_info.cached_tokens_details.prefill
        if ended:
            # Of the last token of an answer there is no cache.
            assert cached == ended - 1, "a checkpoint stands at the end"
        town.prefill.wait_counted("returns_kept", kept + 1)
        ended = len(prompt) + OUTPUT_COUNT
        prompt = [*prompt, *reply.output_ids, *random_prompt(9, seed=index)]
    assert town.decodes[1].info().peers[0].transfer_mode[0].startswith("staged (")
    counters = [decode.info().counters for decode in town.decodes]
    assert sum(one["returns_sent"] for one in counters) == TURN_COUNT
    assert not any(one["returns_failed"] or one["mismatched"] for one in counters)


def test_a_turn_that_comes_at_once_waits_for_the_return(town: Town) -> None:
    """Also one that goes to the same decode server, which computes no rests."""
    prompt, ended = random_prompt(90, seed=8), 0
    for index in range(TURN_COUNT):
        reply = town.decodes[0].generate(body_of(prompt))
        cached = reply.meta_info.cached_tokens_details.prefill
        assert cached == (ended - 1 if ended else 0), "the return was not overtaken"
        ended = len(prompt) + OUTPUT_COUNT
        prompt = [*prompt, *reply.output_ids, *random_prompt(9, seed=index)]


def test_a_turn_that_a_decode_server_computed_itself_goes_back_too(town: Town) -> None:
    """A prefill server whose cache was flushed would take much longer than the decode server, on a
    loaded machine too. The decode server hears of a flush with a beat, perhaps a turn later."""
    off, auto = town.decodes
    before = auto.info().counters["local_prefills"]
    prompt, turn_count = random_prompt(150, seed=9), 0
    while auto.info().counters["local_prefills"] == before:
        assert turn_count < FLUSHED_TURN_COUNT_MAX, "a rest of 9 tokens is computed sooner"
        town.prefill.wait_at_rest()
        assert town.prefill.post("/flush_cache", {}).status_code == 200
        kept = town.prefill.info().counters["returns_kept"]
        reply = auto.generate(body_of(prompt))
        town.prefill.wait_counted("returns_kept", kept + 1)
        ended = len(prompt) + OUTPUT_COUNT
        prompt = [*prompt, *reply.output_ids, *random_prompt(9, seed=turn_count)]
        turn_count += 1
    reply = off.generate(body_of(prompt))
    assert reply.meta_info.cached_tokens_details.prefill == ended - 1
    assert reply.output_ids == town.cold.generate(body_of(prompt)).output_ids
