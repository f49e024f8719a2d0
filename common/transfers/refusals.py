"""Servers that dialled this one and were refused: each is answered, logged once and shown a while.

Knows nothing of why two servers do not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.protocol.frontend import PeerState
from common.protocol.peer import Refuse
from common.scheduling.log_rate_limiter import LogRateLimiter
from common.scheduling.peers import REFUSED_RETRY_S, Outbox
from common.transfers.connection import shown_link

# Refused servers that operators are shown, and for how long after their last attempt.
SHOWN_COUNT_MAX = 16
SHOWN_S = 3 * REFUSED_RETRY_S
# Different reasons of refused connections that are logged; the rest is counted.
REASON_COUNT_MAX = 64


@dataclass(frozen=True, slots=True)
class _Refused:
    """A process that was refused; it asks again now and then."""

    link: str
    name: str
    detail: str
    asked_at: float


class Refusals:
    """count: of refused handshakes. link_count: of connections refused below them."""

    def __init__(self, incarnation: str, outbox: Outbox) -> None:
        self._incarnation = incarnation
        self._outbox = outbox
        self._refused: dict[str, _Refused] = {}
        self._reasons: set[str] = set()
        self._lines = LogRateLimiter()
        self.count = 0
        self.link_count = 0

    def refuse(
        self, link: str, incarnation: str, name: str, differences: list[str], now: float
    ) -> None:
        """Answer a handshake with every difference. A greeting is answered only once all that was
        shared with an earlier scheduler of its sender is closed."""
        self.count += 1
        self._outbox.to_peer(link, Refuse(self._incarnation, differences, is_closed=True))
        detail = "; ".join(differences)
        known = self._refused.pop(incarnation, None)
        if known is None or known.detail != detail:
            text = f"refused decode server {name or incarnation} ({shown_link(link)}): {detail}"
            line = self._lines.admit(text, now)
            if line:
                self._outbox.report(line, is_warning=True)
        if len(self._refused) >= SHOWN_COUNT_MAX:
            del self._refused[next(iter(self._refused))]
        self._refused[incarnation] = _Refused(link, name, detail, now)

    def note_link_refused(self, reason: str) -> None:
        """A connection came to nothing before its handshake: counted, logged once per reason."""
        self.link_count += 1
        if reason not in self._reasons and len(self._reasons) < REASON_COUNT_MAX:
            self._reasons.add(reason)
            self._outbox.report(f"refused a connection: {reason}", is_warning=True)

    def forget(self, incarnation: str) -> None:
        """The server fits by now."""
        self._refused.pop(incarnation, None)

    def expire(self, now: float) -> None:
        for incarnation, refused in list(self._refused.items()):
            if now - refused.asked_at > SHOWN_S:
                del self._refused[incarnation]

    def states(self) -> list[PeerState]:
        return [
            PeerState(shown_link(one.link), incarnation, "refused", one.detail, name=one.name)
            for incarnation, one in self._refused.items()
        ]
