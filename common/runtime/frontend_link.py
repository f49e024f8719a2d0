"""The scheduler's end of the line to its frontend: nothing that is said there is lost.

What the socket has no room for waits here, joined, and is sent once there is room. A frontend that
is stopped costs memory up to a bound, never a message, and nothing here waits for it.
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
"""Of output that waits; then no new steps are computed. Without log-probabilities that is more than
six million tokens; in the memory of this process it is several times as much."""
LAST_MESSAGES_MS = 500
"""How long the last messages may take to leave when the process ends."""


class FrontendLink:
    """is_behind: so much output waits that steps have to wait too, until all of it has left.

    dropped_count: messages that were too large, and accounts that were too many; each is logged.
    """

    def __init__(self, path: str) -> None:
        """Raises: ConfigError naming `path` if it can't be used."""
        self.endpoint = LocalServer(path, send_queue_max=FRONTEND_QUEUE_MAX)
        self.is_behind = False
        self.dropped_count = 0
        self._undelivered = Undelivered()
        self._unsent: deque[bytes] = deque()  # taken from there, and not yet by the socket

    @property
    def has_unsent(self) -> bool:
        """Whether messages wait for the socket to have room."""
        return bool(self._unsent)

    def receive(self) -> list[bytes]:
        """What the frontend has said, oldest first. Never waits."""
        return [payload for name, payload in self.endpoint.receive() if name == FRONTEND]

    def add(self, message: ToldFrontend) -> None:
        """It leaves with the next `flush`."""
        self._undelivered.add(message)

    def flush(self) -> None:
        """Send what there is room for."""
        if self._unsent and not self.endpoint.is_writable:
            self._look_if_behind()
            return
        while self._fill():
            # What nobody is there for waits as well: if the frontend has died, the supervisor ends
            # this server.
            if self.endpoint.send(FRONTEND, self._unsent[0]) is not SendResult.SENT:
                break
            self._unsent.popleft()
        self._look_if_behind()

    def close(self) -> None:
        self.flush()
        self.endpoint.close(LAST_MESSAGES_MS)

    def _fill(self) -> bool:
        """Whether there is something to send; what waits is encoded as late as possible."""
        while not self._unsent:
            message = self._undelivered.take()
            if message is None:
                return False
            self._encode(message)
        return True

    def _encode(self, message: SchedulerToFrontend) -> None:
        """Append it to what is unsent, in halves if its receiver would not take it as a whole."""
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
        told = too_large.told_instead(message, problem)
        if told is not None:
            self._encode(told)

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
