"""The pool's views and index arithmetic, against the byte addresses that `Cell` promises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.engine.cache.cast import raw
from common.engine.cache.kv_pool import KvPool, Scratch, gather_index, write_index
from common.layout.cache_layout import RankLayout, ServerLayout
from common.layout.component import FULL, CacheComponent, Segment, Shard
from common.layout.families import gqa_components
from tests.engine.test_slots import components as slot_components

PAGE_COUNT = 7


def gqa_layout(
    *, tp_size: int = 1, tp_rank: int = 0, layer_group_count: int = 1, dtype: str = "float32"
) -> RankLayout:
    components = gqa_components(layer_count=5, kv_head_count=4, head_dim=8, dtype=dtype)
    server = ServerLayout(components, tp_size, ((0, 3), (3, 5)), 4, layer_group_count)
    server.check()
    return server.rank(0, tp_rank)


def odd_layout(unit_count: int = 3) -> RankLayout:
    """Payloads of 24 and 40 bytes in one unit: no stride is a multiple of either item."""
    components = tuple(
        CacheComponent(
            name, (0, 1), (Segment("head", unit_count, nbytes),), FULL, Shard.SPLIT, "float32"
        )
        for name, nbytes in (("k", 24), ("v", 40))
    )
    return ServerLayout(components, 1, ((0, 2),), 4).rank(0, 0)


LAYOUTS = {
    "plain": gqa_layout(),
    "bfloat16": gqa_layout(dtype="bfloat16"),
    "float8": gqa_layout(dtype="float8_e4m3fn"),
    "rank 1 of 2": gqa_layout(tp_size=2, tp_rank=1),
    "replicated": gqa_layout(tp_size=8, tp_rank=5),
    "two layer groups": gqa_layout(layer_group_count=2),
    "odd": odd_layout(),
    "odd, one unit": odd_layout(1),
}


@pytest.fixture(params=LAYOUTS, ids=list(LAYOUTS))
def pool(request: pytest.FixtureRequest) -> KvPool:
    name: str = request.param
    pool = KvPool.allocate(LAYOUTS[name], [PAGE_COUNT], "cpu")
    count = pool.buffers[0].numel()
    pool.buffers[0].copy_(torch.arange(count, dtype=torch.int64).remainder(251))
    return pool


def all_planes(pool: KvPool) -> list[tuple[str, int]]:
    return [(cell.component, cell.layer) for cell in pool.layout.groups[0].cells]


def random_rows(pool: KvPool, component: str, layer: int, count: int) -> Tensor:
    view = pool.view(component, layer)
    generator = torch.Generator().manual_seed(layer)
    return torch.randn(count, view.shape[1], view.shape[3], generator=generator).to(view.dtype)


def test_views_lie_where_the_cells_say(pool: KvPool) -> None:
    group = pool.layout.groups[0]
    memory = bytes(pool.buffers[0].tolist())
    for cell in group.cells:
        view = pool.view(cell.component, cell.layer)
        assert view.shape[:3] == (PAGE_COUNT + 1, len(cell.units), 4)
        for page in (0, 1, PAGE_COUNT):
            for unit in range(len(cell.units)):
                for row in range(4):
                    start = (
                        page * group.page_nbytes
                        + cell.offset
                        + unit * cell.unit_stride
                        + row * cell.item_nbytes
                    )
                    expected = memory[start : start + cell.item_nbytes]
                    item = view[page, unit, row].contiguous().view(torch.uint8)
                    assert bytes(item.tolist()) == expected


def test_planes_cover_every_byte_of_the_envelopes_once(pool: KvPool) -> None:
    pool.buffers[0].zero_()
    for component, layer in all_planes(pool):
        view = pool.view(component, layer)
        assert not raw(view).any(), f"{component} {layer} overlaps another plane"
        view.fill_(1.0)
    element_nbytes = pool.view("k", 0).element_size()
    ones = pool.buffers[0].view(pool.view("k", 0).dtype).float()
    assert int((ones == 1.0).sum()) * element_nbytes == pool.buffers[0].numel()


def test_write_puts_rows_at_their_tokens_and_touches_nothing_else(pool: KvPool) -> None:
    pages = torch.tensor([3, 3, 7, 1, 0])
    rows = torch.tensor([0, 3, 2, 1, 3])
    for component, layer in all_planes(pool):
        plane = pool.plane(component, layer)
        before = pool.buffers[0].clone()
        values = random_rows(pool, component, layer, 5)
        plane.write(write_index(plane.geometry, pages, rows), values)
        assert torch.equal(raw(plane.view)[pages, :, rows], raw(values))
        after = pool.buffers[0].clone()
        pool.buffers[0].copy_(before)
        raw(plane.view)[pages, :, rows] = raw(values)
        assert torch.equal(after, pool.buffers[0])


def test_gather_equals_indexing_the_view(pool: KvPool) -> None:
    table = torch.tensor([[3, 7, 0], [1, 2, 5]], dtype=torch.int32)
    scratch = Scratch()
    for component, layer in all_planes(pool):
        plane = pool.plane(component, layer)
        gathered = plane.gather(gather_index(plane.geometry, table), scratch)
        # Bytes are compared: the pattern in the buffer holds NaNs.
        expected = torch.stack(
            [torch.cat([raw(plane.view)[p] for p in pages.tolist()], dim=1) for pages in table]
        )
        assert gathered.shape == expected.shape
        assert torch.equal(gathered.view(torch.uint8), expected.view(torch.uint8))


def test_pick_equals_indexing_the_view(pool: KvPool) -> None:
    pages, rows = torch.tensor([[3, 7, 0], [1, 3, 5]]), torch.tensor([[0, 3, 1], [2, 0, 3]])
    for component, layer in all_planes(pool):
        plane = pool.plane(component, layer)
        picked = plane.pick(pages, rows)
        assert picked.shape == (2, 3, plane.geometry.unit_count, plane.view.shape[-1])
        for index in range(6):
            place = divmod(index, 3)
            expected = raw(plane.view)[pages[place], :, rows[place]]
            assert torch.equal(picked[place].view(torch.uint8), expected.view(torch.uint8))


def test_writes_are_cast_to_the_cache_dtype() -> None:
    pool = KvPool.allocate(gqa_layout(dtype="bfloat16"), [PAGE_COUNT], "cpu")
    plane = pool.plane("k", 1)
    values = torch.full((1, 4, 8), 1.001)
    plane.write(write_index(plane.geometry, torch.tensor([2]), torch.tensor([0])), values)
    assert torch.equal(plane.view[2, :, 0], values[0].bfloat16())


@pytest.mark.parametrize("name", ["plain", "two layer groups"])
def test_ordinary_layouts_have_whole_strides(name: str) -> None:
    pool = KvPool.allocate(LAYOUTS[name], [PAGE_COUNT], "cpu")
    assert all(pool.plane(*key).pages is not None for key in all_planes(pool))


@pytest.mark.parametrize("unit_count", [1, 3])
def test_odd_layout_takes_the_strided_path(unit_count: int) -> None:
    pool = KvPool.allocate(odd_layout(unit_count), [PAGE_COUNT], "cpu")
    assert all(pool.plane(*key).pages is None for key in all_planes(pool))


def test_layers_of_one_geometry_share_an_index() -> None:
    pool = KvPool.allocate(gqa_layout(), [PAGE_COUNT], "cpu")
    assert len({pool.plane(*key).geometry for key in all_planes(pool)}) == 1


@pytest.mark.parametrize("tp_rank", [0, 3])
def test_segments_of_a_slot_lie_aligned_beside_wider_elements(tp_rank: int) -> None:
    server = ServerLayout(slot_components(), 4, ((0, 4),), 4, layer_group_count=2)
    server.check()
    pool = KvPool.allocate(server.rank(0, tp_rank), [1, PAGE_COUNT], "cpu")
    group = pool.layout.groups[1]
    owner = torch.zeros_like(pool.buffers[1])
    for number, cell in enumerate(group.cells, start=1):
        view = pool.view(cell.component, cell.layer, cell.segment)
        assert view.shape[:3] == (PAGE_COUNT + 1, len(cell.units), 1)
        for page in (0, 1, PAGE_COUNT):
            for unit in range(len(cell.units)):
                start = page * group.page_nbytes + cell.offset + unit * cell.unit_stride
                assert view[page, unit].data_ptr() == pool.buffers[1].data_ptr() + start
                place = owner[start : start + cell.item_nbytes]
                assert not place.any(), f"{cell} overlaps another plane"
                place.fill_(number)
    padding_nbytes = int((owner[: group.page_nbytes] == 0).sum())
    assert padding_nbytes <= 3 * (len(group.cells) + 2)


def test_a_segment_may_stay_unnamed_only_if_it_is_the_only_one() -> None:
    server = ServerLayout(slot_components(), 1, ((0, 4),), 4)
    pool = KvPool.allocate(server.rank(0, 0), [1, 1], "cpu")
    assert pool.plane("state", 2) is pool.plane("state", 2, "head")
    assert pool.plane("conv", 2, "q") is not pool.plane("conv", 2, "k")
    with pytest.raises(KeyError):
        pool.plane("conv", 2)


def test_scratch_is_reused_and_grows() -> None:
    scratch = Scratch()
    like = torch.zeros(1, 6)
    large = scratch.take(like, 10)
    small = scratch.take(like, 2)
    assert large.shape == (10, 6) and small.data_ptr() == large.data_ptr()
    assert scratch.take(like, 11).shape == (11, 6)
    assert scratch.take(like.bfloat16(), 3).dtype == torch.bfloat16


def test_layers_of_other_stages_are_not_there() -> None:
    pool = KvPool.allocate(gqa_layout(), [PAGE_COUNT], "cpu")
    with pytest.raises(KeyError):
        pool.plane("k", 3)
    with pytest.raises(KeyError):
        pool.group_of("latent")


@pytest.mark.parametrize("extra_nbytes", [-1, 1])
def test_buffers_of_another_size_are_a_bug(extra_nbytes: int) -> None:
    layout = gqa_layout()
    nbytes = KvPool.buffer_nbytes(layout, [PAGE_COUNT])[0]
    with pytest.raises(AssertionError):
        KvPool(layout, [PAGE_COUNT], [torch.zeros(nbytes + extra_nbytes, dtype=torch.uint8)])


def test_one_page_is_kept_for_scratch() -> None:
    layout = gqa_layout()
    assert KvPool.buffer_nbytes(layout, [PAGE_COUNT]) == [
        (PAGE_COUNT + 1) * layout.groups[0].page_nbytes
    ]
