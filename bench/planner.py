"""The cost of planning one transfer: 8192 tokens, 64 layers, for one pair of ranks."""

from __future__ import annotations

import random
import statistics
import time

from bench.report import Row, at_most
from common.layout.cache_layout import ServerLayout
from common.layout.families import gqa_components
from common.layout.parallel import split_layers
from common.planner.copies import PairPlan
from common.planner.pairing import TokenRange

LAYER_COUNT = 64
TOKEN_COUNT = 8192
SAMPLE_COUNT = 40
COLD_TARGET_MS = 2.0
CACHED_TARGET_MS = 0.2

# name -> (tp, pp, page) of the source and of the target
CASES = {
    "same": ((1, 1, 16), (1, 1, 16)),
    "tp2_to_tp4": ((2, 1, 16), (4, 1, 16)),
    "pp2_to_pp1": ((1, 2, 16), (1, 1, 16)),
}


def run() -> list[Row]:
    """Rows plan_<case>_cold (first plan of a pair, tables included) and plan_<case>_cached."""
    rows: list[Row] = []
    for name, (source, target) in CASES.items():
        cold_ms, cached_ms, run_count = _measure(_layout(*source), _layout(*target))
        for kind, values, limit in (
            ("cold", cold_ms, COLD_TARGET_MS),
            ("cached", cached_ms, CACHED_TARGET_MS),
        ):
            value = statistics.median(values)
            rows.append(
                Row(f"plan_{name}_{kind}", value, "ms", samples=len(values), target=at_most(limit))
            )
        rows.append(Row(f"plan_{name}_runs", float(run_count), "runs"))
    return rows


def _layout(tp_size: int, pp_size: int, page_size: int) -> ServerLayout:
    components = gqa_components(
        layer_count=LAYER_COUNT, kv_head_count=8, head_dim=128, dtype="bfloat16"
    )
    return ServerLayout(components, tp_size, split_layers(LAYER_COUNT, pp_size), page_size)


def _measure(source: ServerLayout, target: ServerLayout) -> tuple[list[float], list[float], int]:
    rng = random.Random(1)
    page_count = TOKEN_COUNT // source.page_size
    source_pages = [(0, rng.sample(range(1, 4 * page_count), page_count))]
    target_pages = [(0, rng.sample(range(1, 4 * page_count), page_count))]
    tokens = TokenRange(0, TOKEN_COUNT, is_final=True)
    source_rank, target_rank = source.ranks[0], target.ranks[0]
    assert source_rank.groups and target_rank.groups, "laid out before the clock starts"
    cold_ms: list[float] = []
    cached_ms: list[float] = []
    run_count = 0
    for _ in range(SAMPLE_COUNT):
        started_at = time.perf_counter()
        pair = PairPlan(source_rank, target_rank)
        pair.plan(source_pages, target_pages, tokens)
        planned_at = time.perf_counter()
        run_count = pair.plan(source_pages, target_pages, tokens).run_count
        ended_at = time.perf_counter()
        cold_ms.append(1e3 * (planned_at - started_at))
        cached_ms.append(1e3 * (ended_at - planned_at))
    return cold_ms, cached_ms, run_count
