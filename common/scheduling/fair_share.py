"""How much each client was served, so that the one with least is next: a virtual token counter.

    client a   waits all the time    10 ── 40 ── 70 ── 100 ─
    client b   waits again here                   70 ── 70 ─     lifted to the least that waits

A client is charged the prompt tokens that are computed for it and twice its output tokens. One that
begins to wait is lifted to the least count of those that wait: an idle hour is not saved up. Where
none waits, it is lifted to the count of the one that waited last. So of two clients that both have
something waiting all the time, neither is ahead of the other by more than what is admitted at once.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2. Knows nothing of
requests, nor of what the clients are.
"""

from __future__ import annotations

from collections import Counter

PROMPT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2
# Clients that wait for nothing and are remembered all the same: far more than have keys.
IDLE_COUNT_MAX = 4096


class FairShare:
    """Owner of the counts. Clients go by a name; that of all who showed no key is ""."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._waiting: Counter[str] = Counter()
        self._floor = 0  # no client that begins to wait is below it, and it never sinks
        self._waited_last = ""

    def __len__(self) -> int:
        """Clients that are remembered."""
        return len(self._served)

    def served(self, client: str) -> int:
        return self._served.get(client, 0)

    @property
    def waiting(self) -> Counter[str]:
        """Requests that wait, by client."""
        return self._waiting

    def begin_waiting(self, client: str) -> None:
        """One more request of a client waits."""
        if not self._waiting[client]:
            self._floor = self._least()
            self._served[client] = max(self.served(client), self._floor)
            self._forget_idle()
        self._waiting[client] += 1

    def end_waiting(self, client: str) -> None:
        """One less does."""
        self._waiting[client] -= 1
        if not self._waiting[client]:
            del self._waiting[client]
            self._waited_last = client

    def charge(self, client: str, token_count: int, cost: int = PROMPT_TOKEN_COST) -> None:
        """token_count: below 0 for what was charged and turned out to be cached."""
        self._served[client] = max(0, self.served(client) + cost * token_count)

    def _least(self) -> int:
        """What one that begins to wait is lifted to."""
        if not self._waiting:
            return max(self._floor, self.served(self._waited_last))
        return max(self._floor, min(map(self.served, self._waiting)))

    def _forget_idle(self) -> None:
        """Who is below the floor is lifted to it anyway. Beyond a number, those near it go too."""
        if len(self._served) <= len(self._waiting) + IDLE_COUNT_MAX:
            return
        kept = {one: count for one, count in self._served.items() if one in self._waiting}
        idle = [one for one, count in self._served.items() if count > self._floor]
        idle = sorted((one for one in idle if one not in kept), key=self.served, reverse=True)
        self._served = kept | {one: self._served[one] for one in idle[: IDLE_COUNT_MAX // 2]}
