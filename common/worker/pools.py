"""The number of pages of a rank, and their memory.

The memory belongs to the transport on the CPU, so that other processes can write into it, and to
torch on CUDA, where the transport only registers it. Knows nothing of models or messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from msgspec import structs
from torch import Tensor

from common.config import ServerConfig
from common.engine.cache.kv_pool import KvPool
from common.environment import shared_memory_dir
from common.errors import ConfigError, NotNow, TransportError
from common.layout.cache_layout import PageGroup, RankLayout
from common.layout.component import LiveKind
from common.transport.transport import Transport
from common.worker.checkpoint_counts import (
    Shares,
    checkpoint_nbytes,
    share_out,
    state_nbytes,
    window_page_max,
)

HOST_FRACTION_MAX = 0.5
"""Share of free host memory, and of free /dev/shm, that a pool takes by default. A prefill and a
decode server on one host must both start."""

HOST_POOL_NBYTES_MAX = 1 << 30
"""Largest pool on a CPU by default. Every page is touched at start, which takes about half a second
per GiB, and a CPU computes few sequences at a time."""

ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF, or PYTORCH_CUDA_ALLOC_CONF"
"""Variables that configure torch's allocator: the new name and the old one."""

MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes on the model's device, before and after the weights were loaded.

    shared_nbytes: free memory that other processes can write; None if that is no limit.
    recorded_nbytes: part of now_nbytes that recordings of decode passes will take.
    """

    before_nbytes: int
    now_nbytes: int
    shared_nbytes: int | None
    recorded_nbytes: int = 0

    @property
    def weight_nbytes(self) -> int:
        return self.before_nbytes - self.now_nbytes


def free_nbytes(device: torch.device) -> int:
    """Free memory of the model's device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"{MEMINFO}: no MemAvailable; give --max-total-tokens")


@dataclass(frozen=True, slots=True)
class PoolSize:
    """page_counts: per page group, without the scratch page. checkpoint_max: checkpoints of
    prefixes that have pages beside those of running requests. checkpoints: the same for people.
    spare_count: slots of every slot group beside these, for states behind proposals.
    """

    page_counts: list[int]
    checkpoint_max: int
    checkpoints: str
    spare_count: int = 0


