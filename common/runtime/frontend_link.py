"""The scheduler's end of the channel to its frontend. No message is lost.

Messages for which the socket has no room wait here, joined, until it has room. A stopped frontend
costs memory up to a bound, and no message. Nothing here blocks.
"""

from __future__ import annotations

import logging
from collections import deque

from common.channel.local import LocalServer
from common.channel.sockets import FRONTEND_QUEUE_MAX, SendResult
from common.errors import ProtocolError
from common.protocol import too_large
from common.protocol.codec import encode
from common.protocol.frontend import Outputs, SchedulerToFrontend, ToldFrontend
from common.runtime.undelivered import Undelivered

log = logging.getLogger(__name__)

FRONTEND = "frontend"
WAITING_NBYTES_MAX = 32 << 20
"""Of output that waits. Above it no new steps are computed. Without log-probabilities these are
more than six million tokens. The memory of this process that holds them is several times as
large."""
LAST_MESSAGES_MS = 500
"""Time for the last messages to leave when the process ends."""


class FrontendLink:
    """is_behind: more than WAITING_NBYTES_MAX wait. Steps have to wait until all of it has left.

    dropped_count: messages that were too large, and transfer traces above TRACE_COUNT_MAX. The log
        has a line for each.
    """

    def __init__(self, path: str) -> None:
        """Raises: ConfigError naming `path` if it can't be used."""
        self.endpoint = LocalServer(path, send_queue_max=FRONTEND_QUEUE_MAX)
        self.is_behind = False
        self.dropped_count = 0
        self._undelivered = Undelivered()
        self._unsent: deque[bytes] = deque()  # encoded, and not yet taken by the socket

    @property
    def has_unsent(self) -> bool:
        """Whether messages wait for the socket to have room."""
        return bool(self._unsent)

    def receive(self) -> list[bytes]:
        """Messages of the frontend, oldest first. Never waits."""
        return [payload for name, payload in self.endpoint.receive() if name == FRONTEND]

    def add(self, message: ToldFrontend) -> None:
        """Queue a message. It leaves with the next `flush`."""
        self._undelivered.add(message)

    def flush(self) -> None:
        """Send as many messages as the socket has room for."""
        if self._unsent and not self.endpoint.is_writable:
            self._look_if_behind()
            return
        while self._fill():
            # A frontend that has not connected yet gets its messages later. If it has died, the
            # supervisor ends this server.
            if self.endpoint.send(FRONTEND, self._unsent[0]) is not SendResult.SENT:
                break
            self._unsent.popleft()
        self._look_if_behind()

    def close(self) -> None:
        self.flush()
        self.endpoint.close(LAST_MESSAGES_MS)

    def _fill(self) -> bool:
        """Whether there is a message to send. Messages are encoded as late as possible."""
        while not self._unsent:
            message = self._undelivered.take()
            if message is None:
                return False
            self._encode(message)
        return True

    def _encode(self, message: SchedulerToFrontend) -> None:
        """Append a message to `_unsent`, in halves if it is too large for its receiver."""
        try:
            self._unsent.append(encode(message))
            return
        except ProtocolError as error:
            problem = str(error)
        if isinstance(message, Outputs) and len(message.items) > 1:
            half = len(message.items) // 2
            self._encode(Outputs(message.items[:half]))
            self._encode(Outputs(message.items[half:]))
            return
        self.dropped_count += 1
        log.warning("dropped a message to the frontend: %s", problem)
        replacement = too_large.replacement_for_frontend(message, problem)
        if replacement is not None:
            self._encode(replacement)

    def _look_if_behind(self) -> None:
        if not self._unsent:
            self.is_behind = False
            count = self._undelivered.take_dropped_count()
            if count:
                self.dropped_count += count
                log.warning(
                    "the frontend read too late: metrics and timelines lack %d transfers", count
                )
        elif self._undelivered.nbytes > WAITING_NBYTES_MAX:
            self.is_behind = True
