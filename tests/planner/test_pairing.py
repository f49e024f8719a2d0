"""Units with units and items with items, against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.layout.component import FULL, SLOT, Live, LiveKind, Shard
from common.planner.pairing import ItemRuns, TokenRange, pair_items, pair_units
from tests.planner.oracle import holds_unit, sent_items


def rows(runs: ItemRuns) -> list[tuple[int, int, int, int, int]]:
    columns = (
        runs.source_page,
        runs.source_row,
        runs.target_page,
        runs.target_row,
        runs.count,
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_window_smaller_than_a_page_is_cut_where_either_page_ends() -> None:
    runs = pair_items(range(873, 1000), 64, 256, is_paged=True)

    assert rows(runs) == [(13, 41, 3, 105, 23), (14, 0, 3, 128, 64), (15, 0, 3, 192, 40)]


def test_a_tail_wraps_around_its_ring() -> None:
    runs = pair_items(range(996, 1003), 8, 8, is_paged=False)

    assert rows(runs) == [(0, 4, 0, 4, 4), (0, 0, 0, 0, 3)]


def test_a_slot_is_one_row() -> None:
    assert rows(pair_items(range(1), 1, 1, is_paged=False)) == [(0, 0, 0, 0, 1)]


@settings(deadline=None, derandomize=True, database=None)
@given(
    st.integers(0, 300),
    st.integers(1, 300),
    st.integers(1, 64),
    st.integers(1, 64),
)
def test_runs_cover_every_item_in_order(start: int, count: int, source: int, target: int) -> None:
    runs = pair_items(range(start, start + count), source, target, is_paged=True)

    found = [
        (sp * source + sr + step, tp * target + tr + step)
        for sp, sr, tp, tr, length in rows(runs)
        for step in range(length)
    ]
    assert found == [(item, item) for item in range(start, start + count)]
    assert all(sr + length <= source for _, sr, _, _, length in rows(runs))
    assert all(tr + length <= target for _, _, _, tr, length in rows(runs))
    assert all(column.dtype == np.int64 for column in (runs.source_page, runs.count))


def test_unequal_thirds_and_halves_pair_unit_by_unit() -> None:
    pairs = {
        (source, target): list(
            pair_units(
                6,
                Shard.SPLIT,
                source_tp=3,
                source_rank=source,
                target_tp=2,
                target_rank=target,
            )
        )
        for source in range(3)
        for target in range(2)
    }

    assert pairs == {
        (0, 0): [0, 1],
        (0, 1): [],
        (1, 0): [2],
        (1, 1): [3],
        (2, 0): [],
        (2, 1): [4, 5],
    }


@pytest.mark.parametrize("shard", list(Shard))
@pytest.mark.parametrize("source_tp", range(1, 9))
@pytest.mark.parametrize("target_tp", range(1, 9))
def test_every_unit_a_target_holds_has_exactly_one_writer_that_holds_it(
    shard: Shard, source_tp: int, target_tp: int
) -> None:
    for unit_count in range(1, 17):
        if shard is Shard.SPLIT and any(
            unit_count % tp and tp % unit_count for tp in (source_tp, target_tp)
        ):
            continue
        for target in range(target_tp):
            writers: dict[int, list[int]] = {}
            for source in range(source_tp):
                for unit in pair_units(
                    unit_count,
                    shard,
                    source_tp=source_tp,
                    source_rank=source,
                    target_tp=target_tp,
                    target_rank=target,
                ):
                    assert holds_unit(unit, unit_count, shard, source_tp, source)
                    writers.setdefault(unit, []).append(source)
            held = {
                u for u in range(unit_count) if holds_unit(u, unit_count, shard, target_tp, target)
            }
            assert set(writers) == held
            assert all(len(ranks) == 1 for ranks in writers.values())


@pytest.mark.parametrize(
    "live",
    [
        FULL,
        SLOT,
        Live(LiveKind.WINDOW, 1),
        Live(LiveKind.WINDOW, 7),
        Live(LiveKind.BLOCK, 1),
        Live(LiveKind.BLOCK, 4),
        Live(LiveKind.TAIL, 4, 4),
        Live(LiveKind.TAIL, 5, 0),
        Live(LiveKind.TAIL, 1, 3),
    ],
)
def test_what_leaves_with_a_range_agrees_with_its_definition(live: Live) -> None:
    for stop in range(24):
        for start in range(stop + 1):
            for is_final in (False, True):
                tokens = TokenRange(start, stop, is_final)
                assert list(tokens.items(live)) == sent_items(live, tokens), tokens
