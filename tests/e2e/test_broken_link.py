"""A control connection that breaks and is back before anybody was silent for long."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.e2e.fleet import Body, Fleet, reply_of, wait_until
from tests.e2e.wire import Wire

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.soak]

PROMPT = [20 + index % 900 for index in range(1800)]
BODY: Body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
# More than the beats of a second, less than a request with its prompt.
REQUEST_NBYTES = 2000


class BreakingWire(Wire):
    """Once told to, it loses what comes from the dialler, and breaks every connection as soon as
    that was a request."""

    def __init__(self, target: int) -> None:
        self.lost_nbytes = 0
        self.loses = False
        self.break_count = 0
        super().__init__(target)

    def alter(self, source: socket.socket, data: bytes, *, is_dialler: bool) -> bytes | None:
        if not (self.loses and is_dialler):
            return data
        self.lost_nbytes += len(data)
        if self.lost_nbytes < REQUEST_NBYTES:
            return b""
        self.break_count += 1
        self.loses = False
        return None


def test_a_request_that_was_lost_with_its_connection_is_answered(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        prefill = fleet.prefill()
        wire = BreakingWire(prefill.bootstrap_port)
        decode = fleet.decode([], "--prefill", f"127.0.0.1:{wire.port}")
        fleet.wait_ready()
        expected = reply_of(fleet.in_background(decode, BODY).result()).output_ids
        wire.loses = True
        answer = fleet.in_background(decode, BODY)
        wait_until("the connection to break", lambda: wire.break_count == 1)
        assert reply_of(answer.result()).output_ids == expected
        assert "its connection broke while transfers were under way" in decode.log
        fleet.wait_at_rest()
        wire.close()
