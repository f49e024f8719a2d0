"""The memory and the parts for staged transfers, made and warmed before a worker is ready."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.channel.gate import Gate
from common.channel.keys import load_curve
from common.clock import Clock
from common.config import HandOver, Role, ServerConfig
from common.engine.kv_pool import KvPool
from common.layout.cache_layout import RankLayout
from common.transport.transport import Transport
from common.transport.ucx import convert_float8, copy_runs
from common.worker.copier import Copier
from common.worker.gather_buffers import GatherBuffers
from common.worker.landing import REGION as LANDING_REGION
from common.worker.landing import SLOT_NBYTES_MAX, Landing
from common.worker.pools import allocate_region
from common.worker.staging import REGION as STAGING_REGION
from common.worker.staging import Staging

STAGING_BUFFER_COUNT = 4
"""Buffers of one slot each on a prefill rank: one is filled while others are put, and every one of
up to four targets can have one."""

TRIAL_RUN_NBYTES = 4096
TRIAL_COUNT = 5


def start_landing(
    config: ServerConfig, transport: Transport, layout: RankLayout, pool: KvPool
) -> Landing | None:
    """For a decode rank that is to receive staged transfers. Raises: ConfigError."""
    if config.role is Role.PREFILL or not config.prefill or config.hand_over is HandOver.DIRECT:
        return None
    device = pool.buffers[0].device
    curve = load_curve(config.curve_secret_key_file, config.curve_peer_keys_file)
    region = allocate_region(transport, LANDING_REGION, config.landing_mb << 20, device)
    return Landing(
        region,
        Copier(pool.buffers, copy_runs, convert_float8),
        layout,
        pool.page_counts,
        config.host,
        Gate(curve) if curve is not None else None,
    )


def start_staging(
    config: ServerConfig, transport: Transport, layout: RankLayout, pool: KvPool, clock: Clock
) -> Staging | None:
    """For a prefill rank that may stage transfers. Raises: ConfigError.

    Regions are numbered as they are allocated, and the pools of the page groups are there already.
    """
    if config.role is not Role.PREFILL or config.hand_over is HandOver.DIRECT:
        return None
    device = pool.buffers[0].device
    nbytes = STAGING_BUFFER_COUNT * SLOT_NBYTES_MAX
    region = allocate_region(transport, STAGING_REGION, nbytes, device)
    copier = Copier(pool.buffers, copy_runs, convert_float8)
    return Staging(
        transport,
        GatherBuffers(region, len(layout.groups), SLOT_NBYTES_MAX, copier),
        copy_bandwidth=copy_bandwidth(region, clock),
        clock=clock,
        curve=load_curve(config.curve_secret_key_file, config.curve_peer_keys_file),
    )


def copy_bandwidth(region: Tensor, clock: Clock) -> float:
    """Bytes per second of copying scattered runs between the two halves of a warm region."""
    if region.device.type == "cuda":
        torch.cuda.synchronize(region.device)
        return 1e12  # far above any link, and far below what a card does
    half = len(region) // 2
    count = half // TRIAL_RUN_NBYTES
    starts = np.random.default_rng(0).permutation(count).astype(np.int64) * TRIAL_RUN_NBYTES
    targets = np.arange(count, dtype=np.int64) * TRIAL_RUN_NBYTES
    sizes = np.full(count, TRIAL_RUN_NBYTES, dtype=np.int64)
    source, target = region[:half].numpy(), region[half:].numpy()
    seconds: list[float] = []
    for _ in range(TRIAL_COUNT):
        started_at = clock.now()
        copy_runs(target, source, targets, starts, sizes)
        seconds.append(clock.now() - started_at)
    return count * TRIAL_RUN_NBYTES / max(min(seconds), 1e-9)
