"""Whether transfers from this server arrive: the outcome of the last ones to each peer.

Knows nothing of requests. Time is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.scheduling.breaker import FAILURE_COUNT_MAX

# What failed longer ago says nothing of now: where no transfer is tried, nothing can turn a
# red health check green.
LATELY_S = 60.0
# Peers that are remembered; one that comes back after its connection broke is the same one.
RECORD_COUNT_MAX = 256


@dataclass(slots=True)
class _Record:
    failure_count: int = 0
    failed_at: float = 0.0


class TransferHealth:
    """Failures in a row, by the incarnation of the peer."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def note_success(self, peer: str) -> None:
        self._records.pop(peer, None)

    def note_failure(self, peer: str, now: float) -> None:
        record = self._records.pop(peer, _Record())
        record.failure_count += 1
        record.failed_at = now
        self._records[peer] = record
        if len(self._records) > RECORD_COUNT_MAX:
            del self._records[next(iter(self._records))]

    def describe(self, peers: Iterable[str], now: float) -> str:
        """What is the matter if none of the connected `peers` could be handed anything lately, ""
        if some could, or if that is not known."""
        counts = [self._failure_count(peer, now) for peer in peers]
        if not counts or min(counts) < FAILURE_COUNT_MAX:
            return ""
        return f"the last {min(counts)} transfers to each of {len(counts)} decode servers failed"

    def _failure_count(self, peer: str, now: float) -> int:
        record = self._records.get(peer)
        is_recent = record is not None and now - record.failed_at < LATELY_S
        return record.failure_count if record is not None and is_recent else 0
