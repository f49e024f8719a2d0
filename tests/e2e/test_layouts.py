"""Any layout to any layout: every prefill server hands over to every decode server, and the tokens
are the reference's. One request body is posted to both, so that each pair is met by choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path

import pytest

from demo.servers import free_ports
from tests.e2e.fleet import CHECKPOINT, Body, Fleet, Node, reply_of
from tests.e2e.test_keys import curve
from tests.engine.recipes.recipe import DEFAULT_ROPE
from tests.engine.tiny_checkpoints import (
    Recipe,
    Reference,
    build_checkpoint,
    random_prompt,
)

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

OUTPUT_COUNT = 12
LENGTHS = [1, 33, 103]  # within a page, in the second chunk, over pages of every size
FLAGS = ("--dtype", "float32", "--tokenizer-path", str(CHECKPOINT), "--chunked-prefill-size", "64")

# The checkpoint has 2 KV heads, so that TP 4 replicates them.
PREFILLS = {
    "tp1": (),
    "tp2 page32": ("--tp-size", "2", "--page-size", "32"),
    "tp4": ("--tp-size", "4"),
    "pp2": ("--pp-size", "2", "--layer-group-count", "2"),
    "pp2 tp2 page64": ("--pp-size", "2", "--tp-size", "2", "--page-size", "64"),
}
DECODES = {
    "tp1": (),
    "tp2": ("--tp-size", "2"),
    "tp4": ("--tp-size", "4"),
    "pp2": ("--pp-size", "2"),
    "page8": ("--page-size", "8"),
    "page64": ("--page-size", "64"),
}
PAIRS = list(product(PREFILLS, DECODES))


@dataclass
class Town:
    """All servers of the tables above, and the reference."""

    prefills: dict[str, Node]
    decodes: dict[str, Node]
    oracle: Reference
    rooms: count[int]


@pytest.fixture(scope="module")
def town(fleet: Fleet, tiny_checkpoint: Callable[[str], Path]) -> Town:
    checkpoint = tiny_checkpoint("qwen3")
    fleet.model_path = checkpoint
    prefills = {
        name: fleet.prefill(*FLAGS, *flags, name=f"prefill {name}")
        for name, flags in PREFILLS.items()
    }
    # One address suffices: the others are dialled when a request names them.
    decodes = {
        name: fleet.decode([prefills["tp1"]], *FLAGS, *flags, name=f"decode {name}")
        for name, flags in DECODES.items()
    }
    fleet.wait_ready()
    return Town(prefills, decodes, Reference.load(checkpoint), count(1))


def meet(fleet: Fleet, prefill: Node, decode: Node, room: int, length: int) -> list[int]:
    """Tokens of one request that both servers were told of."""
    body: Body = {
        "input_ids": random_prompt(length, seed=length),
        "sampling_params": {"temperature": 0, "max_new_tokens": OUTPUT_COUNT, "ignore_eos": True},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": room,
    }
    first_half = fleet.in_background(prefill, body)
    tokens = reply_of(decode.post("/generate", body)).output_ids
    assert reply_of(first_half.result()).output_ids == tokens[:1]
    return tokens


@pytest.mark.parametrize(("prefill", "decode"), PAIRS, ids=[f"{p} to {d}" for p, d in PAIRS])
def test_tokens_equal_the_reference(fleet: Fleet, town: Town, prefill: str, decode: str) -> None:
    for length in LENGTHS:
        tokens = meet(fleet, town.prefills[prefill], town.decodes[decode], next(town.rooms), length)
        assert tokens == town.oracle.greedy(random_prompt(length, seed=length), OUTPUT_COUNT)


def test_one_decode_server_draws_from_prefill_servers_of_any_layout(
    fleet: Fleet, town: Town
) -> None:
    decode = town.decodes["tp1"]
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT_COUNT, "ignore_eos": True}
    lengths = [40 + index for index in range(16)]
    asked = [
        fleet.in_background(
            decode,
            {"input_ids": random_prompt(length, seed=length), "sampling_params": sampling},
        )
        for length in lengths
    ]
    replies = [reply_of(future.result()) for future in asked]
    for length, reply in zip(lengths, replies, strict=True):
        expected = town.oracle.greedy(random_prompt(length, seed=length), OUTPUT_COUNT)
        assert reply.output_ids == expected
    peers = {reply.timeline.peer for reply in replies}
    assert len(peers) > 1, "all went to one prefill server"


def test_no_page_is_left_anywhere(fleet: Fleet, town: Town) -> None:
    fleet.wait_at_rest()
    assert len(town.decodes["tp1"].info().peers) == len(PREFILLS)


@pytest.mark.soak
def test_tp3_hands_six_heads_to_tp2(tmp_path_factory: pytest.TempPathFactory) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 32}
    recipe = Recipe("Qwen3ForCausalLM", {"rope_parameters": DEFAULT_ROPE, **heads}, seed=6)
    checkpoint = build_checkpoint(recipe, tmp_path_factory.mktemp("six heads"))
    with Fleet(tmp_path_factory.mktemp("six"), checkpoint) as fleet:
        prefill = fleet.prefill(*FLAGS, "--tp-size", "3")
        decode = fleet.decode([prefill], *FLAGS, "--tp-size", "2")
        fleet.wait_ready()
        oracle = Reference.load(checkpoint)
        for room, length in enumerate(LENGTHS, 1):
            tokens = meet(fleet, prefill, decode, room, length)
            assert tokens == oracle.greedy(random_prompt(length, seed=length), OUTPUT_COUNT)


def test_ranks_on_two_machines_are_one_server(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[[str], Path]
) -> None:
    checkpoint = tiny_checkpoint("qwen3")
    with Fleet(tmp_path_factory.mktemp("nodes"), checkpoint) as fleet:
        prefill = fleet.prefill(*FLAGS, *curve(fleet.log_dir, "prefill", decode="decode"))
        # Two loopback addresses stand for two machines; the second has no HTTP of its own. Both
        # have the server's key, with which its worker gets in.
        meeting = f"127.0.0.2:{free_ports(1)[0]}"
        keys = curve(fleet.log_dir, "decode", **{"*": "prefill"})
        spread = ("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", meeting, *keys)
        decode = fleet.decode([prefill], *FLAGS, *spread, "--node-rank", "0")
        other = fleet.decode([prefill], *FLAGS, *spread, "--node-rank", "1", name="node 1")
        prefill.wait_ready()
        decode.wait_ready()
        oracle = Reference.load(checkpoint)
        for room, length in enumerate(LENGTHS, 1):
            tokens = meet(fleet, prefill, decode, room, length)
            assert tokens == oracle.greedy(random_prompt(length, seed=length), OUTPUT_COUNT)
        decode.kill()
        assert other.server.process.wait(30) != 0, "a node whose scheduler is gone must end"