def decide_pool_size(
    layout: RankLayout, config: ServerConfig, context_length: int, free: FreeMemory
) -> PoolSize:
    """The pages of a rank: for `max_total_tokens` tokens if it is set; else for as many tokens as
    fit into memory, but not more than running requests of `context_length` tokens could use.

    There are fewer checkpoints than their share allows, or none, if nothing fits beside them.
    Raises: ConfigError if what was asked for, or a single page, does not fit.
    """
    budget = _budget_nbytes(config, free)
    shares = share_out(layout, config, budget)
    limit, token_count = budget, layout.server.page_size
    if config.max_total_tokens is not None:
        own_nbytes = free.now_nbytes - free.recorded_nbytes
        limit = min(n for n in (own_nbytes, free.shared_nbytes) if n is not None)
        token_count = config.max_total_tokens
    while not _fits(layout, config, limit, token_count, shares):
        if shares.checkpoint_max == 0 or config.max_checkpoints is not None:
            _check_checkpoints(layout, config, limit, token_count, budget)
            _check_slots(layout, config, limit, token_count)
            raise NotNow(_why_no_room(layout, config, free, limit, token_count, shares))
        shares = replace(shares, checkpoint_max=shares.checkpoint_max // 2)
    if config.max_total_tokens is None:
        token_count = _most_tokens(layout, config, limit, context_length, shares)
    counts = _counts_of(layout, config, token_count, shares)
    described = _describe_checkpoints(layout, shares)
    return PoolSize(counts, shares.checkpoint_max, described, _spare_count(config, shares))


def page_counts_for(
    layout: RankLayout,
    token_count: int,
    request_count: int,
    chunk_token_max: int = 0,
    checkpoint_count: int = 0,
) -> list[int]:
    """Pages per group that `token_count` tokens of at most `request_count` requests need, while
    up to `chunk_token_max` tokens of a prompt are computed at once; and so many checkpoints."""
    page_size = layout.server.page_size
    return [
        _page_count(group.group, page_size, token_count, request_count, chunk_token_max)
        + _checkpoint_page_count(group.group, checkpoint_count)
        for group in layout.groups
    ]


def with_spares(layout: RankLayout, page_counts: list[int], spare_count: int) -> list[int]:
    """Pages per group, those included that no scheduler knows of: of slot groups, behind the
    others."""
    is_slot = [group.group.live.kind is LiveKind.SLOT for group in layout.groups]
    return [n + spare_count * own for n, own in zip(page_counts, is_slot, strict=True)]


def _spare_count(config: ServerConfig, shares: Shares) -> int:
    return config.verified_max * shares.request_count


def _most_tokens(
    layout: RankLayout, config: ServerConfig, limit: int, context_length: int, shares: Shares
) -> int:
    """The most tokens whose pages fit, one page of tokens at least."""
    # The cost grows with the tokens in steps of a page; halve the interval until it is one page.
    page_size = layout.server.page_size
    low, high = 1, max(1, -(-shares.request_count * context_length // page_size))
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(layout, config, limit, middle * page_size, shares):
            low = middle
        else:
            high = middle - 1
    return low * page_size


def _fits(
    layout: RankLayout, config: ServerConfig, limit: int, token_count: int, shares: Shares
) -> bool:
    return _needed_nbytes(layout, config, token_count, shares) <= limit


def _needed_nbytes(
    layout: RankLayout, config: ServerConfig, token_count: int, shares: Shares
) -> int:
    counts = _counts_of(layout, config, token_count, shares)
    counts = with_spares(layout, counts, _spare_count(config, shares))
    return sum(KvPool.buffer_nbytes(layout, counts))


def _counts_of(
    layout: RankLayout, config: ServerConfig, token_count: int, shares: Shares
) -> list[int]:
    return page_counts_for(
        layout,
        token_count,
        shares.request_count,
        config.chunked_prefill_size,
        shares.checkpoint_max,
    )


def _describe_checkpoints(layout: RankLayout, shares: Shares) -> str:
    if shares.checkpoint_max == 0:
        return f"none: {shares.why_none or 'no memory for one'}"
    nbytes = checkpoint_nbytes(layout)
    return f"{shares.checkpoint_max} x {nbytes} bytes, and pages that are not full"


def _why_no_room(
    layout: RankLayout,
    config: ServerConfig,
    free: FreeMemory,
    limit: int,
    token_count: int,
    shares: Shares,
) -> str:
    needed = _needed_nbytes(layout, config, token_count, shares)
    if config.max_total_tokens is not None:
        return (
            f"--max-total-tokens {config.max_total_tokens}: needs {needed} bytes of pages, "
            f"{limit} are free" + _where(free)
        )
    if config.device == "cuda":
        return _why_no_page_on_cuda(config, free)
    return (
        f"no memory for a KV pool: {limit} bytes may be used" + _where(free) + ", one page of "
        f"{token_count} tokens takes {needed}, slots for {shares.request_count} requests included; "
        "lower --page-size, or give --max-total-tokens"
    )


def _check_checkpoints(
    layout: RankLayout, config: ServerConfig, limit: int, token_count: int, budget: int
) -> None:
    """Raises: ConfigError if `max_checkpoints` leave no room for `token_count` tokens, and fewer
    would."""
    asked, nbytes = config.max_checkpoints, checkpoint_nbytes(layout)
    if not asked or nbytes == 0:
        return
    for count in range(min(asked - 1, max(0, limit) // nbytes), -1, -1):
        fewer = structs.replace(config, max_checkpoints=count)
        if _fits(layout, fewer, limit, token_count, share_out(layout, fewer, budget)):
            raise ConfigError(
                f"--max-checkpoints {asked}: one takes {nbytes} bytes and {limit} bytes may be "
                f"used; must be in 0..{count} beside {token_count} tokens"
            )


def _check_slots(layout: RankLayout, config: ServerConfig, limit: int, token_count: int) -> None:
    """Raises: ConfigError if slots for `max_running_requests` leave no room for `token_count`
    tokens, and slots for fewer requests would."""
    asked, nbytes = config.max_running_requests, state_nbytes(layout, config)
    if asked is None or nbytes == 0:
        return
    for count in range(asked, 0, -1):
        if _fits(layout, config, limit, token_count, Shares(count, 0)):
            raise ConfigError(
                f"--max-running-requests {asked}: the slot of a request takes {nbytes} bytes "
                f"and {limit} bytes may be used; must be in 1..{count} beside {token_count} tokens"
            )


def allocate_pool(
    transport: Transport, layout: RankLayout, page_counts: list[int], device: torch.device
) -> KvPool:
    """A pool whose pages are touched and registered for peers; region g is page group g.

    Raises: ConfigError if the memory can't be allocated.
    """
    buffers: list[Tensor] = []
    for group, nbytes in enumerate(KvPool.buffer_nbytes(layout, page_counts)):
        # A group without layers on this rank still is a region, to keep the numbering.
        buffer = allocate_region(transport, pool_names(layout)[group], max(nbytes, 1), device)
        buffers.append(buffer[:nbytes])
    return KvPool(layout, page_counts, buffers)


def pool_names(layout: RankLayout) -> list[str]:
    """Names of the regions of a pool, one per page group."""
    return [f"pages-{group}" for group in range(len(layout.groups))]


def allocate_region(transport: Transport, name: str, nbytes: int, device: torch.device) -> Tensor:
    """uint8[nbytes] that peers can write, every byte touched. Raises: ConfigError."""
    try:
        if device.type == "cuda":
            check_cuda_allocator()
            # A peer opens whole blocks of the driver. In a pool of their own, the region's blocks
            # hold nothing else.
            with torch.cuda.use_mem_pool(torch.cuda.MemPool(), device):
                buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)
            segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            check_cuda_segment(buffer.data_ptr(), segments)
            transport.register(name, buffer.data_ptr(), nbytes, "cuda")
            return buffer
        region = transport.allocate(name, nbytes)
    except (TransportError, torch.OutOfMemoryError) as exc:
        raise NotNow(f"memory of the cache: {exc}") from exc
    assert region.view is not None, "memory that the transport allocated has a view"
    buffer = torch.from_numpy(region.view)
    # The first write to a page costs a fault; pay it before the first request does.
    buffer.zero_()
    return buffer


def check_cuda_allocator() -> None:
    """Raises: ConfigError if torch is set to allocate memory that no peer can open."""
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise ConfigError(
            f"{ALLOCATOR_VARIABLES}: backend:{backend}: must be native, so that another process "
            "can open the KV pool"
        )


def check_cuda_segment(address: int, segments: Sequence[Mapping[str, object]]) -> None:
    """Raises: ConfigError if the memory at `address` was not made by a plain cudaMalloc.

    segments: as `torch.cuda.memory_snapshot` lists them. Peers could write to expandable segments
    only slowly, over host memory, and UCX would not report that.
    """
    for segment in segments:
        start, nbytes = segment.get("address"), segment.get("total_size")
        is_ours = (
            isinstance(start, int) and isinstance(nbytes, int) and start <= address < start + nbytes
        )
        if is_ours and segment.get("is_expandable"):
            raise ConfigError(
                f"{ALLOCATOR_VARIABLES}: expandable_segments:True: must be False, so that another "
                "process can open the KV pool"
            )


def _page_count(
    group: PageGroup, page_size: int, token_count: int, request_count: int, chunk_token_max: int
) -> int:
    match group.live.kind:
        case LiveKind.FULL:
            return -(-token_count // page_size)
        case LiveKind.BLOCK:
            return -(-token_count // (group.live.size * group.page_items))
        case LiveKind.WINDOW:
            chunk = -(-chunk_token_max // group.page_items)  # lies beside the window
            most = request_count * window_page_max(group) + chunk
            return min(most, -(-token_count // group.page_items))
        case LiveKind.TAIL | LiveKind.SLOT:
            return request_count


def _checkpoint_page_count(group: PageGroup, checkpoint_count: int) -> int:
    """Copies of the tokens that requests have, so they come on top of the pages of all tokens."""
    match group.live.kind:
        case LiveKind.FULL | LiveKind.BLOCK:
            return 0
        case LiveKind.WINDOW:
            return checkpoint_count * window_page_max(group)
        case LiveKind.TAIL | LiveKind.SLOT:
            return checkpoint_count


def _budget_nbytes(config: ServerConfig, free: FreeMemory) -> int:
    if config.device == "cuda":
        allowed = int(free.before_nbytes * config.mem_fraction_static)
        return allowed - free.weight_nbytes - free.recorded_nbytes
    fraction = min(config.mem_fraction_static, HOST_FRACTION_MAX)
    budget = min(int(free.now_nbytes * fraction), HOST_POOL_NBYTES_MAX)
    if free.shared_nbytes is not None:
        budget = min(budget, int(free.shared_nbytes * HOST_FRACTION_MAX))
    return budget


def _why_no_page_on_cuda(config: ServerConfig, free: FreeMemory) -> str:
    """Names the flag that divides a GPU's memory. Weights are subtracted first."""
    allowed = int(free.before_nbytes * config.mem_fraction_static)
    taken, remedy = f"weights take {free.weight_nbytes}", ""
    if free.recorded_nbytes:
        taken += f" and recorded decode passes {free.recorded_nbytes}"
        remedy = "lower --cuda-graph-max-bs, "
    return (
        f"no memory for a KV pool: {taken} bytes of the {allowed} that --mem-fraction-static "
        f"{config.mem_fraction_static:g} allows of what was free; raise it, or --tp-size, {remedy}"
        "or end what else uses the GPU"
    )


def _where(free: FreeMemory) -> str:
    """Names shared memory if it is the tighter limit, so that the reader can raise it."""
    if free.shared_nbytes is not None and free.shared_nbytes < free.now_nbytes:
        return f" in {shared_memory_dir()} (in a container, raise its shm size)"
    return ""
