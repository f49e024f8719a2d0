"""How many pages of each group the tier in host memory has on a rank.

Every rank has an equal share of `--host-cache-gb`, cut in the proportions of its pool. Knows
nothing of memory that is allocated.
"""

from __future__ import annotations

import torch

from common.config import ServerConfig
from common.engine.cache.kv_pool import KvPool
from common.errors import ConfigError, NotNow
from common.layout.cache_layout import RankLayout
from common.worker.pools import free_nbytes

GIB = 1 << 30

UNLIMITED_PAGE_COUNT = (1 << 31) - 1
"""Of every group, on a rank whose layers own nothing of the cache: the smallest count of all ranks
is the server's, and this one is no limit."""

LEAST_STEPS_PER_GIB = 10**6
"""The least size is rounded up to so much of a GiB, for people."""


def host_share_nbytes(config: ServerConfig) -> int:
    """Bytes of the tier that each rank of this server may take."""
    return round(config.host_cache_gb * GIB) // config.rank_count


def decide_host_page_counts(
    layout: RankLayout, config: ServerConfig, page_counts: list[int]
) -> list[int]:
    """Pages per group of the tier, without page 0; [] without a tier.

    The tier has as many times the pages of the pool as its bytes have room for the pool's.
    page_counts: of the pool, without the scratch page.
    Raises: ConfigError if a group that has pages in the pool would get none.
    """
    if config.host_cache_gb == 0:
        return []
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
