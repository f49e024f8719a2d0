"""A wire between a decode server and a prefill server's bootstrap port, to be meddled with."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress

RECEIVE_NBYTES = 1 << 16


class Wire:
    """Carries connections on to `target`. port: what the decode server dials."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._is_open = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_open = False
        self._thread.join()
        self._listener.close()

    def alter(self, source: socket.socket, data: bytes, *, is_dialler: bool) -> bytes | None:
        """What is carried on in place of `data`; None to break the connection."""
        return data

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
        self, source: socket.socket, others: dict[socket.socket, socket.socket], *, is_dialler: bool
    ) -> None:
        data = b""
        with suppress(OSError):
            data = source.recv(RECEIVE_NBYTES)
        altered = self.alter(source, data, is_dialler=is_dialler) if data else None
        if altered is not None:
            with suppress(OSError):
                others[source].sendall(altered)
            return
        for end in (source, others[source]):
            others.pop(end)
            end.close()
