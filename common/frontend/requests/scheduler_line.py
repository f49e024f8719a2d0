"""What is sent to the scheduler, in order; what finds no room at once waits here.

Knows nothing of answers.
"""

from __future__ import annotations

from common.channel.local_async import AsyncLocalClient
from common.channel.sockets import SendResult
from common.protocol.codec import encode
from common.protocol.frontend import (
    Cancel,
    Continue,
    Drain,
    FlushCache,
    GetState,
    Pause,
    SetPeers,
    Submit,
    UpdateWeights,
)

Queued = Submit | Cancel | Drain | Pause
Sent = Submit | GetState | FlushCache | SetPeers | Pause | Continue | UpdateWeights


class SchedulerLine:
    """Owner of what waits. Bounded: a few messages per request that is under way."""

    def __init__(self, channel: AsyncLocalClient) -> None:
        self._channel = channel
        self._unsent: dict[tuple[type[Queued], int], bytes] = {}

    def try_send(self, message: Sent) -> bool:
        """Whether a message was sent, behind all that waited; not if the scheduler has not read for
        a long time. Raises: ProtocolError if it is too large."""
        payload = encode(message)
        return self.flush() and self._send(payload)

    def queue(self, message: Queued) -> None:
        """Send it now, or as soon as there is room. Raises: ProtocolError if it is too large."""
        request_id = message.request_id if isinstance(message, Submit | Cancel) else 0
        self._unsent[type(message), request_id] = encode(message)
        self.flush()

    def flush(self) -> bool:
        """Send what did not fit before; whether nothing is left."""
        for key, payload in list(self._unsent.items()):
            if not self._send(payload):
                return False
            del self._unsent[key]
        return True

    def _send(self, payload: bytes) -> bool:
        return self._channel.send(payload) is SendResult.SENT
