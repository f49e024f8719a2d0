"""A latent cache between any layouts: right tokens, and no byte more than the targets need.

Every rank of a server has the whole row of its layers' tokens, so each target rank has to get each
row once: from one source rank, however many have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, product
from pathlib import Path

import pytest

from tests.e2e.fleet import CHECKPOINT, Body, Fleet, Node, reply_of
from tests.e2e.replies import Reply
from tests.engine.tiny_checkpoints import (
    LATENT,
    RECIPES,
    Reference,
    build_checkpoint,
    random_prompt,
)

# `tests/families` has these layouts in one process every time.
pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.soak]

OUTPUT_COUNT = 12
LENGTHS = [1, 33, 103]  # within a page, in the second chunk, over pages of every size
FLAGS = ("--dtype", "float32", "--tokenizer-path", str(CHECKPOINT), "--chunked-prefill-size", "64")
# Of decode servers: every source sends the whole of what another one has sent before.
WHOLE = (*FLAGS, "--disable-radix-cache")
LAYER_COUNT = 3
RANK, OTHER_RANK = 32, 24
ROW_NBYTES = (32 + 16) * 4  # latent and rotated key of LATENT, in float32

PREFILLS = {
    "tp1": (),
    "tp2": ("--tp-size", "2"),
    "pp2": ("--pp-size", "2", "--layer-group-count", "2"),
}
# And how many ranks hold each layer.
DECODES = {
    "tp1": ((), 1),
    "tp2 page64": (("--tp-size", "2", "--page-size", "64"), 2),
    "tp2 page8 staged": (("--tp-size", "2", "--page-size", "8", "--transfer-mode", "staged"), 2),
}
PAIRS = list(product(PREFILLS, DECODES))


@dataclass
class Town:
    """All servers of the tables above, and the reference."""

    prefills: dict[str, Node]
    decodes: dict[str, Node]
    other_rank: Node
    oracle: Reference
    rooms: count[int]


@pytest.fixture(scope="module")
def town(
    fleet: Fleet, tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Town:
    checkpoint = tiny_checkpoint("deepseek_v3")
    assert RECIPES["deepseek_v3"].changes.items() >= LATENT.items()
    fleet.model_path = checkpoint
    prefills = {
        name: fleet.prefill(*FLAGS, *flags, name=f"prefill {name}")
        for name, flags in PREFILLS.items()
    }
    # One address suffices: the others are dialled when a request names them.
    decodes = {
        name: fleet.decode([prefills["tp1"]], *WHOLE, *flags, name=f"decode {name}")
        for name, (flags, _) in DECODES.items()
    }
    recipe = RECIPES["deepseek_v3"]
    changed = replace(recipe, changes={**recipe.changes, "kv_lora_rank": OTHER_RANK})
    model = build_checkpoint(changed, tmp_path_factory.mktemp("other-rank"))
    other = fleet.decode([prefills["tp1"]], *FLAGS, name="other rank", model=model)
    for node in (*prefills.values(), *decodes.values()):
        node.wait_ready()
    other.wait_refused()
    return Town(prefills, decodes, other, Reference.load(checkpoint), count(1))


def meet(fleet: Fleet, prefill: Node, decode: Node, room: int, prompt: list[int]) -> Reply:
    """The decode server's reply to one request that both servers were told of."""
    body: Body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": OUTPUT_COUNT, "ignore_eos": True},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": room,
    }
    first_half = fleet.in_background(prefill, body)
    reply = reply_of(decode.post("/generate", body))
    assert reply_of(first_half.result()).output_ids == reply.output_ids[:1]
    return reply


@pytest.mark.parametrize(("prefill", "decode"), PAIRS, ids=[f"{p} to {d}" for p, d in PAIRS])
def test_tokens_equal_the_reference_and_every_target_gets_each_row_once(
    fleet: Fleet, town: Town, prefill: str, decode: str
) -> None:
    _, copies = DECODES[decode]
    for length in LENGTHS:
        prompt = random_prompt(length, seed=length)
        reply = meet(fleet, town.prefills[prefill], town.decodes[decode], next(town.rooms), prompt)
        assert reply.output_ids == town.oracle.greedy(prompt, OUTPUT_COUNT)
        least_nbytes = length * LAYER_COUNT * ROW_NBYTES * copies
        assert reply.timeline.transfer.nbytes == least_nbytes


def test_a_prompt_whose_beginning_was_seen_is_right_again(fleet: Fleet, town: Town) -> None:
    """Pages of the beginning are shared on the prefill side, and the whole cache is transferred."""
    prefill, decode = town.prefills["tp2"], town.decodes["tp1"]
    beginning = random_prompt(80, seed=7)
    for end in (random_prompt(5, seed=8), random_prompt(40, seed=9)):
        prompt = beginning + end
        reply = meet(fleet, prefill, decode, next(town.rooms), prompt)
        assert reply.output_ids == town.oracle.greedy(prompt, OUTPUT_COUNT)
        assert reply.timeline.transfer.nbytes == len(prompt) * LAYER_COUNT * ROW_NBYTES
    assert prefill.info().page_groups[0].cached > 0, "nothing was kept of the prompts"


def test_the_staged_server_was_written_through_its_staging_slots(town: Town) -> None:
    peers = town.decodes["tp2 page8 staged"].get("/server_info").json()["peers"]
    assert [peer["transfer_mode"] for peer in peers] == [["staged"]] * len(PREFILLS)


def test_no_page_is_left_anywhere(fleet: Fleet, town: Town) -> None:
    fleet.wait_at_rest()
    assert len(town.decodes["tp1"].info().peers) == len(PREFILLS)


def test_a_latent_of_another_rank_is_refused_on_both_sides_and_both_go_on(town: Town) -> None:
    prefill = town.prefills["tp1"]
    (refused,) = town.other_rank.refusals()
    details = [refused.detail, *(peer.detail for peer in prefill.refusals())]
    assert len(details) == 2
    for detail in details:
        assert f"rank {RANK}, rotated 16" in detail and f"rank {OTHER_RANK}, rotated 16" in detail
        assert "component latent segments: ours row of 1 x" in detail
    assert town.other_rank.get("/ping").status_code == 200
    assert prefill.get("/health").status_code == 200
