"""Messages of each version that is still spoken are read as they were meant.

`recorded/version-N.jsonl` was made by `python -m tests.protocol.record` with the last tree of that
version.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.protocol.codec import decode_peer_message
from common.protocol.peer import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN
from tests.protocol.record import KINDS, readable

RECORDED = Path(__file__).parent / "recorded"
EARLIER = range(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION)


def lines_of(version: int) -> list[dict[str, object]]:
    text = (RECORDED / f"version-{version}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def has_all_of(fields: object, meant: object) -> bool:
    """Whether a message says what another one did, whatever it says besides."""
    if isinstance(fields, dict) and isinstance(meant, dict):
        return all(has_all_of(fields.get(name), value) for name, value in meant.items())
    if isinstance(fields, list) and isinstance(meant, list) and len(fields) == len(meant):
        return all(map(has_all_of, fields, meant))
    return fields == meant


@pytest.mark.parametrize("version", EARLIER)
def test_what_servers_of_an_earlier_version_said_is_read_as_they_meant_it(version: int) -> None:
    for line in lines_of(version):
        message = decode_peer_message(bytes.fromhex(str(line["payload"])))
        assert type(message).__name__ == line["message"]
        assert has_all_of(readable(message), line["fields"])


@pytest.mark.parametrize("version", EARLIER)
def test_every_message_of_an_earlier_version_was_recorded(version: int) -> None:
    recorded = {line["message"] for line in lines_of(version)}
    # No story has servers that refuse each other.
    others = {"Refuse", "Offer"} if version == 1 else {"Refuse"}
    assert recorded == {kind.__name__ for kind in KINDS} - others
