"""Transfers between layouts that differ, against equal ones: staged, converted, and other TP.

64 MiB of the cache of a 32-layer model of 8 KV heads of 128 elements, between random pages of two
processes. Where element types differ these are bytes of the wider one, and the
equal layouts are both of that type: the same tokens without a conversion. In GB/s (10^9 bytes).
Everything that is compared is sampled in turns within one run.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from bench.report import Row, at_least, row_of_medians
from bench.staging_ranks import StagedPair
from bench.transfers import Pair
from common.config import TransferMode
from common.layout.cache_layout import ServerLayout
from common.layout.component import DTYPE_NBYTES
from common.layout.families import gqa_components
from common.planner.copies import plan_copies
from common.planner.copy_plan import CopyPlan
from common.planner.pairing import TokenRange
from common.worker.staging.start import STAGING_BUFFER_COUNT
from common.worker.staging.target import SLOT_NBYTES_MAX

BATCH_NBYTES = 64 << 20
LAYERS, HEADS, HEAD_DIM = 32, 8, 128
SAMPLE_COUNT = 7
STAGED_RATIO_MIN, TP_RATIO_MIN = 0.4, 0.8  # of equal layouts
POOL_BATCHES = 3  # a pool holds so many transfers
LINKS = {"shm": "posix,tcp", "tcp": "tcp"}
# (name, source dtype and page size, target's)
STAGED = (
    ("page_16_64", ("bfloat16", 16), ("bfloat16", 64)),
    ("page_64_16", ("bfloat16", 64), ("bfloat16", 16)),
    ("fp32_bf16", ("float32", 16), ("bfloat16", 16)),
    ("bf16_fp8", ("bfloat16", 16), ("float8_e4m3fn", 16)),
    ("fp8_bf16", ("float8_e4m3fn", 16), ("bfloat16", 16)),
)
TP_PAIRS = ((1, 2), (2, 1), (2, 4), (4, 2))


def layout_of(dtype: str, page_size: int, tp: int = 1) -> ServerLayout:
    components = gqa_components(
        layer_count=LAYERS, kv_head_count=HEADS, head_dim=HEAD_DIM, dtype=dtype
    )
    return ServerLayout(components, tp, ((0, LAYERS),), page_size)


def token_count(dtype: str) -> int:
    """Tokens whose cache is BATCH_NBYTES."""
    return BATCH_NBYTES // (2 * LAYERS * HEADS * HEAD_DIM * DTYPE_NBYTES[dtype])


def run() -> list[Row]:
    torch.set_num_threads(1)
    rows: list[Row] = []
    for link in LINKS:
        rows += run_staged(link)
        rows += run_tensor_parallel(link)
    return rows


def run_staged(link: str) -> list[Row]:
    """Each case beside a direct transfer of equal layouts, sampled in turns."""
    rows: list[Row] = []
    for name, source, target in STAGED:
        wider = max(source[0], target[0], key=lambda dtype: DTYPE_NBYTES[dtype])
        tokens = token_count(wider)
        staged = StagedPair(
            layout_of(*source), layout_of(*target), LINKS[link], TransferMode.STAGED,
            POOL_BATCHES * tokens,
        )  # fmt: skip
        equal_layout = layout_of(wider, 16)
        equal = StagedPair(
            equal_layout, equal_layout, LINKS[link], TransferMode.DIRECT, POOL_BATCHES * tokens
        )
        rng = np.random.default_rng(3)
        samples: dict[str, list[float]] = defaultdict(list)
        puts = 0
        for index in range(SAMPLE_COUNT + 1):
            seconds, puts = staged.sample(rng, tokens)
            equal_s, _ = equal.sample(rng, tokens)
            if index:  # the first one of each warms up
                samples["staged"].append(BATCH_NBYTES / seconds / 1e9)
                samples["equal"].append(BATCH_NBYTES / equal_s / 1e9)
        assert staged.source.staging_source is not None
        print(
            f"staged_{name}_{link}: {puts} puts, {staged.transfer_mode}; extra memory at the "
            f"source {STAGING_BUFFER_COUNT * SLOT_NBYTES_MAX >> 20} MiB, at the target 64 MiB",
            flush=True,
        )
        case, of_equal = f"staged_{name}_{link}", at_least(STAGED_RATIO_MIN)
        ours, theirs = samples["staged"], samples["equal"]
        rows.append(row_of_medians(case, "GB/s", ours, "equal", theirs, of_equal))
        staged.close()
        equal.close()
    return rows


# ---- tensor parallel sizes -----------------------------------------------------------------------


def run_tensor_parallel(link: str) -> list[Row]:
    """All ranks' plans as one batch between two pools, beside equal layouts and token slices."""
    pair = Pair(LINKS[link])
    rng = np.random.default_rng(4)
    samples: dict[str, list[float]] = defaultdict(list)
    counts: dict[str, int] = {}
    for _ in range(SAMPLE_COUNT):
        for source_tp, target_tp in TP_PAIRS:
            name = f"tp_{source_tp}_{target_tp}_{link}"
            plans = {
                name: plan_tp(rng, source_tp, target_tp),
                f"{name} equal": plan_tp(rng, source_tp, source_tp),
                f"{name} slices": plan_slices(rng, max(source_tp, target_tp)),
            }
            for key, plan in plans.items():
                counts[key] = plan.run_count
                samples[key].append(pair.sample(plan))
    pair.close()
    rows: list[Row] = []
    of_equal = at_least(TP_RATIO_MIN)
    for source_tp, target_tp in TP_PAIRS:
        name = f"tp_{source_tp}_{target_tp}_{link}"
        equal, slices = samples[f"{name} equal"], samples[f"{name} slices"]
        print(
            f"{name}: {counts[name]} descriptors, equal layouts {counts[f'{name} equal']}, "
            f"per-token slices {counts[f'{name} slices']}",
            flush=True,
        )
        rows.append(row_of_medians(name, "GB/s", samples[name], "equal", equal, of_equal))
        rows.append(row_of_medians(f"{name}_slices", "GB/s", slices, "equal", equal))
    return rows


