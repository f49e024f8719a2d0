"""What the HTTP server says of bytes that are no request: one line with the address, at most one a
second. Clients and scanners can cause them as often as they like.

Knows nothing of routes.
"""

from __future__ import annotations

import logging

from uvicorn.protocols.http.h11_impl import H11Protocol

from common.clock import Clock
from common.scheduling.log_rate_limiter import LogRateLimiter

UVICORN_LOGGER = "uvicorn.error"
# uvicorn's own line for them, which names no address and comes every time.
UVICORN_LINE = "Invalid HTTP request received."

logger = logging.getLogger(__name__)


def is_logged_here(record: logging.LogRecord) -> bool:
    return record.msg == UVICORN_LINE


def make_protocol(clock: Clock) -> type[H11Protocol]:
    """uvicorn's protocol for one server. clock: limits the lines."""
    lines = LogRateLimiter()

    class Protocol(H11Protocol):
        def send_400_response(self, msg: str) -> None:
            host, port = self.client or ("an unknown address", 0)
            text = f"{host}:{port} sent what is no HTTP request: it was answered 400"
            line = lines.admit(text, clock.now())
            if line:
                logger.warning("%s", line)
            super().send_400_response(msg)

    return Protocol
