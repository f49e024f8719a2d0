"""What prefill servers are told of rooms in which nobody will ask: the other half waits for that.

Knows nothing of how a request ended.
"""

from __future__ import annotations

from common.protocol.peer import Withdraw
from common.request import Bootstrap
from common.scheduling.peers import Outbox
from common.scheduling.transitions import DecodeState
from common.transfers.links import Links
from decode_server.request import DecodeRequest


class Rooms:
    """incarnation: of this server."""

    def __init__(self, incarnation: str, links: Links, outbox: Outbox) -> None:
        self._incarnation = incarnation
        self._links = links
        self._outbox = outbox

    def leave(self, request: DecodeRequest, reason: str) -> None:
        """A request ends. If it has reserved nothing yet, its other half waits."""
        is_waiting = request.state is DecodeState.WAITING and request.bootstrap_link is not None
        if is_waiting and request.bootstrap is not None:
            self.withdraw(request.bootstrap, reason)

    def withdraw(self, bootstrap: Bootstrap, reason: str) -> None:
        link = self._links.resolve(f"{bootstrap.host}:{bootstrap.port}", bootstrap.engine)
        self._outbox.to_peer(link, Withdraw(bootstrap.room, self._incarnation, reason))
