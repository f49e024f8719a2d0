"""Servers of many layouts of one model, and requests that meet any two of them by choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tests.e2e.fleet import CHECKPOINT, Body, Fleet, Node, reply_of
from tests.engine.tiny_checkpoints import Reference, random_prompt

OUTPUT_COUNT = 12
LENGTHS = [1, 33, 103]  # within a page, in the second chunk, over pages of every size
FLAGS = ("--dtype", "float32", "--tokenizer-path", str(CHECKPOINT), "--chunked-prefill-size", "64")
# Of decode servers: every source sends the whole of what another one has sent before.
WHOLE = (*FLAGS, "--disable-radix-cache")

Flags = Mapping[str, tuple[str, ...]]


@dataclass
class Town:
    """Servers by the names of their layouts, and the reference."""

    prefills: dict[str, Node]
    decodes: dict[str, Node]
    oracle: Reference
    rooms: count[int] = field(default_factory=lambda: count(1))

    @classmethod
    def start(cls, fleet: Fleet, checkpoint: Path, prefills: Flags, decodes: Flags) -> Town:
        """Both tables have a layout "tp1"."""
        fleet.model_path = checkpoint
        started = {
            name: fleet.prefill(*FLAGS, *flags, name=f"prefill {name}")
            for name, flags in prefills.items()
        }
        # One address suffices: the others are dialled when a request names them.
        asked = {
            name: fleet.decode([started["tp1"]], *WHOLE, *flags, name=f"decode {name}")
            for name, flags in decodes.items()
        }
        fleet.wait_ready()
        return cls(started, asked, Reference.load(checkpoint))

    def check_pair(self, fleet: Fleet, prefill: str, decode: str) -> None:
        """Tokens of prompts of every length are the reference's."""
        for length in LENGTHS:
            room = next(self.rooms)
            tokens = meet(fleet, self.prefills[prefill], self.decodes[decode], room, length)
            assert tokens == self.oracle.greedy(random_prompt(length, seed=length), OUTPUT_COUNT)


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
