"""How many pages of each group the tier in host memory has on a rank.

Every rank has an equal share of `--host-cache-gb`, cut in the proportions of its pool: tokens, and
checkpoints of their prefixes. Knows nothing of memory that is allocated.
"""

from __future__ import annotations

import torch

from common.config import ServerConfig
from common.engine.cache.kv_pool import KvPool
from common.errors import ConfigError, NotNow
from common.layout.cache_layout import PageGroup, RankLayout
from common.layout.component import LiveKind
from common.worker.checkpoint_counts import window_page_max
from common.worker.pools import free_nbytes

GIB = 1 << 30

UNLIMITED_PAGE_COUNT = (1 << 31) - 1
"""Of every group, on a rank whose layers own nothing of the cache: the smallest count of all ranks
is the server's, and this one is no limit."""

CHECKPOINT_TOKENS = 128
"""Tokens of the tier for each of its checkpoints, at least. A pool may have many more checkpoints,
and windows and states for running requests beside them: a tier that mirrored those would have room
for few tokens, and what is saved would push each other out before it is wanted again."""

CHECKPOINT_COUNT_MIN = 32
"""Checkpoints of a pool that a tier of its size has room for, however few its tokens are."""

LEAST_STEPS_PER_GIB = 10**6
"""The least size is rounded up to so much of a GiB, for people."""


def host_share_nbytes(config: ServerConfig) -> int:
    """Bytes of the tier that each rank of this server may take."""
    return round(config.host_cache_gb * GIB) // config.rank_count


def decide_host_page_counts(
    layout: RankLayout, config: ServerConfig, page_counts: list[int]
) -> list[int]:
    """Pages per group of the tier, without page 0; [] without a tier.

    The tier has as many times the pages of the pool as its bytes have room for the pool's, those
    of checkpoints counted as far as there is one for each CHECKPOINT_TOKENS of its tokens.
    page_counts: of the pool, without the scratch page.
    Raises: ConfigError if a group that has pages in the pool would get none.
    """
    if config.host_cache_gb == 0:
        return []
    page_counts = _kept_counts(layout, page_counts)
    pool_nbytes = sum(KvPool.buffer_nbytes(layout, page_counts))
    if pool_nbytes == 0:
        return [UNLIMITED_PAGE_COUNT] * len(page_counts)
    share = host_share_nbytes(config)
    counts = [count * share // pool_nbytes for count in page_counts]
    for group, count, host_count in zip(layout.groups, page_counts, counts, strict=True):
        if count and host_count < 1:
            raise ConfigError(
                f"--host-cache-gb {config.host_cache_gb:g}: no room for a page of group "
                f"{group.group.name}: must be 0 or at least "
                f"{_least_gb(config, pool_nbytes, page_counts)}"
            )
    return counts


def _kept_counts(layout: RankLayout, page_counts: list[int]) -> list[int]:
    """Of a pool's pages, as many as a tier of its size would have."""
    groups = [group.group for group in layout.groups]
    token_counts = [
        count * group.page_items * max(1, group.live.size)
        for group, count in zip(groups, page_counts, strict=True)
        if _grows(group)
    ]
    if not token_counts:
        return page_counts
    checkpoint_count = max(CHECKPOINT_COUNT_MIN, min(token_counts) // CHECKPOINT_TOKENS)
    return [
        count if _grows(group) else min(count, checkpoint_count * _checkpoint_pages(group))
        for group, count in zip(groups, page_counts, strict=True)
    ]


def _grows(group: PageGroup) -> bool:
    """Whether it has pages for every token that is cached."""
    return group.live.is_paged and group.live.kind is not LiveKind.WINDOW


def _checkpoint_pages(group: PageGroup) -> int:
    """Of a group that does not grow, in one checkpoint."""
    return window_page_max(group) if group.live.kind is LiveKind.WINDOW else 1


def check_host_memory(config: ServerConfig, nbytes: int) -> None:
    """Raises: NotNow if `nbytes` bytes of host memory are not free.

    The system grants memory beyond what there is, and would kill the process that touches it.
    """
    if nbytes == 0:
        return
    free = free_nbytes(torch.device("cpu"))
    if nbytes > free:
        raise NotNow(
            f"--host-cache-gb {config.host_cache_gb:g}: takes {nbytes} bytes of this machine's "
            f"memory, {free} are free"
        )


def _least_gb(config: ServerConfig, pool_nbytes: int, page_counts: list[int]) -> str:
    """The least `host_cache_gb` with a page for each group, rounded up."""
    smallest = min(count for count in page_counts if count)
    nbytes = -(-pool_nbytes // smallest) * config.rank_count
    steps = -(-nbytes * LEAST_STEPS_PER_GIB // GIB)
    return f"{steps / LEAST_STEPS_PER_GIB:.6f}".rstrip("0").rstrip(".")
