"""Transfers of caches with more than one row per token: slots, tails, blocks, chosen rows.

Bandwidth: 67 to 98 MB of each kind between random pages of two processes, in GB/s (10^9 bytes),
held against as many bytes of keys and values of full attention; sampled in turns within one run,
each right after an untimed transfer of its own. As most prompts do, all of them end inside a page.
Added time: one slot of a published size against as many bytes of whole pages of keys and values, in
ms per transfer.
Puts: how many runs a slot takes from one rank to another; this is counted, and no clock is in it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

import numpy as np

from bench.cache_kinds import GQA_RATIO_MIN, KINDS, LINKS, Kind, plan_random_pages
from bench.report import Row, at_least, at_most, row_of_medians
from bench.transfers import Pair
from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, CacheComponent, Segment, Shard
from common.layout.families import (
    compressed_components,
    gated_delta_components,
    mamba_components,
    sparse_mla_components,
)
from common.planner.copies import PairPlan
from common.planner.pairing import TokenRange

SAMPLE_COUNT = 31
ADDED_MS_MAX = 1.0
TOKEN_NBYTES = 2 * 32 * 8 * 128 * 2  # of KINDS["gqa"]
PAGE_SIZE = 16

# The layers of Qwen3-Next-80B-A3B: 36 of 48 recur, with 16 key and 32 value heads of 128 channels;
# the others attend with 2 heads of 256.
RECURRENT_LAYERS = tuple(layer for layer in range(48) if layer % 4 != 3)
DELTA_SLOT = gated_delta_components(
    layers=RECURRENT_LAYERS,
    key_heads=(16, 128),
    value_heads=(32, 128),
    kernel_size=4,
    conv_dtype="bfloat16",
    state_dtype="float32",
)
ATTENDING = tuple(
    CacheComponent(
        name,
        tuple(range(3, 48, 4)),
        (Segment("head", 2, 256 * 2),),
        FULL,
        Shard.SPLIT,
        "bfloat16",
    )
    for name in ("k", "v")
)
# Mamba-2 as in Nemotron-H-8B: 24 mixers of 128 heads of 64, 8 groups of 128.
MAMBA_SLOT = mamba_components(
    layers=tuple(range(24)),
    heads=(128, 64),
    groups=(8, 128),
    kernel_size=4,
    conv_dtype="bfloat16",
)
STATE_KINDS = {
    # DeepSeek-V3.2: an index key beside each latent row.
    "chosen_rows": Kind(
        sparse_mla_components(
            layer_count=61,
            latent_dim=512,
            rope_dim=64,
            is_interleaved=True,
            index_layers=tuple(range(61)),
            index_dim=128,
            is_index_interleaved=False,
            dtype="bfloat16",
        ),
        61,
        840,
    ),
    # DeepSeek-V4-Flash, a prompt that ends inside the blocks of either ratio.
    "blocks_and_tails": Kind(
        compressed_components(
            layer_count=43,
            window=128,
            head_dim=512,
            index_dim=128,
            sparse_layers=tuple(range(2, 43, 2)),
            sparse_ratio=4,
            heavy_layers=tuple(range(3, 43, 2)),
            heavy_ratio=128,
            dtype="bfloat16",
        ),
        43,
        8231,
    ),
    "pages_and_slot": Kind((*ATTENDING, *DELTA_SLOT), 48, 840),
}
# name -> components of a slot, and how many kinds of units they are cut into.
SLOTS = {"delta": (DELTA_SLOT, 48, 2), "mamba": (MAMBA_SLOT, 24, 2)}
TP_CASES = ((1, 1), (2, 2), (4, 4), (8, 8), (2, 4), (4, 2), (1, 8), (8, 1), (4, 16), (16, 4))


def run() -> list[Row]:
    rows: list[Row] = []
    for link in LINKS:
        rows += run_bandwidth(link)
    return rows + count_puts()


# ---- bandwidth -----------------------------------------------------------------------------------


def run_bandwidth(link: str) -> list[Row]:
    """Equal layouts at both ends, one rank each: as kinds differ, nothing else may."""
    pair = Pair(LINKS[link])
    rng = np.random.default_rng(7)
    gbps: dict[str, list[float]] = defaultdict(list)
    of_pages: dict[str, list[float]] = defaultdict(list)
    slot_ms: list[float] = []
    pages_ms: list[float] = []
    slot = Kind(DELTA_SLOT, 48, PAGE_SIZE)
    for _ in range(SAMPLE_COUNT):
        for name, kind in STATE_KINDS.items():
            nbytes, found = sample(pair, rng, kind)
            gbps[name].append(found)
            of_pages[name].append(sample(pair, rng, prompt_of(nbytes))[1])
        nbytes, slot_gbps = sample(pair, rng, slot)
        _, pages_gbps = sample(pair, rng, prompt_of(nbytes, ends_with_page=True))
        slot_ms.append(nbytes / 1e6 / slot_gbps)
        pages_ms.append(nbytes / 1e6 / pages_gbps)
    pair.close()
    of_gqa = at_least(GQA_RATIO_MIN)
    rows = [
        row_of_medians(f"state_{name}_{link}", "GB/s", gbps[name], "gqa", of_pages[name], of_gqa)
        for name in STATE_KINDS
    ]
    added = statistics.median(slot_ms) - statistics.median(pages_ms)
    case = f"state_slot_added_{link}"
    return [
        *rows,
        Row(case, added, "ms", samples=SAMPLE_COUNT, target=at_most(ADDED_MS_MAX)),
    ]


def sample(pair: Pair, rng: np.random.Generator, kind: Kind) -> tuple[int, float]:
    """(bytes, GB/s) of one transfer, after an untimed one."""
    warmup, plan = (plan_random_pages(rng, kind) for _ in range(2))
    pair.sample(warmup)
    return plan.total_nbytes, pair.sample(plan)


def prompt_of(nbytes: int, *, ends_with_page: bool = False) -> Kind:
    """Keys and values of a prompt, of so many bytes up to half a token, or half a page."""
    gqa, step = KINDS["gqa"], PAGE_SIZE if ends_with_page else 1
    token_count = round(nbytes / TOKEN_NBYTES / step) * step
    assert ends_with_page == (token_count % PAGE_SIZE == 0), token_count
    return Kind(gqa.components, gqa.layer_count, token_count)


# ---- puts ----------------------------------------------------------------------------------------


def count_puts() -> list[Row]:
    """The most runs of any pair of ranks, against one for each kind of units where ranks cut them
    differently, and one in all where they do not."""
    rows: list[Row] = []
    for name, (components, layer_count, class_count) in SLOTS.items():
        for source_tp, target_tp in TP_CASES:
            limit = 1 if source_tp == target_tp else class_count
            puts = put_count_max(components, layer_count, source_tp, target_tp)
            case = f"state_puts_{name}_tp{source_tp}_to_tp{target_tp}"
            rows.append(Row(case, puts, "puts", target=at_most(limit)))
    return rows


def put_count_max(
    components: tuple[CacheComponent, ...], layer_count: int, source_tp: int, target_tp: int
) -> int:
    source, target = (
        ServerLayout(components, tp, ((0, layer_count),), PAGE_SIZE)
        for tp in (source_tp, target_tp)
    )
    tokens, slot = TokenRange(0, 1000, is_final=True), [(0, [3])]
    return max(
        PairPlan(source_rank, target_rank).plan(slot, slot, tokens).run_count
        for source_rank in source.ranks
        for target_rank in target.ranks
    )
