"""What the prefix cache costs a scheduler: time for one long prompt, memory for many.

Time: a prompt of 128k tokens beside some hundred thousand others. It is looked for and not found,
its blocks are put in as its chunks of 8,192 tokens return, and it is found by the next one, pages
and all. The digests that it is found by are made before, in the frontend, and have a row of their
own.
Memory: one million tokens of sessions that share a beginning and part from one another, in pages of
16 tokens. Counted by tracemalloc; the pool's record of which pages are used is in it.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc

import numpy as np

from bench.report import Row, at_most
from common.layout.cache_layout import ServerLayout
from common.layout.families import gqa_components
from common.prefix_digests import DIGEST_NBYTES, DIGEST_TOKENS, extend_digests, prefix_seed
from common.scheduling.page_pool import PagePool
from common.scheduling.prefix_cache import PrefixCache

PAGE_SIZE = 16
VOCAB_SIZE = 128_256
SEED = prefix_seed({"model": "bench"})

PROMPT_TOKENS = 1 << 17
CHUNK_TOKENS = 8192
OTHER_COUNT = 4  # prompts of as many tokens that are there already
SAMPLE_COUNT = 40
WARM_UP_COUNT = 5
MATCH_INSERT_MS_MAX = 3.0

SESSION_COUNT = 100
SHARED_TOKENS, TURN_COUNT, TURN_TOKENS = 2000, 10, 1000
MEMORY_TOKENS = SHARED_TOKENS + SESSION_COUNT * TURN_COUNT * TURN_TOKENS
MEMORY_MB_MAX = 40.0


def run() -> list[Row]:
    return [*measure_time(), measure_memory()]


def measure_time() -> list[Row]:
    rng = np.random.default_rng(3)
    cache, pool = make_cache((OTHER_COUNT + 2) * PROMPT_TOKENS)
    for _ in range(OTHER_COUNT):
        insert(cache, pool, extend_digests(SEED, _tokens(rng, PROMPT_TOKENS)), PROMPT_TOKENS)
    digest_ms: list[float] = []
    cache_ms: list[float] = []
    for _ in range(SAMPLE_COUNT + WARM_UP_COUNT):
        cache.evict([PROMPT_TOKENS // PAGE_SIZE])
        token_ids = _tokens(rng, PROMPT_TOKENS)
        started_at = time.perf_counter()
        digests = extend_digests(SEED, token_ids)
        made_at = time.perf_counter()
        found = cache.match(digests, token_ids, PROMPT_TOKENS)
        assert found.block_count == 0
        looked_at = time.perf_counter()
        pages = [pool.allocate(0, PROMPT_TOKENS // PAGE_SIZE)]  # with or without a cache
        inserted_at = time.perf_counter()
        _insert_chunks(cache, digests, pages, PROMPT_TOKENS)
        found = cache.match(digests, token_ids, PROMPT_TOKENS)
        assert found.node is not None
        assert cache.pages(found.node, found.block_count) == pages
        ended_at = time.perf_counter()
        digest_ms.append(1e3 * (made_at - started_at))
        cache_ms.append(1e3 * (looked_at - made_at + ended_at - inserted_at))
    return [
        _row("tree_match_insert_128k", cache_ms, MATCH_INSERT_MS_MAX),
        _row("digests_128k", digest_ms, None),
    ]


def measure_memory() -> Row:
    """All that the tree keeps of the sessions; nothing else is alive at the end."""
    rng = np.random.default_rng(4)
    cache, pool = make_cache(2 * MEMORY_TOKENS)
    shared = _tokens(rng, SHARED_TOKENS)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(SESSION_COUNT):
        token_ids = list(shared)
        for _ in range(TURN_COUNT):
            token_ids += _tokens(rng, TURN_TOKENS)
            insert(cache, pool, extend_digests(SEED, token_ids), len(token_ids))
    del token_ids
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    # Of each turn's last tokens, those of no whole page are not kept until the next one.
    assert cache.tree.block_count * PAGE_SIZE >= MEMORY_TOKENS - SESSION_COUNT * PAGE_SIZE
    return Row("tree_memory_1m_tokens", used / 1e6, "MB", target=at_most(MEMORY_MB_MAX))


def make_cache(token_count: int) -> tuple[PrefixCache, PagePool]:
    components = gqa_components(layer_count=32, kv_head_count=8, head_dim=128, dtype="bfloat16")
    layout = ServerLayout(components, 1, ((0, 32),), PAGE_SIZE)
    pool = PagePool([token_count // PAGE_SIZE])
    return PrefixCache(pool, layout.groups, DIGEST_TOKENS, checkpoint_max=0), pool


def insert(cache: PrefixCache, pool: PagePool, digests: bytes, token_count: int) -> None:
    """Put a prompt in: what is there is used, the rest gets pages."""
    found = cache.match(digests, (), token_count)
    known = [] if found.node is None else cache.pages(found.node, found.block_count)[0]
    pages = [known + pool.allocate(0, cache.blocks_in(token_count) - found.block_count)]
    _insert_chunks(cache, digests, pages, token_count)


def _insert_chunks(
    cache: PrefixCache, digests: bytes, pages: list[list[int]], token_count: int
) -> None:
    found = cache.match(digests, (), token_count)
    node = cache.lock(found.node or cache.tree.root(digests[:DIGEST_NBYTES]), found.block_count)
    for stop in range(found.token_count + CHUNK_TOKENS, token_count + CHUNK_TOKENS, CHUNK_TOKENS):
        blocks = cache.blocks_in(min(stop, token_count))
        node, twice = cache.extend(node, digests, pages, blocks)
        assert twice == []
    cache.unlock(node)


def _row(name: str, values_ms: list[float], bound_ms: float | None) -> Row:
    value = statistics.median(values_ms[WARM_UP_COUNT:])
    target = None if bound_ms is None else at_most(bound_ms)
    return Row(name, value, "ms", samples=len(values_ms) - WARM_UP_COUNT, target=target)


def _tokens(rng: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = rng.integers(0, VOCAB_SIZE, size=count).tolist()
    return tokens
