"""What heartbeats say of the prefix cache: made anew now and then, while it changes."""

from __future__ import annotations

from common.scheduling.prefix_cache import MARK_COUNT_MAX, MARK_NBYTES, PrefixCache

# How often all of a cache is looked through.
TOLD_INTERVAL_S = 0.5


class ToldPrefixes:
    """caches: of the pool, and of the tier in host memory; none says nothing."""

    def __init__(self, *caches: PrefixCache | None) -> None:
        self._caches = [cache for cache in caches if cache is not None]
        self._version = -1
        self._next_at = 0.0
        self._marks: bytes | None = None

    @property
    def count(self) -> int:
        return len(self._marks or b"") // MARK_NBYTES

    def take(self, now: float) -> bytes | None:
        """The same object until there is something else to say."""
        version = sum(cache.version for cache in self._caches)
        if self._caches and now >= self._next_at and version != self._version:
            self._next_at = now + TOLD_INTERVAL_S
            self._version = version
            marks = b"".join(cache.marks() for cache in self._caches)
            self._marks = marks[: MARK_COUNT_MAX * MARK_NBYTES]
        return self._marks
