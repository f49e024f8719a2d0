"""One log line a second for requests that failed through no fault of their client, with counts.

A server that answers 503 to everybody must say so in its log, and must not fill the disk with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from common.failures import FailureKind

INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


class FailureLog:
    """Failures that have not been written yet. Used on one event loop."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._latest = ""
        self._timer: asyncio.TimerHandle | None = None

    def note(self, kind: str, rid: str, message: str) -> None:
        """A request has ended in an error. What its client did wrong, only the client is told.

        A kind that is not known here comes from a peer of another version, and is logged.
        """
        if FailureKind.of(kind).status < 500:
            return
        self._counts[kind] += 1
        self._latest = f"{rid}: {message}" if message else rid
        if self._timer is None:
            self._write()

    def _write(self) -> None:
        """The first line at once, the next ones an interval apart."""
        self._timer = None
        if not self._counts:
            return
        count = self._counts.total()
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(self._counts.items()))
        noun = "request" if count == 1 else "requests"
        logger.warning("%d %s failed (%s); the latest, %s", count, noun, kinds, self._latest)
        self._counts.clear()
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._write)