def plan_tp(rng: np.random.Generator, source_tp: int, target_tp: int) -> CopyPlan:
    """Between random pages of two servers whose ranks' pools lie one after the other."""
    source, target = (layout_of("bfloat16", 16, tp) for tp in (source_tp, target_tp))
    tokens = token_count("bfloat16")
    page_count = POOL_BATCHES * tokens // 16
    lists = [[(0, (rng.permutation(page_count - 1) + 1).tolist())] for _ in range(2)]
    spans = [page_count * layout.ranks[0].groups[0].page_nbytes for layout in (source, target)]
    parts: list[CopyPlan] = []
    for source_rank in source.ranks:
        for target_rank in target.ranks:
            plan = plan_copies(
                source_rank, target_rank, lists[0], lists[1], TokenRange(0, tokens, is_final=True)
            )
            parts.append(
                CopyPlan(
                    plan.source_region,
                    plan.source_offset + source_rank.index * spans[0],
                    plan.target_region,
                    plan.target_offset + target_rank.index * spans[1],
                    plan.nbytes,
                )
            )
    return CopyPlan.concatenate(parts)


def plan_slices(rng: np.random.Generator, tp: int) -> CopyPlan:
    """What token-major pools per layer need: for every token, layer and plane the heads of a rank,
    a slice of each token's row."""
    row_nbytes = HEADS * HEAD_DIM * DTYPE_NBYTES["bfloat16"]
    nbytes = row_nbytes // tp
    tokens, planes = token_count("bfloat16"), 2 * LAYERS
    pool_tokens = POOL_BATCHES * tokens
    page_starts = rng.permutation(pool_tokens // 16)[: tokens // 16] * 16
    rows = (page_starts[:, None] + np.arange(16)).ravel()
    plane_starts = np.arange(planes) * pool_tokens
    starts = (plane_starts[:, None] + rows).ravel()[:, None] * row_nbytes
    offsets = (starts + np.arange(tp) * nbytes).ravel().astype(np.int64)
    zeros = np.zeros(len(offsets), dtype=np.int64)
    # At the target, heads of other ranks lie elsewhere: no slice goes on where another ends.
    shuffled = offsets.reshape(-1, tp)[:, ::-1].ravel()
    return CopyPlan(zeros, offsets, zeros, shuffled, np.full(len(offsets), nbytes, dtype=np.int64))
