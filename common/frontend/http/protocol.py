"""The HTTP server's end of a connection: uvicorn's, with fewer writes and fewer log lines.

Bytes that are no request get one line with the address, at most one a second: clients and scanners
can cause them as often as they like. Knows nothing of routes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from common.clock import Clock
from common.scheduling.log_rate_limiter import LogRateLimiter

UVICORN_LOGGER = "uvicorn.error"
# uvicorn's own line for them, which names no address and comes every time.
UVICORN_LINE = "Invalid HTTP request received."

logger = logging.getLogger(__name__)


def is_logged_here(record: logging.LogRecord) -> bool:
    return record.msg == UVICORN_LINE


class ServedConnection(h11.Connection):
    """Keeps the head of an answer until its first part is sent: both leave in one write, which
    costs as much as all else that is done for a token. No answer here begins before it has one."""

    def __init__(self, head_nbytes_max: int) -> None:
        super().__init__(h11.SERVER, head_nbytes_max)
        self._head: list[bytes] = []

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """What `send` writes, in pieces."""
        if isinstance(event, h11.Data) and self.our_state is h11.SEND_BODY and not self._head:
            # A further part of a body changes no state: only its length has to be looked at.
            assert self._writer is not None
            pieces: list[bytes] = []
            self._writer(event, pieces.append)
            return pieces
        output = super().send_with_data_passthrough(event)
        if output is None:
            return None
        if isinstance(event, h11.Response):
            self._head = output
            return []
        output, self._head = self._head + output, []
        return output


def make_protocol(clock: Clock, head_nbytes_max: int) -> type[H11Protocol]:
    """uvicorn's protocol for one server. clock: limits the lines. head_nbytes_max: of a request
    line and headers that come in pieces."""
    lines = LogRateLimiter()

    class Protocol(H11Protocol):
        def __init__(
            self,
            config: uvicorn.Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(config, server_state, app_state, _loop)
            self.conn = ServedConnection(head_nbytes_max)

        def send_400_response(self, msg: str) -> None:
            host, port = self.client or ("an unknown address", 0)
            text = f"{host}:{port} sent what is no HTTP request: it was answered 400"
            line = lines.admit(text, clock.now())
            if line:
                logger.warning("%s", line)
            super().send_400_response(msg)

    return Protocol
