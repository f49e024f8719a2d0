"""`python -m tests.protocol.record FILE`: what servers of this tree say to each other, for later
releases to read. To be made once with each new version of the protocol.

Plays stories of the simulation, in which real scheduler cores speak through the real codec, and
keeps one message for each set of fields that is sent. A line is the name of a message, its bytes in
hexadecimal digits, and the values of its fields.
"""

from __future__ import annotations

import json
import sys
import typing
from pathlib import Path

import msgspec

from common.protocol import codec, peer
from tests.sim import wire
from tests.sim.story import run_story

SEEDS = range(12)
KINDS = typing.get_args(peer.DecodeToPrefill) + typing.get_args(peer.PrefillToDecode)


def record() -> list[str]:
    """Lines, in the order of their names."""
    found: dict[tuple[str, ...], str] = {}
    sent = wire.sent

    def note(message: codec.LocalMessage | peer.PeerMessage) -> bytes:
        payload = sent(message)
        if isinstance(message, KINDS):
            fields = msgspec.msgpack.decode(payload)
            name = type(message).__name__
            line = {"message": name, "payload": payload.hex(), "fields": readable(message)}
            found.setdefault((name, *sorted(fields)), json.dumps(line, sort_keys=True))
        return payload

    wire.sent = note
    try:
        for seed in SEEDS:
            run_story(seed, upgrade_share=0.0)
    finally:
        wire.sent = sent
    return [line for _, line in sorted(found.items())]


def readable(message: object) -> object:
    """Its fields as JSON has them."""
    return json.loads(msgspec.json.encode(message))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("\n".join(record()) + "\n")
