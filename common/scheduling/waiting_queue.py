"""The order in which requests wait, of either role, and who is looked at when there are many.

    priority 5    begun before: r7 r9    client a: r1 r4    client b: r2 r3
    priority 0    begun before:          client a: r5       client c: r6 r8

The more urgent come first, and among them those that had begun once. Of the others, the client is
next that was served least; its requests follow each other as they came. Knows nothing of why a
request waits, nor of what it costs to serve.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from common.request import Claim
from common.scheduling.fair_share import FairShare

# So many of each priority that stay are looked at in their order, in every round.
FIRST_COUNT = 8
# So many of each priority that stay are looked at in a round at all: a queue can be long.
LOOK_COUNT_MAX = 64

# Whether it has not begun, when it came to wait, its id.
Key = tuple[bool, int, int]
START: Key = (False, 0, 0)


class Waiting(Protocol):
    request_id: int

    @property
    def claim(self) -> Claim: ...


R = TypeVar("R", bound=Waiting)


@dataclass(slots=True)
class Level:
    """Requests of one priority, without those that are set aside.

    keys: of all. lines: of those that have not begun, by client. looked_at: behind it goes on who
    looks at them in turn. new_counts: as `lines`, those that are set aside included.
    """

    keys: list[Key] = field(default_factory=list)
    lines: dict[str, list[Key]] = field(default_factory=dict)
    looked_at: Key = START
    begun_count: int = 0
    new_counts: dict[str, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.begun_count and not self.new_counts


class WaitingQueue(Generic[R]):
    """Owner of the order. share: how much each client was served.

    A request that is set aside waits as well, and is not looked at until it is put back: it then
    stands where it stood.
    """

    def __init__(self) -> None:
        self.share = FairShare()
        self._requests: dict[int, R] = {}
        self._keys: dict[int, Key] = {}
        self._aside: set[int] = set()
        self._levels: dict[int, Level] = {}
        self._priorities: list[int] = []  # ascending
        self._next_ticket = 1

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[R]:
        """All of them, in no order, those that are set aside included."""
        return iter(list(self._requests.values()))

    # ---- they come and go ------------------------------------------------------------------------

    def add(self, request: R) -> None:
        self._add(request, is_new=True)

    def add_again(self, request: R) -> None:
        """A request comes back that had left the queue."""
        self._add(request, is_new=False)

    def _add(self, request: R, *, is_new: bool) -> None:
        request_id, claim = request.request_id, request.claim
        assert request_id not in self._requests
        self._requests[request_id] = request
        self._keys[request_id] = (is_new, self._next_ticket, request_id)
        self._next_ticket += 1
        self._aside.add(request_id)
        level = self._levels.get(claim.priority)
        if level is None:
            level = self._levels[claim.priority] = Level()
            insort(self._priorities, claim.priority)
        if is_new:
            level.new_counts[claim.client] = level.new_counts.get(claim.client, 0) + 1
        else:
            level.begun_count += 1
        self.share.begin_waiting(claim.client)
        self.put_back(request)

    def discard(self, request: R) -> None:
        """It waits no longer. Harmless if it did not."""
        request_id, claim = request.request_id, request.claim
        if request_id not in self._requests:
            return
        self.set_aside(request)
        self._aside.discard(request_id)
        del self._requests[request_id]
        is_new, _, _ = self._keys.pop(request_id)
        level = self._levels[claim.priority]
        if is_new:
            level.new_counts[claim.client] -= 1
            if not level.new_counts[claim.client]:
                del level.new_counts[claim.client]
        else:
            level.begun_count -= 1
        if level.is_empty:
            del self._levels[claim.priority]
            self._priorities.remove(claim.priority)
        self.share.end_waiting(claim.client)

    def set_aside(self, request: R) -> None:
        """Harmless if it is."""
        if request.request_id in self._aside:
            return
        self._aside.add(request.request_id)
        key, level = self._keys[request.request_id], self._levels[request.claim.priority]
        _remove(level.keys, key)
        if key[0]:
            line = level.lines[request.claim.client]
            _remove(line, key)
            if not line:
                del level.lines[request.claim.client]

    def put_back(self, request: R) -> None:
        """Harmless if it is not set aside."""
        if request.request_id not in self._aside:
            return
        self._aside.discard(request.request_id)
        key, level = self._keys[request.request_id], self._levels[request.claim.priority]
        insort(level.keys, key)
        if key[0]:
            insort(level.lines.setdefault(request.claim.client, []), key)

    # ---- their order -----------------------------------------------------------------------------

    @property
    def first(self) -> R | None:
        """Who would be next of those that are not set aside."""
        return next(self.in_order(), None)

    def in_order(self) -> Iterator[R]:
        """Those that are not set aside. Who leaves meanwhile, and what clients are charged, counts
        from the next one on."""
        for priority in self._priorities[::-1]:
            if priority in self._levels:
                yield from self._level_in_order(self._levels[priority])

    def looks(self) -> Iterator[R]:
        """Who is looked at in a round, which may be left at any time. Of each priority, the first
        that stay in their order, the others one after the other, from where the round before
        stopped; the more urgent before all that are less so."""
        for priority in self._priorities[::-1]:
            if priority not in self._levels:
                continue
            level = self._levels[priority]
            stayed: set[int] = set()
            for request in self._level_in_order(level):
                yield request
                if self._is_ready(request.request_id):
                    stayed.add(request.request_id)
                    if len(stayed) >= FIRST_COUNT:
                        break
            for request in self._in_turn(level):
                if request.request_id not in stayed:
                    yield request
                    stayed.add(request.request_id)
                    if len(stayed) >= LOOK_COUNT_MAX:
                        break

    def lines(self) -> Iterator[tuple[int, str]]:
        """The lines of those that have not begun and are not set aside, by priority and client, in
        the order in which they are next."""
        for priority in self._priorities[::-1]:
            lines = self._levels[priority].lines
            for client in sorted(lines, key=lambda one: (self.share.served(one), lines[one][0])):
                yield priority, client

    def oldest_of(self, line: tuple[int, str]) -> R:
        priority, client = line
        return self._requests[self._levels[priority].lines[client][0][-1]]

    def _is_ready(self, request_id: int) -> bool:
        return request_id in self._requests and request_id not in self._aside

    def _level_in_order(self, level: Level) -> Iterator[R]:
        key = START
        while (index := bisect_right(level.keys, key)) < len(level.keys):
            key = level.keys[index]
            if key[0]:
                break
            yield self._requests[key[-1]]
        served = self.share.served
        nexts = [(served(client), line[0], client) for client, line in level.lines.items()]
        heapq.heapify(nexts)
        while nexts:
            _, key, client = heapq.heappop(nexts)
            line = level.lines.get(client, [])
            if (index := bisect_left(line, key)) == len(line):
                continue
            key = line[index]
            yield self._requests[key[-1]]
            line = level.lines.get(client, [])
            if (index := bisect_right(line, key)) < len(line):
                heapq.heappush(nexts, (served(client), line[index], client))

    def _in_turn(self, level: Level) -> Iterator[R]:
        """Each once, from the first that was not looked at."""
        for _ in range(len(level.keys)):
            if not level.keys:
                return
            index = bisect_right(level.keys, level.looked_at) % len(level.keys)
            key = level.keys[index]
            yield self._requests[key[-1]]
            level.looked_at = key

    # ---- how many --------------------------------------------------------------------------------

    def count_before(self, claim: Claim) -> int:
        """Requests that would be served before one that came now: those that are more urgent and
        those that have begun, the client's own, and of each other client as many as of this one."""
        count = 0
        for priority, level in self._levels.items():
            if priority > claim.priority:
                count += level.begun_count + sum(level.new_counts.values())
            elif priority == claim.priority:
                own_count = level.new_counts.get(claim.client, 0)
                others = (n for client, n in level.new_counts.items() if client != claim.client)
                count += level.begun_count + own_count
                count += sum(min(other, own_count + 1) for other in others)
        return count

    def displaced_by(self, claim: Claim) -> R | None:
        """Who makes room in a full queue for one that comes: of the least urgent that have not
        begun, the latest one of the client that has most. None if that is not less urgent, and its
        client has no more than this one."""
        priority = next((one for one in self._priorities if self._levels[one].new_counts), None)
        if priority is None or priority > claim.priority:
            return None
        counts = self._levels[priority].new_counts
        client = max(counts, key=lambda one: (counts[one], one))
        own_count = counts.get(claim.client, 0)
        if priority == claim.priority and counts[client] <= own_count + 1:
            return None
        ids = (one for one, request in self._requests.items() if self._keys[one][0]
               and request.claim == Claim(priority, client))  # fmt: skip
        return self._requests[max(ids, key=self._keys.__getitem__)]


def _remove(keys: list[Key], key: Key) -> None:
    index = bisect_left(keys, key)
    assert keys[index] == key
    del keys[index]
