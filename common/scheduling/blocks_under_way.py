"""Which sequence computes the block behind a cached prefix, so that others can wait for it.

    prefix cache   a b c d | e f g h |
    sequence 1             | cached  | i j k l | m n o p     computes i j k l next
    a newcomer     a b c d   e f g h   i j k l   x           waits until sequence 1 has those

A block is a full page of the group that the prefix cache serves. Knows nothing of who waits.
"""

from __future__ import annotations

from collections.abc import Sequence as List

from common.scheduling.prefix_cache import CacheNode
from common.scheduling.sequence import PageAccount, Sequence

# The last cached page before a block, None if there is none, and the block's tokens.
Key = tuple[CacheNode | None, tuple[int, ...]]


class BlocksUnderWay:
    """The next block of every sequence that computes its prompt."""

    def __init__(self, account: PageAccount) -> None:
        self._account = account
        self._writers: dict[Key, Sequence] = {}
        self._keys: dict[int, Key] = {}

    def note(self, sequence: Sequence) -> None:
        """It computes the block behind those that it has in the cache. To be said again after each
        chunk. Of two that compute the same block, the first one counts."""
        self.forget(sequence)
        size = self._account.groups[0].page_items
        cached_count = len(sequence.nodes) * size
        if self._account.cache is not None and cached_count + size <= len(sequence.token_ids):
            key = _key(sequence.nodes, sequence.token_ids, cached_count, size)
            if self._writers.setdefault(key, sequence) is sequence:
                self._keys[sequence.request_id] = key

    def forget(self, sequence: Sequence) -> None:
        """It computes no further. Harmless if it was not noted."""
        key = self._keys.pop(sequence.request_id, None)
        if key is not None:
            del self._writers[key]

    def find(
        self, nodes: List[CacheNode], token_ids: list[int], token_max: int
    ) -> tuple[Sequence, int] | None:
        """Who computes the block behind a cached prefix of these tokens, and how many tokens the
        two share in whole blocks; None if no prompt does. token_max: that could be reused."""
        if self._account.cache is None:
            return None
        size = self._account.groups[0].page_items
        stop = len(nodes) * size
        if stop + size > token_max:
            return None
        writer = self._writers.get(_key(nodes, token_ids, stop, size))
        if writer is None:
            return None
        last = min(token_max, len(writer.token_ids)) - size
        while (
            stop <= last and token_ids[stop : stop + size] == writer.token_ids[stop : stop + size]
        ):
            stop += size
        return writer, stop


def _key(nodes: List[CacheNode], token_ids: list[int], start: int, size: int) -> Key:
    return (nodes[-1] if nodes else None, tuple(token_ids[start : start + size]))
