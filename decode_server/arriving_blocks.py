"""Blocks that are on their way to this server, so that an equal beginning is not sent twice.

    request 1 asks for   b1 | b2 | b3 | b4        under way
    request 2 waits      b1   b2   b3   b4   x    and then asks for what is behind b4

Knows nothing of pages or transfers.
"""

from __future__ import annotations

from common.prefix_digests import DIGEST_NBYTES
from common.scheduling.prefix_cache import PrefixCache
from common.scheduling.prefix_tree import equal_count
from decode_server.request import DecodeRequest

# Another request's cache is waited for if it spares this much of what is lacking, and if this much
# of what it brings is wanted: all of it has to come first.
SHARED_SHARE_MIN = 1 / 2


class ArrivingBlocks:
    """The first block that each transfer brings. count: how often a request began to wait."""

    def __init__(self, cache: PrefixCache | None) -> None:
        self._cache = cache
        self._first: dict[bytes, DecodeRequest] = {}
        self._keys: dict[int, bytes] = {}
        self._waiting: set[int] = set()
        self.count = 0

    def add(self, request: DecodeRequest, block_count: int) -> None:
        """All blocks of a request behind so many are asked for. Of two that ask for the same one,
        the first counts."""
        self._waiting.discard(request.request_id)
        key = self._key(request, block_count)
        if key and self._first.setdefault(key, request) is request:
            self._keys[request.request_id] = key

    def remove(self, request: DecodeRequest) -> None:
        """They are there, or won't come. Harmless if nothing was asked for."""
        self._waiting.discard(request.request_id)
        key = self._keys.pop(request.request_id, None)
        if key is not None:
            del self._first[key]

    def is_awaited(self, request: DecodeRequest, block_count: int) -> bool:
        """Whether a request of which so many blocks are here waits for what another one brings."""
        cache, key = self._cache, self._key(request, block_count)
        other = self._first.get(key) if key else None
        if cache is None or other is None or other.claim.priority < request.claim.priority:
            return False  # who is less urgent may wait for long
        _, ours = cache.keys_of(request.digests)
        _, theirs = cache.keys_of(other.digests)
        most = min(len(ours), len(theirs)) // DIGEST_NBYTES - block_count
        shared_count = equal_count(ours, block_count, theirs, block_count, most)
        shared = shared_count * cache.block_tokens
        here = block_count * cache.block_tokens
        longest = max(len(request.token_ids), len(other.token_ids)) - here
        if shared < SHARED_SHARE_MIN * longest:
            return False
        self.count += request.request_id not in self._waiting
        self._waiting.add(request.request_id)
        return True

    def _key(self, request: DecodeRequest, block_count: int) -> bytes:
        if self._cache is None or not request.digests:
            return b""
        _, keys = self._cache.keys_of(request.digests)
        return keys[block_count * DIGEST_NBYTES : (block_count + 1) * DIGEST_NBYTES]
