"""Where every byte lies, against walking the envelope byte by byte."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings

from common.errors import LayoutError
from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.layout.families import gqa_components
from common.layout.parallel import split_layers
from tests.planner.cases import Case, cases
from tests.planner.oracle import layer_groups_of, lives_of, rows_of_page, walk_page


def gqa(tp: int = 1, pp: int = 1, groups: int = 1) -> ServerLayout:
    components = gqa_components(layer_count=4, kv_head_count=8, head_dim=2, dtype="float32")
    return ServerLayout(components, tp, split_layers(4, pp), 16, groups)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases())
def test_every_cell_lies_where_the_envelope_puts_it(case: Case) -> None:
    layout = case.source
    assert [group.live for group in layout.groups] == lives_of(layout)
    for rank in layout.ranks:
        assert [list(layers) for layers in rank.layer_groups] == layer_groups_of(
            layout, rank.pp_rank
        )
        for group in rank.groups:
            live = group.group.live
            assert group.group.page_items == rows_of_page(live, layout.page_size)
            planes, page_nbytes = walk_page(layout, rank.pp_rank, rank.tp_rank, live)
            assert group.page_nbytes == page_nbytes
            components = [component.name for component in layout.components]
            found = {
                (
                    components.index(cell.component),
                    int(cell.segment.removeprefix("s")),
                    cell.layer,
                    unit,
                ): (cell.offset + (unit - cell.units.start) * cell.unit_stride, cell.item_nbytes)
                for cell in group.cells
                for unit in cell.units
            }
            assert found == {plane.key: (plane.offset, plane.nbytes) for plane in planes}


def test_keys_and_values_of_a_head_lie_side_by_side_for_all_layers() -> None:
    (group,) = gqa().ranks[0].groups

    item_nbytes = 2 * 4
    plane_nbytes = item_nbytes * 16
    assert group.page_nbytes == 8 * 4 * 2 * plane_nbytes
    assert group.cell("k", 0).offset == 0
    assert group.cell("v", 0).offset == plane_nbytes
    assert group.cell("k", 3).offset == 3 * 2 * plane_nbytes
    assert group.cell("k", 0).unit_stride == 4 * 2 * plane_nbytes
    with pytest.raises(KeyError):
        group.cell("k", 4)


def test_a_rank_holds_its_layers_and_its_heads() -> None:
    rank = gqa(tp=2, pp=2).rank(1, 1)

    assert rank.index == 3
    assert list(rank.layers) == [2, 3]
    assert rank.groups[0].cell("v", 2).units == range(4, 8)
    assert [r.index for r in gqa(tp=2, pp=2).ranks] == [0, 1, 2, 3]


def test_layer_groups_stand_outside_the_heads() -> None:
    (group,) = gqa(groups=2).ranks[0].groups

    assert [group.cell("k", layer).layer_group for layer in range(4)] == [0, 0, 1, 1]
    assert group.cell("k", 2).offset == group.page_nbytes // 2


def test_components_that_live_alike_share_a_page_and_others_do_not() -> None:
    window = Live(LiveKind.WINDOW, 8)
    slot = CacheComponent("state", (0,), (Segment("h", 8, 4),), SLOT, Shard.SPLIT, "float32")
    local = CacheComponent("k2", (1,), (Segment("h", 8, 4),), window, Shard.SPLIT, "float32")
    layout = dataclasses.replace(gqa(pp=2), components=(*gqa().components, slot, local))
    layout.check()

    assert [group.live for group in layout.groups] == [FULL, SLOT, window]
    assert [len(group.components) for group in layout.groups] == [2, 1, 1]
    assert layout.rank(1, 0).groups[1].page_nbytes == 0
    assert layout.rank(1, 0).groups[1].cells == ()


@pytest.mark.parametrize(
    ("live", "token_count", "indices"),
    [
        (FULL, 0, range(0)),
        (FULL, 16, range(1)),
        (FULL, 17, range(2)),
        (Live(LiveKind.WINDOW, 10), 40, range(1, 3)),
        (Live(LiveKind.BLOCK, 4), 3, range(0)),
        (Live(LiveKind.BLOCK, 4), 68, range(5)),
        (Live(LiveKind.BLOCK, 64), 128, range(2)),
        (Live(LiveKind.TAIL, 4, 2), 40, range(1)),
        (SLOT, 40, range(1)),
    ],
)
def test_pages_are_those_that_live_items_touch(
    live: Live, token_count: int, indices: range
) -> None:
    component = CacheComponent("c", (0,), (Segment("s", 1, 4),), live, Shard.REPLICATE, "float32")
    (group,) = ServerLayout((component,), 1, ((0, 1),), 16).groups

    assert group.page_indices(live.items(token_count)) == indices
    assert group.page_count(token_count) == max(len(indices), 0 if live.is_paged else 1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"page_size": 0}, "page_size=0: must be a power of two in 1..256"),
        ({"page_size": 24}, "page_size=24"),
        ({"page_size": 512}, "page_size=512"),
        ({"page_size": -16}, "page_size=-16"),
        ({"tp_size": 0}, "tp_size=0: must be at least 1"),
        ({"tp_size": 3}, "tp_size=3: 8 units of 'head'"),
        ({"stages": ((0, 2), (3, 4))}, "must be consecutive non-empty ranges"),
        ({"stages": ((1, 4),)}, "must be consecutive non-empty ranges"),
        ({"stages": ((0, 4), (4, 4))}, "must be consecutive non-empty ranges"),
        ({"stages": ((0, 3),)}, "must be ascending in 0..2"),
        ({"layer_group_count": 0}, "layer_group_count=0: must be at least 1"),
    ],
)
def test_a_layout_that_can_not_work_is_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(LayoutError, match=complaint):
        dataclasses.replace(gqa(), **change).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"layers": (1, 0)}, "must be ascending in 0..3"),
        ({"layers": (0, 0)}, "must be ascending"),
        ({"layers": (-1,)}, "must be ascending"),
        ({"layers": (4,)}, "must be ascending"),
        ({"live": Live(LiveKind.FULL, -1)}, "negative live rule"),
        ({"live": Live(LiveKind.TAIL, 4, -1)}, "negative live rule"),
        ({"live": Live(LiveKind.WINDOW)}, "window needs a size of at least 1"),
        ({"live": Live(LiveKind.BLOCK)}, "block needs a size of at least 1"),
        ({"live": Live(LiveKind.TAIL, 0, 4)}, "tail needs a size of at least 1"),
        ({"segments": ()}, "must be at least one"),
        ({"segments": (Segment("a", 1, 1), Segment("a", 2, 1))}, "named differently"),
        ({"segments": (Segment("a", 0, 1),)}, "empty segment"),
        ({"segments": (Segment("a", 1, 0),)}, "empty segment"),
        ({"segments": (Segment("a", 8, 6),)}, "unit_nbytes=6 of 'a': must be a multiple of 4"),
        ({"dtype": "float31"}, "dtype='float31': must be one of float32, bfloat16"),
        ({"name": "v"}, "component 'v': layer 0 owns it twice"),
    ],
)
def test_a_component_that_can_not_work_is_refused(
    change: dict[str, object], complaint: str
) -> None:
    keys, values = gqa().components
    changed = dataclasses.replace(keys, **change)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=complaint):
        dataclasses.replace(gqa(), components=(changed, values)).check()


def test_a_page_is_as_large_as_what_all_ranks_have_of_it() -> None:
    """The first stage owns nothing of the second group; a replicated plane is there twice."""
    late = CacheComponent("late", (3,), (Segment("s", 1, 12),), SLOT, Shard.REPLICATE, "float32")
    layout = gqa(tp=2, pp=2)
    layout = dataclasses.replace(layout, components=(*layout.components, late))
    assert layout.ranks[0].groups[1].page_nbytes == 0
    assert layout.page_nbytes(1) == 2 * 12
    assert layout.page_nbytes(0) == 16 * 4 * 8 * 2 * (2 * 4)  # items, layers, heads, planes, dims


@pytest.mark.parametrize(
    ("live", "name", "page_tokens"),
    [
        (FULL, "full", 16),
        (Live(LiveKind.WINDOW, 128), "window-128", 16),
        (Live(LiveKind.BLOCK, 4), "block-4", 16),
        (Live(LiveKind.BLOCK, 64), "block-64", 64),
        (Live(LiveKind.TAIL, 4, 3), "tail-4-3", 0),
        (SLOT, "slot", 0),
    ],
)
def test_a_group_says_its_name_and_how_many_tokens_a_page_covers(
    live: Live, name: str, page_tokens: int
) -> None:
    (component,) = gqa_components(layer_count=4, kv_head_count=8, head_dim=2, dtype="float32")[:1]
    layout = ServerLayout((dataclasses.replace(component, live=live),), 1, ((0, 4),), 16)
    (group,) = layout.groups
    assert (group.name, group.page_tokens) == (name, page_tokens)
