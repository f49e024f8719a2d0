"""Cutting layers over stages and units over ranks."""

from __future__ import annotations

import pytest

from common.errors import LayoutError
from common.layout.component import Segment, Shard
from common.layout.parallel import check_units, ranks_of_unit, split_layers, units_of_rank


@pytest.mark.parametrize("layer_count", range(1, 40))
def test_stages_cover_all_layers_evenly_and_in_order(layer_count: int) -> None:
    for stage_count in range(1, layer_count + 1):
        stages = split_layers(layer_count, stage_count)
        sizes = [end - first for first, end in stages]
        assert [layer for stage in stages for layer in range(*stage)] == list(range(layer_count))
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("layer_count", "stage_count"), [(4, 0), (4, 5), (0, 1), (4, -1)])
def test_a_stage_without_layers_is_refused(layer_count: int, stage_count: int) -> None:
    with pytest.raises(LayoutError, match=f"pp_size={stage_count}: must be in 1..{layer_count}"):
        split_layers(layer_count, stage_count)


def test_units_are_cut_or_replicated() -> None:
    assert [list(units_of_rank(8, Shard.SPLIT, 2, rank)) for rank in range(2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert [list(units_of_rank(2, Shard.SPLIT, 4, rank)) for rank in range(4)] == [
        [0],
        [0],
        [1],
        [1],
    ]
    assert list(units_of_rank(3, Shard.REPLICATE, 4, 2)) == [0, 1, 2]


@pytest.mark.parametrize("shard", list(Shard))
@pytest.mark.parametrize("tp_size", range(1, 17))
def test_the_ranks_of_a_unit_are_those_that_hold_it(shard: Shard, tp_size: int) -> None:
    for unit_count in range(1, 33):
        if shard is Shard.SPLIT and unit_count % tp_size and tp_size % unit_count:
            continue
        for unit in range(unit_count):
            holders = [
                rank
                for rank in range(tp_size)
                if unit in units_of_rank(unit_count, shard, tp_size, rank)
            ]
            assert holders
            assert list(ranks_of_unit(unit, unit_count, shard, tp_size)) == holders


@pytest.mark.parametrize(("unit_count", "tp_size"), [(8, 3), (3, 2), (6, 4), (4, 6)])
def test_units_that_do_not_go_into_ranks_are_refused(unit_count: int, tp_size: int) -> None:
    segment = Segment("head", unit_count, 4)
    with pytest.raises(LayoutError, match=f"tp_size={tp_size}: {unit_count} units of 'head'"):
        check_units(segment, Shard.SPLIT, tp_size)
    check_units(segment, Shard.REPLICATE, tp_size)
