"""Staged transfers: gather and scatter composed against the oracle's bytes, over random layouts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import PlanMismatch
from common.layout.cache_layout import RankLayout, ServerLayout
from common.layout.component import (
    FULL,
    SLOT,
    CacheComponent,
    Live,
    LiveKind,
    Segment,
    Shard,
)
from common.layout.families import gqa_components
from common.layout.parallel import split_layers
from common.planner.copies import PairPlan
from common.planner.pairing import TokenRange
from common.planner.staging import Conversion, LinearCopy, StagedPair, StagedPiece
from tests.planner.cases import Case, cases
from tests.planner.oracle import Server, judge

PROPERTY = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def gqa(
    tp: int, *, page_size: int = 16, dtype: str = "float32", groups: int = 1, layers: int = 4
) -> ServerLayout:
    components = gqa_components(layer_count=layers, kv_head_count=8, head_dim=2, dtype=dtype)
    return ServerLayout(components, tp, split_layers(layers, 1), page_size, groups)


def first_tokens(count: int) -> TokenRange:
    return TokenRange(0, count, is_final=True)


def check_linear(copy: LinearCopy) -> None:
    """The linear side is filled from its start without a gap or an overlap."""
    ends = np.cumsum(copy.nbytes)
    assert (copy.nbytes > 0).all()
    assert copy.linear_offset.tolist() == (ends - copy.nbytes).tolist()


def stage(source: Server, target: Server, case: Case, slot_nbytes: int) -> int:
    """Every source rank to every target rank through a slot; returns the number of pieces."""
    count = 0
    for source_rank in source.layout.ranks:
        for target_rank in target.layout.ranks:
            pair = StagedPair(source_rank, target_rank)
            slot_nbytes = max(slot_nbytes, pair.item_nbytes_max)
            whole = TokenRange(case.pieces[0].start, case.pieces[-1].stop, is_final=True)
            for tokens in case.pieces:
                for piece in pair.pieces(tokens, slot_nbytes):
                    assert pair.why_bad(piece, whole, slot_nbytes) is None
                    move(pair, piece, (source, source_rank), (target, target_rank), slot_nbytes)
                    count += 1
    return count


def move(
    pair: StagedPair,
    piece: StagedPiece,
    source: tuple[Server, RankLayout],
    target: tuple[Server, RankLayout],
    slot_nbytes: int,
) -> None:
    gathered = pair.gather(piece, source[0].pages)
    scattered = pair.scatter(piece, target[0].pages)
    check_linear(gathered)
    check_linear(scattered)
    assert gathered.total_nbytes == scattered.total_nbytes == pair.wire_nbytes(piece)
    assert gathered.total_nbytes <= slot_nbytes
    slot = bytearray(gathered.total_nbytes)
    read = source[0].memory[source[1].index, gathered.region]
    for page, linear, nbytes in columns(gathered):
        assert 0 <= page <= page + nbytes <= len(read)
        slot[linear : linear + nbytes] = read[page : page + nbytes]
    place = (target[1].index, scattered.region)
    written, writes = target[0].memory[place], target[0].writes[place]
    for page, linear, nbytes in columns(scattered):
        assert 0 <= page <= page + nbytes <= len(written)
        written[page : page + nbytes] = slot[linear : linear + nbytes]
        writes[page : page + nbytes] += 1


def columns(copy: LinearCopy) -> list[tuple[int, int, int]]:
    lists = (copy.page_offset.tolist(), copy.linear_offset.tolist(), copy.nbytes.tolist())
    return list(zip(*lists, strict=True))


@pytest.mark.slow
@PROPERTY
@given(cases(), st.sampled_from([50, 256, 4096, 1 << 20]))
def test_through_slots_of_any_size_every_byte_is_written_once_and_is_right(
    case: Case, slot_nbytes: int
) -> None:
    source, target = case.servers()
    stage(source, target, case, slot_nbytes)
    judge(target, case.pieces)


@pytest.mark.slow
@PROPERTY
@given(cases(has_prefix=True), st.sampled_from([50, 4096, 1 << 20]))
def test_through_slots_behind_a_prefix_every_byte_is_written_once_and_is_right(
    case: Case, slot_nbytes: int
) -> None:
    source, target = case.servers()
    stage(source, target, case, slot_nbytes)
    judge(target, case.pieces)


def test_the_oracle_sees_a_piece_that_lost_a_row() -> None:
    layout = gqa(1)
    pages = [(0, [1])]
    tokens = TokenRange(0, 16, is_final=True)
    case = Case(layout, layout, pages, pages, [1], [1], [tokens])
    source, target = case.servers()
    rank = layout.ranks[0]
    pair = StagedPair(rank, rank)
    (piece,) = pair.pieces(tokens, 1 << 20)
    short = dataclasses.replace(piece, row_stop=piece.row_stop - 1)
    move(pair, short, (source, rank), (target, rank), 1 << 20)
    with pytest.raises(AssertionError):
        judge(target, case.pieces)


@pytest.mark.parametrize("slot_nbytes", [8, 100, 1000, 1 << 20])
def test_layer_groups_cut_the_same_pieces_apart(slot_nbytes: int) -> None:
    source, target = gqa(2, groups=3), gqa(1, page_size=64)
    tokens = TokenRange(3, 200, is_final=True)
    pair = StagedPair(source.ranks[1], target.ranks[0])

    def cells(layer_group: int | None) -> list[tuple[int, int]]:
        return [
            (row, item)
            for piece in pair.pieces(tokens, slot_nbytes, layer_group)
            for row in range(piece.row_first, piece.row_stop)
            for item in range(piece.item_first, piece.item_stop)
        ]

    parts = [cells(group) for group in range(3)]
    assert all(parts)
    joined = [cell for part in parts for cell in part]
    assert sorted(joined) == sorted(cells(None))
    assert len(set(joined)) == len(joined) == 4 * 2 * 4 * 197
    for group, part in enumerate(parts):
        plan = PairPlan(source.ranks[1], target.ranks[0], group)
        nbytes = plan.plan([(0, range(1, 20))], [(0, range(1, 20))], tokens).total_nbytes
        assert len(part) * 8 == nbytes


def test_pieces_fill_their_slots_with_whole_pages() -> None:
    """1 MiB of a request of 128 KiB per token, to pages of 64: eight pieces of 64 items."""
    components = gqa_components(layer_count=32, kv_head_count=8, head_dim=128, dtype="bfloat16")
    source = ServerLayout(components, 1, ((0, 32),), 16).ranks[0]
    target = ServerLayout(components, 1, ((0, 32),), 64).ranks[0]
    pair = StagedPair(source, target)
    pieces = pair.pieces(TokenRange(0, 640, is_final=True), 1 << 20)
    assert len(pieces) == 80
    assert {pair.wire_nbytes(piece) for piece in pieces} == {1 << 20}
    assert {piece.item_stop - piece.item_first for piece in pieces} == {64}
    scattered = pair.scatter(pieces[0], [(0, range(1, 11))])
    assert set(scattered.nbytes.tolist()) == {64 * 256}


# ---- conversion ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "wire"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float8_e4m3fn", "float8_e4m3fn"),
        ("float8_e4m3fn", "float32", "float8_e4m3fn"),
        ("float16", "float16", "float16"),
    ],
)
def test_the_narrower_type_travels(source: str, target: str, wire: str) -> None:
    pair = StagedPair(gqa(1, dtype=source).ranks[0], gqa(1, dtype=target, page_size=8).ranks[0])
    tokens = TokenRange(0, 20, is_final=True)
    assert pair.is_converting == (source != target)
    elements = 4 * 2 * 8 * 2 * 20
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
    pieces = pair.pieces(tokens, 1 << 20)
    assert [pair.conversion(piece) for piece in pieces] == [Conversion(source, target, wire)]
    assert pair.wire_nbytes(pieces[0]) == elements * sizes[wire]
    assert pair.gather(pieces[0], [(0, [1, 2])]).total_nbytes == elements * sizes[source]
    assert pair.scatter(pieces[0], [(0, [1, 2, 3])]).total_nbytes == elements * sizes[target]


def test_a_piece_never_mixes_conversions() -> None:
    def layout(value_dtype: str, value_nbytes: int) -> RankLayout:
        components = tuple(
            CacheComponent(name, (0, 1), (Segment("s", 2, nbytes),), FULL, Shard.SPLIT, dtype)
            for name, dtype, nbytes in (("k", "float32", 8), ("v", value_dtype, value_nbytes))
        )
        return ServerLayout(components, 1, ((0, 2),), 8).ranks[0]

    pair = StagedPair(layout("float32", 8), layout("bfloat16", 4))
    pieces = pair.pieces(TokenRange(0, 8, is_final=True), 1 << 20)
    found = [(pair.conversion(piece).target, piece.row_first, piece.row_stop) for piece in pieces]
    assert found == [("float32", 0, 4), ("bfloat16", 4, 8)]
    both = dataclasses.replace(pieces[0], row_stop=5)
    assert "not of one element type" in (pair.why_bad(both, first_tokens(8), 1 << 20) or "")


@pytest.mark.parametrize(
    ("source", "target"),
    [("float16", "bfloat16"), ("float16", "float8_e4m3fn")],
)
def test_types_that_can_not_be_converted_are_no_pair(source: str, target: str) -> None:
    changed = dataclasses.replace(gqa(1), components=renamed(gqa(1), target))
    ours = dataclasses.replace(gqa(1), components=renamed(gqa(1), source))
    with pytest.raises(PlanMismatch, match=f"{source} here is .* of {target} at the target"):
        StagedPair(ours.ranks[0], changed.ranks[0])


def renamed(layout: ServerLayout, dtype: str) -> tuple[CacheComponent, ...]:
    return tuple(dataclasses.replace(c, dtype=dtype) for c in layout.components)


# ---- what a peer may claim -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"group": -1}, r"group -1: must be in 0..0"),
        ({"group": 1}, r"group 1: must be in 0..0"),
        ({"row_first": -1}, r"rows -1..64: must lie in 0..64"),
        ({"row_first": 64}, r"rows 64..64"),
        ({"row_stop": 65}, r"rows 0..65: must lie in 0..64"),
        ({"row_first": 3, "row_stop": 2}, r"rows 3..2"),
        ({"item_first": -1}, r"items -1..20: must lie in 0..20"),
        ({"item_stop": 21}, r"items 0..21: must lie in 0..20"),
        ({"item_first": 20}, r"items 20..20"),
        ({"item_stop": 2**62}, rf"items 0..{2**62}"),
        ({"row_stop": 2**62}, rf"rows 0..{2**62}"),
    ],
)
def test_a_piece_out_of_range_is_named(changes: dict[str, int], named: str) -> None:
    pair = StagedPair(gqa(1).ranks[0], gqa(1, page_size=8).ranks[0])
    (piece,) = pair.pieces(TokenRange(0, 20, is_final=True), 1 << 20)
    assert pair.why_bad(piece, first_tokens(20), 1 << 20) is None
    reason = pair.why_bad(dataclasses.replace(piece, **changes), first_tokens(20), 1 << 20)
    assert reason is not None and named in reason


@pytest.mark.parametrize(
    ("live", "allowed"),
    [
        (FULL, range(16, 40)),
        (Live(LiveKind.BLOCK, 4), range(4, 10)),
        (Live(LiveKind.WINDOW, 30), range(11, 40)),
        (Live(LiveKind.TAIL, 16, 8), range(24, 40)),
        (SLOT, range(1)),
    ],
)
def test_a_piece_of_what_the_target_has_is_named(live: Live, allowed: range) -> None:
    """16 of 40 tokens were there before."""
    component = CacheComponent("c", (0,), (Segment("s", 2, 4),), live, Shard.SPLIT, "float32")
    rank = ServerLayout((component,), 1, ((0, 1),), 16).ranks[0]
    pair, tokens = StagedPair(rank, rank), TokenRange(16, 40, is_final=True)
    honest = StagedPiece(0, 0, 2, allowed.start, allowed.stop)
    assert pair.pieces(tokens, 1 << 20) == [honest]
    assert pair.why_bad(honest, tokens, 1 << 20) is None
    for forged in (
        dataclasses.replace(honest, item_first=allowed.start - 1),
        dataclasses.replace(honest, item_stop=allowed.stop + 1),
    ):
        reason = pair.why_bad(forged, tokens, 1 << 20) or ""
        assert f"must lie in {allowed.start}..{allowed.stop}" in reason


def test_a_piece_larger_than_a_slot_is_named() -> None:
    pair = StagedPair(gqa(1).ranks[0], gqa(1).ranks[0])
    (piece,) = pair.pieces(TokenRange(0, 20, is_final=True), 1 << 20)
    nbytes = pair.wire_nbytes(piece)
    assert pair.why_bad(piece, first_tokens(20), nbytes) is None
    reason = pair.why_bad(piece, first_tokens(20), nbytes - 1) or ""
    assert f"{nbytes} bytes: a slot has {nbytes - 1}" in reason


def test_pages_that_do_not_cover_a_piece_are_our_own_mistake() -> None:
    pair = StagedPair(gqa(1).ranks[0], gqa(1, page_size=8).ranks[0])
    (piece,) = pair.pieces(TokenRange(0, 20, is_final=True), 1 << 20)
    for pages in ([(0, [1])], [(1, [1, 2])], [(0, [])], [(0, [1, 0])]):
        with pytest.raises(PlanMismatch):
            pair.gather(piece, pages)
    with pytest.raises(PlanMismatch):
        pair.pieces(TokenRange(0, 20, is_final=True), pair.item_nbytes_max - 1)
