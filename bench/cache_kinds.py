"""Transfers of caches other than plain keys and values: latent rows, and layers with a window.

Bandwidth: the same 72 MB of each kind between random pages of two processes, in GB/s (10^9 bytes),
sampled in turns within one run and held against keys and values of full attention. Each is sampled
right after an untimed transfer of its own: a socket that has idled starts slowly. As most prompts
do, those of keys and values end inside a page, whose rows leave as one run per layer, plane and
head; a window adds two such pages, its first and its last.
Bytes: what the plans of a whole prompt move, over what its live cache is; this is counted, and no
clock is in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.report import Row, at_least, at_most, row_of_medians
from bench.transfers import Pair
from common.layout.cache_layout import GroupLayout, ServerLayout
from common.layout.component import CacheComponent
from common.layout.families import gqa_components, mla_components, windowed_gqa_components
from common.layout.parallel import split_layers
from common.planner.copies import PairPlan, plan_copies
from common.planner.copy_plan import CopyPlan
from common.planner.pairing import TokenRange

SAMPLE_COUNT = 41
BATCH_NBYTES = 61 * 9 << 17  # the one size near 64 MiB that is a whole number of tokens of each
GQA_RATIO_MIN = 0.85
LIVE_RATIO_MAX = 1.05
POOL_BATCHES = 3  # a pool holds so many transfers
LINKS = {"shm": "posix,tcp", "tcp": "tcp"}

# The shape of gpt-oss-120b: 36 layers, of which every other one sees 128 tokens. Latent rows are
# those of DeepSeek-V3.
WINDOW = 128
WINDOWS = (WINDOW, 0) * 18
WINDOW_HEADS, WINDOW_HEAD_DIM = 8, 64
LONG_PROMPT = 32768
CHUNK = 8192
# name -> (tp, pp, page) of the source and of the target
LONG_CASES = {
    "equal": ((1, 1, 16), (1, 1, 16)),
    "page_16_64": ((1, 1, 16), (1, 1, 64)),
    "page_256_16": ((1, 1, 256), (1, 1, 16)),
    "tp_2_8": ((2, 1, 16), (8, 1, 16)),
    "tp_8_2": ((8, 1, 16), (2, 1, 16)),
    "tp_8_2_page_64_16": ((8, 1, 64), (2, 1, 16)),
    "tp_4_pp_3_to_tp_2_pp_2": ((4, 3, 16), (2, 2, 16)),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """What is cached, and how long a prompt fills BATCH_NBYTES."""

    components: tuple[CacheComponent, ...]
    layer_count: int
    token_count: int


KINDS = {
    "gqa": Kind(
        gqa_components(layer_count=32, kv_head_count=8, head_dim=128, dtype="bfloat16"),
        32,
        BATCH_NBYTES // (2 * 32 * 8 * 128 * 2),
    ),
    "mla": Kind(
        mla_components(
            layer_count=61, latent_dim=512, rope_dim=64, is_interleaved=True, dtype="bfloat16"
        ),
        61,
        BATCH_NBYTES // (61 * (512 + 64) * 2),
    ),
    "swa": Kind(
        windowed_gqa_components(
            windows=WINDOWS,
            kv_head_count=WINDOW_HEADS,
            head_dim=WINDOW_HEAD_DIM,
            dtype="bfloat16",
        ),
        len(WINDOWS),
        # Half of the layers keep all tokens, the other half those before the next one.
        BATCH_NBYTES // (2 * 18 * WINDOW_HEADS * WINDOW_HEAD_DIM * 2) - (WINDOW - 1),
    ),
}


def run() -> list[Row]:
    rows: list[Row] = []
    for link in LINKS:
        rows += run_bandwidth(link)
    return rows + run_long_prompt()


# ---- bandwidth -----------------------------------------------------------------------------------


def run_bandwidth(link: str) -> list[Row]:
    """Equal layouts at both ends, one rank each: as kinds differ, nothing else may."""
    pair = Pair(LINKS[link])
    rng = np.random.default_rng(5)
    samples: dict[str, list[float]] = defaultdict(list)
    run_counts: dict[str, int] = {}
    for _ in range(SAMPLE_COUNT):
        for name, kind in KINDS.items():
            warmup, plan = (plan_random_pages(rng, kind) for _ in range(2))
            assert plan.total_nbytes == BATCH_NBYTES, (name, plan.total_nbytes)
            run_counts[name] = plan.run_count
            pair.sample(warmup)
            samples[name].append(pair.sample(plan))
    pair.close()
    for name, count in run_counts.items():
        print(f"kind_{name}_{link}: {count} runs", flush=True)
    gqa = samples["gqa"]
    targets = {name: at_least(GQA_RATIO_MIN) for name in KINDS if name != "gqa"}
    return [
        row_of_medians(f"kind_{name}_{link}", "GB/s", values, "gqa", gqa, targets.get(name))
        for name, values in samples.items()
    ]


def plan_random_pages(rng: np.random.Generator, kind: Kind) -> CopyPlan:
    """The transfer of one prompt; all page groups of a side lie in one region, one by one."""
    layout = ServerLayout(kind.components, 1, ((0, kind.layer_count),), page_size=16)
    rank = layout.ranks[0]
    lists = [
        [random_pages(rng, group, kind.token_count) for group in rank.groups] for _ in range(2)
    ]
    tokens = TokenRange(0, kind.token_count, is_final=True)
    plan = plan_copies(rank, rank, lists[0], lists[1], tokens)
    spans = [pool_page_count(group, kind.token_count) * group.page_nbytes for group in rank.groups]
    starts = np.concatenate(([0], np.cumsum(spans[:-1]))).astype(np.int64)
    zeros = np.zeros(plan.run_count, dtype=np.int64)
    return CopyPlan(
        zeros,
        plan.source_offset + starts[plan.source_region],
        zeros,
        plan.target_offset + starts[plan.target_region],
        plan.nbytes,
    )


def pool_page_count(group: GroupLayout, token_count: int) -> int:
    return 1 + POOL_BATCHES * group.group.page_count(token_count)


def random_pages(
    rng: np.random.Generator, group: GroupLayout, token_count: int
) -> tuple[int, list[int]]:
    """(first logical index, page ids) of the live items of a prompt."""
    needed = group.group.page_indices(group.group.live.items(token_count))
    ids = rng.permutation(pool_page_count(group, token_count) - 1)[: len(needed)] + 1
    return needed.start, ids.tolist()


# ---- bytes of a long prompt ----------------------------------------------------------------------


def run_long_prompt() -> list[Row]:
    """Rows in bytes, held against the live cache; and what it would be without windows."""
    item_nbytes = 2 * WINDOW_HEADS * WINDOW_HEAD_DIM * 2
    live_nbytes = sum(
        item_nbytes * (min(LONG_PROMPT, window - 1) if window else LONG_PROMPT)
        for window in WINDOWS
    )
    rows = [
        _bytes_row(name, count_moved_nbytes(_layout(*source), _layout(*target)), live_nbytes)
        for name, (source, target) in LONG_CASES.items()
    ]
    all_nbytes = item_nbytes * LONG_PROMPT * len(WINDOWS)
    saved = Row(
        "swa_32k_live", live_nbytes / 1e6, "MB", "all tokens", all_nbytes / 1e6,
        live_nbytes / all_nbytes, 1,
    )  # fmt: skip
    return [*rows, saved]


def _bytes_row(name: str, moved_nbytes: int, live_nbytes: int) -> Row:
    ratio = moved_nbytes / live_nbytes
    moved, live = moved_nbytes / 1e6, live_nbytes / 1e6
    target = at_most(LIVE_RATIO_MAX)
    return Row(f"swa_32k_{name}", moved, "MB", "live cache", live, ratio, target=target)


def _layout(tp_size: int, pp_size: int, page_size: int) -> ServerLayout:
    stages = split_layers(len(WINDOWS), pp_size)
    layout = ServerLayout(KINDS["swa"].components, tp_size, stages, page_size)
    layout.check()
    return layout


def count_moved_nbytes(source: ServerLayout, target: ServerLayout) -> int:
    """Of every chunk of the long prompt, from every rank to every rank."""
    starts = range(0, LONG_PROMPT, CHUNK)
    source_pages, target_pages = (_all_pages(layout) for layout in (source, target))
    total = 0
    for source_rank in source.ranks:
        for target_rank in target.ranks:
            plan = PairPlan(source_rank, target_rank)
            for start in starts:
                stop = min(start + CHUNK, LONG_PROMPT)
                tokens = TokenRange(start, stop, is_final=stop == LONG_PROMPT)
                total += plan.plan(source_pages, target_pages, tokens).total_nbytes
    return total


def _all_pages(layout: ServerLayout) -> Sequence[tuple[int, list[int]]]:
    """Page ids 1, 2, 3, ... at the logical indices that the whole prompt is live at."""
    indices = [group.page_indices(group.live.items(LONG_PROMPT)) for group in layout.groups]
    return [(needed.start, list(range(1, len(needed) + 1))) for needed in indices]
