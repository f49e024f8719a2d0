"""How many requests each decode server may have open here, so that none has to be refused.

Credits are a level, not an increment: a decode server may have so many open, and who hears of a
newer level forgets the older one. A lost message so costs a heartbeat, and no credit.

    queue of 64, three decode servers       A has 30 open    B has 2 open    C has none
    kept for those without: 64    / 2 / 3                                    10
    a fair share of the rest: 54 / 2        27               27
    level                                   30               12: of what is left, as much again
                                                                 as it has, or as is kept for one
Levels add up to no more than the queue. Knows nothing of messages, and of requests only how many
there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

# Half of the queue is kept, in equal parts, for decode servers that have nothing open, so that each
# can begin before it has heard of a level. All of it belongs to the others when none is idle.
IDLE_SHARE = 1 / 2


class Credits:
    """Owner of the levels. Decode servers go by their incarnation."""

    def __init__(self, queue_max: int) -> None:
        self._queue_max = queue_max
        self._open: Counter[str] = Counter()
        self._levels: dict[str, int] = {}
        self._reported: dict[str, int] = {}
        self._idle_level = queue_max
        self._seen: tuple[int, list[str]] = (0, [])
        self._is_stale = True

    def begin(self, peer: str) -> None:
        """A request of this decode server is open from now on."""
        self._open[peer] += 1
        self._is_stale = True

    def end(self, peer: str) -> None:
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]
        self._is_stale = True

    def note_refused(self, peer: str) -> None:
        """There was no room for a request, whatever level was reported: a new one is awaited."""
        self._reported[peer] = min(self._reported.get(peer, 0), self._open[peer])
        self._is_stale = True

    def report(self, peer: str) -> int:
        """The level of a decode server, which hears of it now."""
        self._reported[peer] = self._levels.get(peer, self._idle_level)
        return self._reported[peer]

    def update(self, peers: list[str], request_count: int) -> list[str]:
        """Find the levels of these. Returns those to report to at once: they have used the level
        that they know, so that requests may wait there, and may have more.

        request_count: of all that are here, those of routers included.
        """
        if not self._is_stale and self._seen == (request_count, peers):
            return []
        self._is_stale, self._seen = False, (request_count, peers)
        self._reported = {peer: self._reported[peer] for peer in peers if peer in self._reported}
        self._find_levels(peers, request_count)
        return [
            peer
            for peer in peers
            if self._levels[peer] > self._open[peer] >= self._reported.get(peer, 0)
        ]

    def _find_levels(self, peers: Iterable[str], request_count: int) -> None:
        idle = [peer for peer in peers if not self._open[peer]]
        active = sorted((p for p in peers if self._open[p]), key=lambda peer: self._open[peer])
        room = max(0, self._queue_max - request_count)
        open_count = sum(self._open[peer] for peer in active)
        peer_count = max(1, len(idle) + len(active))
        capacity = room + open_count
        kept = min(int(IDLE_SHARE * capacity / peer_count), room // max(1, len(idle)))
        self._idle_level = min(room, max(1, kept))
        self._levels = dict.fromkeys(idle, self._idle_level)
        left = max(0, room - len(idle) * self._idle_level)
        share = (left + open_count) // max(1, len(active))
        # The one with least is first, so that those above their share leave the rest. What
        # is reported to one is on its way while others get theirs: a level at most doubles.
        for peer in active:
            step = max(self._open[peer], self._idle_level)
            extra = max(0, min(share - self._open[peer], step, left))
            self._levels[peer] = self._open[peer] + extra
            left -= extra
