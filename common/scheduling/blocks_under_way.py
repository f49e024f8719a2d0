"""Which sequence computes the block behind a cached prefix, so that others can wait for it.

    prefix cache   b1 | b2 |
    sequence 1     cached  | b3 | b4         computes b3 next
    a newcomer     b1   b2   b3   x          waits until sequence 1 has b3

Knows nothing of who waits.
"""

from __future__ import annotations

from common.prefix_digests import DIGEST_NBYTES
from common.scheduling.page_account import PageAccount
from common.scheduling.prefix_cache import Match
from common.scheduling.prefix_tree import equal_count
from common.scheduling.sequence import Sequence


class BlocksUnderWay:
    """The next block of every sequence that computes its prompt."""

    def __init__(self, account: PageAccount) -> None:
        self._account = account
        self._writers: dict[bytes, Sequence] = {}
        self._stops: dict[bytes, Sequence] = {}
        self._keys: dict[int, list[tuple[dict[bytes, Sequence], bytes]]] = {}

    def note(self, sequence: Sequence) -> None:
        """It computes the block behind those that it has in the cache, and stops at its cuts. To be
        said again after each chunk. Of two that compute the same block, the first one counts."""
        self.forget(sequence)
        cache = self._account.cache
        if cache is None or not sequence.digests:
            return
        _, keys = cache.keys_of(sequence.digests)
        found = self._keys.setdefault(sequence.request_id, [])
        at = sequence.block_count * DIGEST_NBYTES
        if at < len(keys):
            found.append((self._writers, keys[at : at + DIGEST_NBYTES]))
        for cut in (*sequence.cuts, *sequence.making):
            at = cache.blocks_in(cut) * DIGEST_NBYTES
            if cut % cache.block_tokens == 0 and 0 < at <= len(keys):
                found.append((self._stops, keys[at - DIGEST_NBYTES : at]))
        for table, key in found:
            table.setdefault(key, sequence)

    def forget(self, sequence: Sequence) -> None:
        """It computes no further. Harmless if it was not noted."""
        for table, key in self._keys.pop(sequence.request_id, ()):
            if table.get(key) is sequence:
                del table[key]

    def find(self, match: Match, digests: bytes, token_max: int) -> tuple[Sequence, int] | None:
        """Who computes the block behind what was found, and how many tokens the two share in whole
        blocks; None if no prompt does, or if none can be gone on from. token_max: that could be
        reused."""
        cache = self._account.cache
        if cache is None or not digests:
            return None
        _, keys = cache.keys_of(digests)
        start, block_max = match.block_count, cache.blocks_in(token_max)
        at = start * DIGEST_NBYTES
        writer = self._writers.get(keys[at : at + DIGEST_NBYTES]) if start < block_max else None
        if writer is None:
            return self._find_stop(match, keys, min(start, block_max))
        _, theirs = cache.keys_of(writer.digests)
        block_max = min(block_max, len(theirs) // DIGEST_NBYTES)
        shared = start + equal_count(keys, start, theirs, start, block_max - start)
        token_count = shared * cache.block_tokens
        if cache.needs_checkpoint and not self._account.cached.can_keep_at(writer, token_count):
            return self._find_stop(match, keys, min(start, block_max))
        return writer, token_count

    def _find_stop(
        self, match: Match, keys: bytes, block_count: int
    ) -> tuple[Sequence, int] | None:
        """Who makes a checkpoint at the end of so many blocks, which are there."""
        cache = self._account.cache
        assert cache is not None
        token_count = block_count * cache.block_tokens
        writer = self._stops.get(
            keys[(block_count - 1) * DIGEST_NBYTES : block_count * DIGEST_NBYTES]
        )
        if writer is None or not block_count or token_count <= match.token_count:
            return None
        return writer, token_count
