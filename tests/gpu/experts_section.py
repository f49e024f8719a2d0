"""Routed experts on the device: kernels around their products, and weights as they are stored."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

from common.engine.checkpoint.codes import Codes
from common.engine.config.mla import RouterConfig
from common.engine.layers.block_moe import choose_block_moe
from common.engine.layers.choose_fused import FusedShape, choose_fused
from common.engine.layers.expert_groups import ExpertGroups, has_grouped_kernel
from common.engine.layers.expert_matrix import ExpertMatrix
from common.engine.layers.fused_experts import (
    ExpertCounts,
    GroupedRouter,
    Router,
    SoftmaxRouter,
)
from common.engine.layers.narrow import NarrowWeights
from common.engine.layers.stored_experts import Scratch
from tests.gpu.report import Section

# Of released models with groups of 256 experts, 384 without, and a softmax over 512.
ROUTERS: tuple[Router, ...] = (
    GroupedRouter(256, 8, True, RouterConfig(True, 8, 4, 2.5)),
    GroupedRouter(384, 8, True, RouterConfig(True, 1, 1, 2.827)),
    SoftmaxRouter(512, 10, is_normalized=True),
)
SIZES = {"cuda": (256, 4096, 2048), "cpu": (8, 256, 256)}
"""Experts, outputs and inputs of a weight."""
ROW_COUNTS = (8, 64, 512, 4096)
REPEATS = 20


def check_experts_section(section: Section, device: torch.device) -> None:
    if device.type == "cuda":
        _check_kernels(section, device)
    else:
        section.skip("kernels around experts", f"run on CUDA only, this is {device}")
    _check_stored(section, device)


def _check_kernels(section: Section, device: torch.device) -> None:
    for router in ROUTERS:
        counts = ExpertCounts(router.expert_count, router.per_token)
        shape = FusedShape(4096, 14336, torch.bfloat16, device, expert_counts=counts, router=router)
        fused = choose_fused(shape)
        kernels = fused.kernels
        name = f"{router.per_token} of {router.expert_count} experts"
        is_routed = kernels is not None and router in kernels.experts.routers
        section.check(f"routing to {name} as a single kernel", is_routed, fused.reason)
        is_ordered = kernels is not None and counts in kernels.experts.counts
        section.check(f"order of {name} as single kernels", is_ordered, fused.reason)
    if torch.cuda.get_device_capability(device) == (9, 0):
        mix, reason = choose_block_moe(device)
        section.check("experts of float8 blocks in one call", mix is not None, reason)
        section.figure("experts of float8 blocks in one call, difference", reason)
    else:
        section.skip("experts of float8 blocks in one call", "is for compute capability 9.0")
    has_offsets = kernels is not None and kernels.has_offset_norms
    section.check("norms by offsets as single kernels", has_offsets, fused.reason)


@torch.inference_mode()
def _check_stored(section: Section, device: torch.device) -> None:
    """float8 by blocks of 128, kept and made wide while loading; what both take for rows that are
    spread over the experts evenly."""
    count, outputs, inputs = SIZES[device.type]
    wide, narrow = (_matrix(form, device) for form in (NarrowWeights.WIDE, NarrowWeights.NARROW))
    generator = torch.Generator().manual_seed(1)
    is_kept = True
    for expert in range(count):
        values = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)
        blocks = torch.rand(outputs // 128, inputs // 128, generator=generator) * 0.02
        scales = blocks.repeat_interleave(128, 0)
        codes = Codes(values, scales, None, 8, 128, rounds_inputs=True).to(device)
        wide.rows[expert].copy_(codes.widen())
        is_kept &= narrow.experts[expert].keep([codes])
    section.check("stored experts are kept", is_kept)
    narrow.pack()
    (name, nbytes), (_, wide_nbytes) = *narrow.forms, *wide.forms
    section.figure("bytes as stored", nbytes)
    section.figure("bytes wide", wide_nbytes)
    section.figure("form", name)
    has_kernel = has_grouped_kernel(device, torch.bfloat16)
    for row_count in ROW_COUNTS:
        experts = torch.arange(row_count).mul_(count).div_(row_count, rounding_mode="floor")
        groups = ExpertGroups.of(
            experts.to(device), count, row_max=row_count, has_kernel=has_kernel
        )
        rows = torch.randn(row_count, inputs, generator=generator).bfloat16().to(device)
        expected, found = wide.multiply(groups, rows), narrow.multiply(groups, rows)
        difference = float((expected.float() - found.float()).abs().max())
        largest = float(expected.float().abs().max())
        is_close = difference <= 2**-7 * largest
        section.check(
            f"products of {row_count} rows agree", is_close, f"{difference:.3g} of {largest:.3g}"
        )
        for form, matrix in (("wide", wide), ("stored", narrow)):
            seconds = _seconds(matrix, groups, rows)
            section.figure(f"{form} experts, {row_count} rows, us", seconds * 1e6)


def _matrix(narrow: NarrowWeights, device: torch.device) -> ExpertMatrix:
    where = device if narrow == NarrowWeights.WIDE else torch.device("meta")
    rows = torch.empty(SIZES[device.type], dtype=torch.bfloat16, device=where)
    return ExpertMatrix(rows, narrow, device, Scratch())


def _seconds(matrix: ExpertMatrix, groups: ExpertGroups, rows: Tensor) -> float:
    """Of one product, the first one not counted."""
    matrix.multiply(groups, rows)
    _wait(rows.device)
    begin = perf_counter()
    for _ in range(REPEATS):
        matrix.multiply(groups, rows)
    _wait(rows.device)
    return (perf_counter() - begin) / REPEATS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
