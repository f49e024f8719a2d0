"""Transfers of growing size between two ranks, direct and staged: every page compared, then timed.

The parts are those of the workers, plans and staging slots included; only schedulers and
models are missing. Pages are those of Llama-3.1-8B, 2 MiB of 16 tokens, at random places of both
pools.
"""

from __future__ import annotations

import shutil
import statistics
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bench.staging_ranks import StagedPair
from common.config import TransferMode
from common.environment import shared_memory_dir
from common.layout.cache_layout import RankLayout, ServerLayout
from tests.gpu.report import Section
from tests.gpu.transfer_section import (
    LAYER_COUNTS,
    PAGE_SIZE,
    POISON,
    Ask,
    content_of,
    layout_of,
    slices,
    synchronize,
    words_of,
    wrong_pages,
)

SIZES_MIB = {"cuda": (256, 1024, 4096), "cpu": (16, 64)}
WAYS = {"direct": TransferMode.DIRECT, "staged": TransferMode.STAGED}
CHOICE_MIB = {"cuda": 256, "cpu": 16}
CHOICE_MIN = 0.8
"""What `--transfer-mode auto` must reach of the quicker way, measured one after the other."""
SPARE_PAGES = 8
REPEATS = 5
# Beside both pools: contexts, staging buffers, and what comparing takes.
OVERHEAD_NBYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
POISONED = "poison your pages"


def check_sizes_section(section: Section, device: torch.device) -> None:
    layout = layout_of(LAYER_COUNTS[-1])
    for size_mib in SIZES_MIB[device.type]:
        needed = 2 * (size_mib << 20) + OVERHEAD_NBYTES[device.type]
        free = free_nbytes(device)
        for way, transfer_mode in WAYS.items():
            name = f"{size_mib} MiB {way}"
            if needed > free:
                section.skip(name, f"needs {needed >> 20} MiB, {free >> 20} MiB are free")
            else:
                page_count = (size_mib << 20) // layout.groups[0].page_nbytes
                time_size(section, name, device, layout, page_count, transfer_mode)
    for layer_count in (LAYER_COUNTS[0], LAYER_COUNTS[-1]):
        check_choice(section, device, layout_of(layer_count))


def check_choice(section: Section, device: torch.device, layout: RankLayout) -> None:
    """That the prices measured at start lead to the quicker way, for pages of one size."""
    page_nbytes = layout.groups[0].page_nbytes
    page_count = (CHOICE_MIB[device.type] << 20) // page_nbytes
    rates = {
        way: time_size(
            section,
            f"{page_nbytes >> 10} KiB runs {way}",
            device,
            layout,
            page_count,
            transfer_mode,
        )
        for way, transfer_mode in (*WAYS.items(), ("auto", TransferMode.AUTO))
    }
    if device.type == "cuda":
        best = max(rates["direct"], rates["staged"])
        section.check(
            f"{page_nbytes >> 10} KiB runs go the quicker way",
            rates["auto"] >= CHOICE_MIN * best,
            f"{rates['auto']:.1f} GB/s of {best:.1f}",
        )


def time_size(
    section: Section,
    name: str,
    device: torch.device,
    layout: RankLayout,
    page_count: int,
    transfer_mode: TransferMode,
) -> float:
    """GB/s; page_count: of each transfer. Every one is checked, all but the first are timed."""
    server: ServerLayout = layout.server
    pool_pages = page_count + SPARE_PAGES
    pair = StagedPair(
        server,
        server,
        "auto" if device.type == "cuda" else "posix,tcp",
        transfer_mode,
        pool_pages * PAGE_SIZE,
        device=device,
        look=partial(look_at, layout),
    )
    try:
        fill(pair.source.pool.buffers[0], layout, device)
        generator = np.random.default_rng(7)
        rates: list[float] = []
        wrong: list[int] = []
        put_count = 0
        for index in range(1 + REPEATS):
            pair.ask_target(POISONED)
            pages = [generator.permutation(pool_pages)[:page_count] + 1 for _ in range(2)]
            seconds, put_count = pair.send(
                pages[0].tolist(), pages[1].tolist(), page_count * PAGE_SIZE
            )
            found = pair.ask_target(Ask(pages[0], pages[1]))
            assert isinstance(found, list), found
            wrong += found
            if index:  # the first one opens the mapping
                rates.append(page_count * layout.groups[0].page_nbytes / seconds / 1e9)
    finally:
        pair.close()
    rate = statistics.median(rates)
    section.figure(f"{name}: GB/s", rate)
    section.figure(f"{name}: puts", put_count)
    section.figure(f"{name}: prices", pair.transfer_mode)
    what = f"{name}: every page arrives, no other changes"
    section.check(what, not wrong, f"wrong: {wrong[:8]}")
    return rate


def fill(buffer: Tensor, layout: RankLayout, device: torch.device) -> None:
    rows = words_of(buffer, layout)
    ids = torch.arange(len(rows), device=device)
    for part in slices(rows):
        rows[part] = content_of(ids[part], rows.shape[1])
    synchronize(device)


def look_at(layout: RankLayout, buffer: Tensor, question: object) -> object:
    """In the target's process: poison for what nobody writes, or the pages that are wrong."""
    if isinstance(question, Ask):
        return wrong_pages(buffer, layout, question)
    assert question == POISONED, question
    buffer.fill_(POISON)
    synchronize(buffer.device)
    return "poisoned"


def free_nbytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return shutil.disk_usage(shared_memory_dir()).free
