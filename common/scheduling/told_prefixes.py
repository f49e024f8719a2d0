"""What heartbeats say of the prefix cache: made anew now and then, while it changes."""

from __future__ import annotations

from common.scheduling.prefix_cache import MARK_NBYTES, PrefixCache

# How often all of a cache is looked through.
TOLD_INTERVAL_S = 0.5


class ToldPrefixes:
    """cache: None says nothing."""

    def __init__(self, cache: PrefixCache | None) -> None:
        self._cache = cache
        self._version = -1
        self._next_at = 0.0
        self._marks: bytes | None = None

    @property
    def count(self) -> int:
        return len(self._marks or b"") // MARK_NBYTES

    def take(self, now: float) -> bytes | None:
        """The same object until there is something else to say."""
        cache = self._cache
        if cache is not None and now >= self._next_at and cache.version != self._version:
            self._next_at = now + TOLD_INTERVAL_S
            self._version = cache.version
            self._marks = cache.marks()
        return self._marks
