"""A transfer between two processes' pools on one device: every page checked, then timed.

The pools, plans and connections are those of the servers; only the scheduler is missing. Pages
carry numbers that follow from the id of the page they came from, so a page that is missing, late,
in the wrong place or torn is seen, and so is one that nobody asked to write.
"""

from __future__ import annotations

import multiprocessing
import statistics
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.layout.cache_layout import RankLayout, ServerLayout
from common.layout.families import gqa_components
from common.planner.copies import PairPlan
from common.planner.pairing import TokenRange
from common.transport.transport import (
    ConnectionMade,
    TargetDescriptor,
    TransferSettled,
    TransportEvent,
)
from common.transport.ucx import UcxSettings, UcxTransport
from common.worker.pools import allocate_pool
from tests.gpu.report import Section

PAGE_SIZE, KV_HEADS, HEAD_DIM = 16, 8, 128
# Layers of a pool: they make pages, and with them runs, of 64 KiB, 256 KiB and 2 MiB.
LAYER_COUNTS = (1, 4, 32)
UNTOUCHED_PAGES = 8
REPEATS = 5
PATIENCE_S = 120.0
POISON = 0x5A
SLICE_WORDS = 1 << 23
SPIN_US = 100
"""Of the second round: the figures tell whether a progress thread that spins is worth its core."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Target pages that must hold what the source pages of the same index hold."""

    source_pages: NDArray[np.int64]
    target_pages: NDArray[np.int64]


