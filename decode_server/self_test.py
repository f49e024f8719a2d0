"""Which prefill servers are tested: those that were connected just now, and those that no cache was
asked of for a while. A test is a transfer of one token.

It goes the way of every other: pages, a forward pass, puts over the same connection, the comparison
if one is configured, the last message. It has no client and no counter sees it. Writes nothing of a
request.
"""

from __future__ import annotations

from common.transfers.connection import Connection
from common.transfers.links import Links

# What it may take at a server that says it has nothing to do.
SELF_TEST_TIMEOUT_S = 10.0
# And at one that is busy: the first is not put off for that, but waits behind what is queued there.
BUSY_TEST_TIMEOUT_S = 60.0
# How soon one that failed is repeated.
SELF_TEST_RETRY_S = 5.0


class SelfTests:
    """interval_s: without a transfer that went well, until one is tried; 0: none ever is."""

    def __init__(self, links: Links, interval_s: float) -> None:
        self._links = links
        self._interval_s = interval_s
        self._under_way: set[str] = set()
        self.counters = dict.fromkeys(("self_tests", "self_tests_failed"), 0.0)

    def begin_due(self, now: float) -> list[tuple[str, float]]:
        """Link and time budget, in seconds, of the tests to begin now."""
        if not self._interval_s:
            return []
        due = [source for source in self._links.connections.sources() if self._is_due(source, now)]
        self._under_way.update(source.link for source in due)
        return [(source.link, _budget_s(source)) for source in due]

    def note_end(self, link: str, problem: str, now: float) -> None:
        """A test has ended; problem: "" if it went well, or says nothing of the other side."""
        self._under_way.discard(link)
        self.counters["self_tests"] += 1
        self.counters["self_tests_failed"] += bool(problem)
        source = self._links.connections.on_link(link)
        if source is not None and problem:
            self._links.note_test_failed(source, problem, now)

    def has_passed(self, source: Connection) -> bool:
        """Whether transfers from a server are known to work, as far as that is asked for."""
        return not source.test_problem and (source.is_proven or not self._interval_s)

    def _is_due(self, source: Connection, now: float) -> bool:
        is_wanted = not source.is_proven or not source.liveness.queued_token_count
        is_under_way = source.link in self._under_way
        return is_wanted and not is_under_way and now >= self._due_at(source)

    def _due_at(self, source: Connection) -> float:
        if source.test_problem:
            return source.test_failed_at + SELF_TEST_RETRY_S
        return source.succeeded_at + self._interval_s if source.is_proven else 0.0


def _budget_s(source: Connection) -> float:
    return BUSY_TEST_TIMEOUT_S if source.liveness.queued_token_count else SELF_TEST_TIMEOUT_S
