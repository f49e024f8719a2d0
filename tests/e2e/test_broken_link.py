"""A control connection that breaks and is back before anybody was silent for long."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.fleet import Body, Fleet, reply_of, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.soak]

PROMPT = [20 + index % 900 for index in range(1800)]
BODY: Body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
# More than the beats of a second, less than a request with its prompt.
REQUEST_NBYTES = 2000


class Wire:
    """Carries connections on to `target`. Once told to, it loses what comes from the dialler, and
    breaks every connection as soon as that was a request."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.lost_nbytes = 0
        self.loses = False
        self.break_count = 0
        self._is_open = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_open = False
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        others: dict[socket.socket, socket.socket] = {}
        dialled: set[socket.socket] = set()
        while self._is_open:
            for ready in select.select([self._listener, *others], [], [], 0.05)[0]:
                if ready is self._listener:
                    here = self._listener.accept()[0]
                    there = socket.create_connection(("127.0.0.1", self._target))
                    others |= {here: there, there: here}
                    dialled.add(here)
                elif ready in others:
                    self._carry(ready, others, is_dialler=ready in dialled)
        for end in others:
            end.close()

    def _carry(
        self, source: socket.socket, others: dict[socket.socket, socket.socket], is_dialler: bool
    ) -> None:
        data = b""
        with suppress(OSError):
            data = source.recv(1 << 16)
        if data and self.loses and is_dialler:
            self.lost_nbytes += len(data)
            data = data if self.lost_nbytes < REQUEST_NBYTES else b""
        elif data:
            others[source].sendall(data)
        if not data:
            self.break_count += self.loses
            self.loses = False
            for end in (source, others[source]):
                others.pop(end)
                end.close()


def test_a_request_that_was_lost_with_its_connection_is_answered(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        prefill = fleet.prefill()
        wire = Wire(prefill.bootstrap_port)
        decode = fleet.decode([], "--prefill", f"127.0.0.1:{wire.port}")
        fleet.wait_ready()
        expected = reply_of(fleet.in_background(decode, BODY).result()).output_ids
        wire.loses = True
        answer = fleet.in_background(decode, BODY)
        wait_until("the connection to break", lambda: wire.break_count == 1)
        assert reply_of(answer.result()).output_ids == expected
        assert "its connection broke while hand-overs were under way" in decode.log
        fleet.wait_at_rest()
        wire.close()
