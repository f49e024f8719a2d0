"""What becomes of messages between the schedulers of two servers.

They take random time and keep their order per link, as on one connection. A pair can be cut, which
loses them; slow; stalled, so that all come at once when it is over; or it breaks its connection
again and again, so that what was on its way comes late, after what was sent later. What a decode
server says may be said twice, as by a dialler that does not know whether it was heard.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

DELAY_S = 0.002
LATE_S = 0.1
# How much later the second of two comes: mostly when the first is settled.
ECHO_S = 0.2

Pair = frozenset[str]
After = Callable[[float, Callable[[], None]], None]


class Network:
    """tally: what happened how often."""

    def __init__(self, rng: random.Random, after: After, tally: Counter[str]) -> None:
        self.cut: set[Pair] = set()
        self.slow: dict[Pair, float] = {}
        self.stalled: dict[Pair, float] = {}
        self.shaky: set[Pair] = set()
        self.echoing: set[Pair] = set()
        self._rng = rng
        self._after = after
        self._tally = tally
        self._arrival: dict[tuple[str, str], float] = {}

    def carry(self, source: str, target: str, now: float, deliver: Callable[[], None]) -> None:
        """Deliver a message some time later, once, twice or never."""
        pair = frozenset((source, target))
        if pair in self.cut:
            self._tally["messages lost in a cut"] += 1
            return
        at = now + self._rng.expovariate(1 / self.slow.get(pair, DELAY_S))
        if pair in self.stalled:
            at += max(0.0, self.stalled[pair] - now)
        if pair in self.shaky and self._rng.random() < 0.3:
            at += self._rng.uniform(0.0, 0.3)
            self._tally["messages out of order"] += 1
        else:
            at = max(self._arrival.get((source, target), 0.0), at)
            self._arrival[source, target] = at
        self._tally["messages late"] += at - now > LATE_S
        self._after(at - now, deliver)
        if pair in self.echoing and self._rng.random() < 0.5:
            self._tally["messages doubled"] += 1
            self._after(at - now + self._rng.expovariate(1 / ECHO_S), deliver)

    def repair(self) -> None:
        self.cut.clear()
        self.slow.clear()
        self.stalled.clear()
        self.shaky.clear()
        self.echoing.clear()