def check_transfer_section(section: Section, device: torch.device, total_nbytes: int) -> None:
    """total_nbytes: of one transfer."""
    for layer_count in LAYER_COUNTS:
        layout = layout_of(layer_count)
        page_nbytes = layout.groups[0].page_nbytes
        for spin_us in (0, SPIN_US):
            name = f"{page_nbytes >> 10} KiB pages" + (f", spin {spin_us} us" if spin_us else "")
            transfer(section, name, device, layout, total_nbytes // page_nbytes, spin_us)


def transfer(
    section: Section,
    name: str,
    device: torch.device,
    layout: RankLayout,
    page_count: int,
    spin_us: int,
) -> None:
    """page_count: pages of one transfer."""
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    process = context.Process(
        target=serve_target, args=(str(device), layout, page_count, spin_us, far_end), daemon=True
    )
    process.start()
    transport = transport_on(device, spin_us)
    try:
        pool = allocate_pool(transport, layout, [page_count], device)
        rows = words_of(pool.buffers[0], layout)
        ids = torch.arange(len(rows), device=device)
        for part in slices(rows):
            rows[part] = content_of(ids[part], rows.shape[1])
        synchronize(device)
        descriptor = receive(pipe)
        assert isinstance(descriptor, TargetDescriptor), descriptor
        transport.connect("target", descriptor)
        event = next_event(transport)
        assert isinstance(event, ConnectionMade), event
        section.figure(f"{name}: lanes", event.transports)
        if device.type == "cuda":
            is_direct = "cuda_ipc" in event.transports.split(",")
            section.check(f"{name}: goes over cuda_ipc", is_direct, event.transports)
        rates: list[float] = []
        wrong: list[int] = []
        generator = np.random.default_rng(7)
        for tag in range(1, REPEATS + 2):
            ask = Ask(
                generator.permutation(page_count) + 1,
                generator.permutation(page_count + UNTOUCHED_PAGES)[:page_count] + 1,
            )
            settled = write(transport, layout, ask, tag)
            assert settled.error is None, settled.error
            if tag > 1:  # the first one opens the mapping
                rates.append(settled.nbytes / settled.seconds / 1e9)
            pipe.send(ask)
            found = receive(pipe)
            assert isinstance(found, list), found
            wrong += found
        section.figure(f"{name}: GB/s", statistics.median(rates))
        section.figure(f"{name}: us per run", page_us(rates, layout.groups[0].page_nbytes))
        section.check(
            f"{name}: every page arrives, no other changes", not wrong, f"wrong: {wrong[:8]}"
        )
        pipe.send(None)
        process.join(PATIENCE_S)
        section.check(f"{name}: the target ends", process.exitcode == 0, f"{process.exitcode}")
    finally:
        transport.close()
        process.kill()


def write(transport: UcxTransport, layout: RankLayout, ask: Ask, tag: int) -> TransferSettled:
    plan = PairPlan(layout, layout).plan(
        [(0, ask.source_pages.tolist())],
        [(0, ask.target_pages.tolist())],
        TokenRange(0, len(ask.source_pages) * PAGE_SIZE, True),
    )
    transport.submit("target", plan, tag)
    event = next_event(transport)
    assert isinstance(event, TransferSettled), event
    return event


def serve_target(
    device_name: str, layout: RankLayout, page_count: int, spin_us: int, pipe: Connection
) -> None:
    """The other process: lends its pool, looks at it when asked, ends at None."""
    device = torch.device(device_name)
    transport = transport_on(device, spin_us)
    pool = allocate_pool(transport, layout, [page_count + UNTOUCHED_PAGES], device)
    pool.buffers[0].fill_(POISON)
    synchronize(device)
    pipe.send(transport.open_target("writer"))
    while (ask := pipe.recv()) is not None:
        wrong = wrong_pages(pool.buffers[0], layout, ask)
        pool.buffers[0].fill_(POISON)
        synchronize(device)
        pipe.send(wrong)
    transport.close()


# Pages --------------------------------------------------------------------------------------------


def wrong_pages(buffer: Tensor, layout: RankLayout, ask: Ask) -> list[int]:
    """Ids of pages that do not hold what they must: the poison, if nobody wrote to them."""
    rows = words_of(buffer, layout)
    source_of = torch.full((len(rows),), -1, dtype=torch.int64)
    source_of[torch.from_numpy(ask.target_pages)] = torch.from_numpy(ask.source_pages)
    source_of = source_of.to(buffer.device)
    poison = int.from_bytes(bytes([POISON] * 8), "little", signed=True)
    wrong: list[int] = []
    for part in slices(rows):
        expected = content_of(source_of[part], rows.shape[1])
        expected = torch.where(source_of[part, None] < 0, poison, expected)
        found = (rows[part] != expected).any(dim=1).nonzero().flatten() + part.start
        wrong += found.tolist()
    return wrong


def content_of(page_ids: Tensor, word_count: int) -> Tensor:
    """int64[page, word]: a different number in every word of every page."""
    words = torch.arange(word_count, dtype=torch.int64, device=page_ids.device)
    return page_ids[:, None] * 0x1_0000_0001_0001 + words * 0x9E37_79B1


def words_of(buffer: Tensor, layout: RankLayout) -> Tensor:
    """int64[page, word] over the same memory, the scratch page included."""
    return buffer.view(torch.int64).view(-1, layout.groups[0].page_nbytes // 8)


def slices(rows: Tensor) -> list[slice]:
    """Parts of the rows of at most 64 MiB, since comparing takes copies."""
    step = max(1, SLICE_WORDS // rows.shape[1])
    return [slice(first, first + step) for first in range(0, len(rows), step)]


def layout_of(layer_count: int) -> RankLayout:
    components = gqa_components(
        layer_count=layer_count, kv_head_count=KV_HEADS, head_dim=HEAD_DIM, dtype="bfloat16"
    )
    return ServerLayout(components, 1, ((0, layer_count),), PAGE_SIZE).rank(0, 0)


def page_us(rates: list[float], page_nbytes: int) -> float:
    return page_nbytes / (statistics.median(rates) * 1e9) * 1e6


# Waiting ------------------------------------------------------------------------------------------


def transport_on(device: torch.device, spin_us: int) -> UcxTransport:
    index = (device.index or 0) if device.type == "cuda" else None
    return UcxTransport(UcxSettings(cuda_device=index, spin_us=spin_us))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def next_event(transport: UcxTransport) -> TransportEvent:
    """Exactly one is due."""
    assert transport.wait(PATIENCE_S), f"nothing happened for {PATIENCE_S:.0f} s"
    (event,) = transport.poll()
    return event


def receive(pipe: Connection) -> object:
    assert pipe.poll(PATIENCE_S), f"the other process is silent for {PATIENCE_S:.0f} s"
    message: object = pipe.recv()
    return message
