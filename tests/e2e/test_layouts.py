"""Any layout to any layout: prefill servers transfer to decode servers, and the tokens are the
reference's. One request body is posted to both, so that each pair is met by choice."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from demo.servers import free_ports
from tests.e2e.fleet import Fleet, reply_of
from tests.e2e.layout_town import FLAGS, LENGTHS, OUTPUT_COUNT, Town, meet
from tests.e2e.test_keys import curve
from tests.engine.tiny_checkpoints import Reference, random_prompt

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

# The checkpoint has 2 KV heads, so that TP 4 replicates them. test_more_layouts.py has the rest.
PREFILLS = {
    "tp1": (),
    "pp2 tp2 page64": ("--pp-size", "2", "--tp-size", "2", "--page-size", "64"),
}
DECODES = {
    "tp1": (),
    "tp4": ("--tp-size", "4"),
    "page8": ("--page-size", "8"),
}
PAIRS = list(product(PREFILLS, DECODES))


@pytest.fixture(scope="module")
def town(fleet: Fleet, tiny_checkpoint: Callable[[str], Path]) -> Town:
    return Town.start(fleet, tiny_checkpoint("qwen3"), PREFILLS, DECODES)


@pytest.mark.parametrize(("prefill", "decode"), PAIRS, ids=[f"{p} to {d}" for p, d in PAIRS])
def test_tokens_equal_the_reference(fleet: Fleet, town: Town, prefill: str, decode: str) -> None:
    town.check_pair(fleet, prefill, decode)


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
