"""Makes the source or the target of staged transfers, with its memory, before a worker is ready."""

from __future__ import annotations

from common.channel.gate import Gate
from common.channel.keys import load_curve
from common.clock import Clock
from common.config import ServerConfig, TransferMode
from common.engine.cache.kv_pool import KvPool
from common.layout.cache_layout import RankLayout
from common.transport.copies import convert_float8, copy_runs
from common.transport.transport import Transport
from common.worker.pools import allocate_region
from common.worker.staging.copier import Copier
from common.worker.staging.copy_trial import measure_copies
from common.worker.staging.gather_buffers import GatherBuffers
from common.worker.staging.source import REGION as SOURCE_REGION
from common.worker.staging.source import StagingSource
from common.worker.staging.target import REGION as TARGET_REGION
from common.worker.staging.target import SLOT_NBYTES_MAX, StagingTarget

STAGING_BUFFER_COUNT = 4
"""Buffers of one slot each on a rank that sends. One is filled while others are put, and each of
up to four targets has a share."""


def start_target(
    config: ServerConfig, transport: Transport, layout: RankLayout, pool: KvPool
) -> StagingTarget | None:
    """For a rank that may receive staged transfers; else None. Raises: ConfigError."""
    if not config.receives_caches or config.transfer_mode is TransferMode.DIRECT:
        return None
    device = pool.buffers[0].device
    curve = load_curve(config.curve_secret_key_file, config.curve_peer_keys_file)
    region = allocate_region(transport, TARGET_REGION, config.staging_buffer_mb << 20, device)
    return StagingTarget(
        region,
        Copier(pool.buffers, copy_runs, convert_float8),
        layout,
        pool.page_counts,
        config.host,
        Gate(curve) if curve is not None else None,
        config.transfer_port_range,
    )


def start_source(
    config: ServerConfig, transport: Transport, layout: RankLayout, pool: KvPool, clock: Clock
) -> StagingSource | None:
    """For a rank that may stage transfers; else None. Raises: ConfigError.

    Regions are numbered in the order of allocation: the pools of the page groups come first, and
    this one's memory is the next, before that of a target.
    """
    if not config.sends_caches or config.transfer_mode is TransferMode.DIRECT:
        return None
    device = pool.buffers[0].device
    nbytes = STAGING_BUFFER_COUNT * SLOT_NBYTES_MAX
    region = allocate_region(transport, SOURCE_REGION, nbytes, device)
    copier = Copier(pool.buffers, copy_runs, convert_float8)
    return StagingSource(
        transport,
        GatherBuffers(region, len(layout.groups), SLOT_NBYTES_MAX, copier),
        copies=measure_copies(region, SLOT_NBYTES_MAX, clock),
        clock=clock,
        curve=load_curve(config.curve_secret_key_file, config.curve_peer_keys_file),
    )
