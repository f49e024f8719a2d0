"""How much of a cache two servers compare."""

from __future__ import annotations

import pytest

from common.config import Verify
from common.protocol.handshake import agree_verify
from common.protocol.peer import Hello

OFF, SAMPLE, FULL = Verify


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [
        (OFF, OFF, OFF),
        (OFF, SAMPLE, SAMPLE),
        (SAMPLE, FULL, FULL),
        (FULL, OFF, FULL),
        (SAMPLE, SAMPLE, SAMPLE),
    ],
)
def test_the_stricter_side_decides(ours: Verify, theirs: Verify, agreed: Verify) -> None:
    assert agree_verify(ours, theirs) is agreed
    assert agree_verify(theirs, ours) is agreed


@pytest.mark.parametrize("ours", Verify)
def test_with_a_server_that_knows_nothing_of_it_nothing_is_compared(ours: Verify) -> None:
    older = Hello(1, 1, "decode", "inc", {}, b"layout")
    assert agree_verify(ours, older.verify) is OFF
