"""Copies between ranks: real bytes against the oracle, and the oracle against planted mistakes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from common.errors import PlanMismatch
from common.layout.cache_layout import RankLayout, ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.layout.families import gqa_components
from common.layout.parallel import split_layers, units_of_rank
from common.planner import pairing
from common.planner.copies import SHAPE_COUNT_MAX, PairPlan, plan_copies
from common.planner.copy_plan import CopyPlan
from common.planner.pairing import TokenRange, rank_pairs
from tests.planner.cases import Case, PairPlans, cases
from tests.planner.oracle import PageLists, Planner, judge, transfer


def check_case(case: Case, planner: Planner | None = None) -> None:
    source, target = case.servers()
    transfer(source, target, case.pieces, planner or PairPlans())
    judge(target, case.pieces)


@pytest.mark.slow
@settings(
    max_examples=180,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases())
def test_every_byte_is_written_once_and_is_right(case: Case) -> None:
    check_case(case)


@pytest.mark.slow
@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases(has_prefix=True))
def test_behind_a_prefix_every_byte_is_written_once_and_no_page_before_it_is_needed(
    case: Case,
) -> None:
    check_case(case)


# ---- layouts and cases by hand -------------------------------------------------------------------


@pytest.mark.slow
@settings(deadline=None, derandomize=True, database=None, max_examples=15)
@given(cases())
def test_the_pairs_of_ranks_are_those_with_something_to_copy(case: Case) -> None:
    expected = [
        (source.index, target.index)
        for source in case.source.ranks
        for target in case.target.ranks
        if not PairPlan(source, target).is_empty
    ]
    assert rank_pairs(case.source, case.target) == expected


def gqa(tp: int, *, pp: int = 1, page_size: int = 16, groups: int = 1) -> ServerLayout:
    """Four layers of eight heads of eight bytes, keys and values."""
    components = gqa_components(layer_count=4, kv_head_count=8, head_dim=2, dtype="float32")
    return ServerLayout(components, tp, split_layers(4, pp), page_size, groups)


def one_component(
    tp: int,
    live: Live,
    *,
    unit_count: int = 1,
    shard: Shard = Shard.REPLICATE,
    page_size: int = 16,
) -> ServerLayout:
    component = CacheComponent(
        "c", (0, 1), (Segment("s", unit_count, 3),), live, shard, "float8_e4m3fn"
    )
    return ServerLayout((component,), tp, ((0, 2),), page_size)


def whole(source: ServerLayout, target: ServerLayout, token_count: int) -> Case:
    """All of a request of `token_count` tokens, its pages in descending order on both sides."""

    def pages(layout: ServerLayout) -> tuple[PageLists, list[int]]:
        lists: PageLists = []
        counts: list[int] = []
        for group in layout.groups:
            indices = group.page_indices(group.live.items(token_count))
            count = max(1, len(indices))
            lists.append((indices.start, list(range(count, 0, -1))))
            counts.append(count)
        return lists, counts

    source_pages, source_counts = pages(source)
    target_pages, target_counts = pages(target)
    piece = TokenRange(0, token_count, is_final=True)
    return Case(source, target, source_pages, target_pages, source_counts, target_counts, [piece])


def plan_between(
    source: ServerLayout, target: ServerLayout, token_count: int, ranks: tuple[int, int] = (0, 0)
) -> CopyPlan:
    case = whole(source, target, token_count)
    return plan_copies(
        source.ranks[ranks[0]],
        target.ranks[ranks[1]],
        case.source_pages,
        case.target_pages,
        case.pieces[0],
    )


# ---- how many runs -------------------------------------------------------------------------------


def test_a_whole_page_between_equal_layouts_is_one_run() -> None:
    layout = gqa(1)
    ids = [5, 1, 7, 3]
    plan = plan_copies(
        layout.ranks[0],
        layout.ranks[0],
        [(0, ids)],
        [(0, [2, 4, 8, 6])],
        TokenRange(0, 64, is_final=True),
    )

    page_nbytes = 4 * 2 * 8 * 8 * 16
    assert plan.nbytes.tolist() == [page_nbytes] * 4
    assert plan.target_offset.tolist() == [page_nbytes * page for page in (2, 4, 6, 8)]
    assert plan.source_offset.tolist() == [page_nbytes * page for page in (5, 1, 3, 7)]


def test_pages_that_are_neighbours_on_both_sides_are_one_run() -> None:
    layout = gqa(1)
    plan = plan_copies(
        layout.ranks[0],
        layout.ranks[0],
        [(0, [4, 5, 9, 6])],
        [(0, [11, 12, 13, 20])],
        TokenRange(0, 64, is_final=True),
    )

    page_nbytes = 4 * 2 * 8 * 8 * 16
    assert plan.nbytes.tolist() == [2 * page_nbytes, page_nbytes, page_nbytes]


def test_a_head_range_of_a_page_is_one_run() -> None:
    plan = plan_between(gqa(2), gqa(4), 64, ranks=(0, 1))

    head_nbytes = 4 * 2 * 8 * 16
    assert plan.nbytes.tolist() == [2 * head_nbytes] * 4


def test_a_layer_range_is_one_run_per_head() -> None:
    plan = plan_between(gqa(1, pp=2), gqa(1), 16, ranks=(1, 0))

    assert plan.nbytes.tolist() == [2 * 2 * 8 * 16] * 8


def test_a_layer_group_outside_the_units_is_one_run() -> None:
    plan = plan_between(gqa(1, pp=2), gqa(1, groups=2), 16, ranks=(1, 0))

    assert plan.nbytes.tolist() == [2 * 2 * 8 * 8 * 16]


def test_ranks_that_share_nothing_have_an_empty_plan() -> None:
    plan = plan_between(gqa(2), gqa(4), 64, ranks=(0, 3))

    assert plan.run_count == 0
    assert plan.total_nbytes == 0
    assert PairPlan(gqa(2).ranks[0], gqa(4).ranks[3]).is_empty
    assert not PairPlan(gqa(2).ranks[0], gqa(4).ranks[1]).is_empty


def test_replicas_share_the_sending() -> None:
    source, target = one_component(4, FULL), one_component(8, FULL)
    writers = [[s.index for s in source.ranks if not PairPlan(s, t).is_empty] for t in target.ranks]

    assert writers == [[0], [1], [2], [3], [0], [1], [2], [3]]


def test_a_pair_plan_gives_the_same_again_and_forgets_old_shapes() -> None:
    source, target = gqa(1, page_size=8), gqa(1, page_size=64)
    pair = PairPlan(source.ranks[0], target.ranks[0])
    case = whole(source, target, 200)

    def plan(start: int, stop: int) -> CopyPlan:
        tokens = TokenRange(start, stop, is_final=False)
        return pair.plan(case.source_pages, case.target_pages, tokens)

    before = plan(3, 197)
    for start in range(SHAPE_COUNT_MAX):
        for stop in (start + 1, start + 2, start + 9):
            assert plan(start, stop).total_nbytes == (stop - start) * 4 * 2 * 8 * 8
    after = plan(3, 197)
    assert np.array_equal(before.source_offset, after.source_offset)
    assert np.array_equal(before.target_offset, after.target_offset)
    assert np.array_equal(before.nbytes, after.nbytes)


# ---- what leaves when ----------------------------------------------------------------------------


@pytest.mark.parametrize("live", [Live(LiveKind.WINDOW, 8), Live(LiveKind.TAIL, 4, 2), SLOT])
def test_what_is_final_only_at_the_end_waits_for_it(live: Live) -> None:
    layout = one_component(1, live)
    rank = layout.ranks[0]
    case = whole(layout, layout, 30)
    early = plan_copies(rank, rank, case.source_pages, case.target_pages, TokenRange(0, 30, False))
    final = plan_copies(rank, rank, case.source_pages, case.target_pages, TokenRange(30, 30, True))

    assert early.run_count == 0
    assert final.total_nbytes == len(live.items(30)) * 2 * 3


def test_a_block_leaves_when_it_closes() -> None:
    layout = one_component(1, Live(LiveKind.BLOCK, 4))
    rank = layout.ranks[0]
    case = whole(layout, layout, 30)

    def sent(start: int, stop: int) -> int:
        tokens = TokenRange(start, stop, is_final=False)
        return plan_copies(
            rank, rank, case.source_pages, case.target_pages, tokens
        ).total_nbytes // (2 * 3)

    assert [sent(0, 3), sent(3, 4), sent(4, 7), sent(5, 13), sent(13, 30)] == [0, 1, 0, 2, 4]


def test_an_empty_range_sends_nothing() -> None:
    assert plan_between(gqa(1), gqa(1), 0).run_count == 0


def test_a_prefix_that_ends_inside_a_page_of_the_source_is_not_sent() -> None:
    """64 tokens are one page of the source and four of the target, which has the first two."""
    pages: PageLists = [(2, [2, 1])]
    piece = TokenRange(32, 64, is_final=True)
    case = Case(gqa(2, page_size=64), gqa(1), [(0, [1])], pages, [1], [2], [piece])
    check_case(case)


@pytest.mark.parametrize("live", [Live(LiveKind.WINDOW, 8), Live(LiveKind.TAIL, 4, 2), SLOT])
def test_what_is_no_cache_of_a_prefix_comes_whole_behind_any_prefix(live: Live) -> None:
    layout = one_component(1, live)
    case = whole(layout, layout, 48)
    nbytes = {
        plan_copies(
            layout.ranks[0],
            layout.ranks[0],
            case.source_pages,
            case.target_pages,
            TokenRange(start, 48, is_final=True),
        ).total_nbytes
        for start in (0, 16, 48)
    }
    assert nbytes == {len(live.items(48)) * 2 * 3}


# ---- planted mistakes: does the oracle see them? -------------------------------------------------


def test_the_cases_by_hand_are_right() -> None:
    check_case(whole(gqa(2), gqa(4), 70))
    check_case(whole(one_component(4, FULL), one_component(2, FULL), 40))
    check_case(whole(gqa(2, page_size=8), gqa(1, pp=3, page_size=32), 70))


def test_the_oracle_sees_a_head_count_taken_from_one_rank() -> None:
    def with_local_heads(rank: RankLayout) -> RankLayout:
        components = tuple(
            dataclasses.replace(
                component,
                segments=tuple(
                    dataclasses.replace(segment, unit_count=segment.unit_count // 2)
                    for segment in component.segments
                ),
            )
            for component in rank.server.components
        )
        return RankLayout(
            dataclasses.replace(rank.server, components=components), rank.pp_rank, rank.tp_rank
        )

    def wrong(
        source: RankLayout,
        target: RankLayout,
        source_pages: PageLists,
        target_pages: PageLists,
        tokens: TokenRange,
    ) -> CopyPlan:
        return plan_copies(
            with_local_heads(source), with_local_heads(target), source_pages, target_pages, tokens
        )

    with pytest.raises(AssertionError, match="wrong bytes"):
        check_case(whole(gqa(2), gqa(4), 64), wrong)


def test_the_oracle_sees_windows_paired_by_place_in_the_list() -> None:
    """1000 tokens, window 128: the source's pages 13, 14, 15 of 64; the target's page 3 of 256."""
    live = Live(LiveKind.WINDOW, 128)
    case = whole(one_component(1, live, page_size=64), one_component(1, live, page_size=256), 1000)
    assert [first for first, _ in case.source_pages + case.target_pages] == [13, 3]
    check_case(case)

    def wrong(
        source: RankLayout,
        target: RankLayout,
        source_pages: PageLists,
        target_pages: PageLists,
        tokens: TokenRange,
    ) -> CopyPlan:
        ((_, target_ids),) = target_pages
        ((_, source_ids),) = source_pages
        window = TokenRange(0, 127, is_final=True)
        return plan_copies(source, target, [(0, source_ids)], [(0, target_ids)], window)

    with pytest.raises(AssertionError, match="wrong bytes"):
        check_case(case, wrong)


def test_the_oracle_sees_a_missing_writer() -> None:
    def wrong(
        source: RankLayout,
        target: RankLayout,
        source_pages: PageLists,
        target_pages: PageLists,
        tokens: TokenRange,
    ) -> CopyPlan:
        if source.tp_rank == 1 and target.tp_rank == 2:
            return CopyPlan.empty()
        return plan_copies(source, target, source_pages, target_pages, tokens)

    with pytest.raises(AssertionError, match="rank 2 group 0: wrong bytes"):
        check_case(whole(gqa(2), gqa(4), 64), wrong)


def test_the_oracle_sees_a_writer_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_election(
        unit_count: int,
        shard: Shard,
        *,
        source_tp: int,
        source_rank: int,
        target_tp: int,
        target_rank: int,
    ) -> range:
        held = units_of_rank(unit_count, shard, source_tp, source_rank)
        wanted = units_of_rank(unit_count, shard, target_tp, target_rank)
        return range(max(held.start, wanted.start), min(held.stop, wanted.stop))

    monkeypatch.setattr(pairing, "pair_units", without_election)
    with pytest.raises(AssertionError, match="most often 4"):
        check_case(whole(one_component(4, FULL), one_component(2, FULL), 40))


def test_the_oracle_sees_a_page_swapped() -> None:
    case = whole(gqa(1), gqa(1), 64)
    ((first, ids),) = case.target_pages
    swapped = [ids[1], ids[0], *ids[2:]]

    def wrong(
        source: RankLayout,
        target: RankLayout,
        source_pages: PageLists,
        target_pages: PageLists,
        tokens: TokenRange,
    ) -> CopyPlan:
        return plan_copies(source, target, source_pages, [(first, swapped)], tokens)

    with pytest.raises(AssertionError, match="wrong bytes"):
        check_case(case, wrong)


def test_the_oracle_sees_a_byte_written_outside() -> None:
    case = whole(gqa(1), gqa(1), 60)  # the last page has four rows that must stay as they are

    def wrong(
        source: RankLayout,
        target: RankLayout,
        source_pages: PageLists,
        target_pages: PageLists,
        tokens: TokenRange,
    ) -> CopyPlan:
        return plan_copies(source, target, source_pages, target_pages, TokenRange(0, 61, True))

    with pytest.raises(AssertionError, match="wanted"):
        check_case(case, wrong)


def test_the_oracle_sees_a_prefix_that_is_sent_again() -> None:
    """Into the pages that are named for the rest, as if the list began at 0."""
    target = gqa(1)
    pages: PageLists = [(2, [1, 2])]
    piece = TokenRange(32, 64, is_final=True)
    case = Case(target, target, [(0, [1, 2, 3, 4])], pages, [4], [2], [piece])
    check_case(case)

    def wrong(
        source: RankLayout,
        target: RankLayout,
        source_pages: PageLists,
        target_pages: PageLists,
        tokens: TokenRange,
    ) -> CopyPlan:
        ((_, target_ids),) = target_pages
        tokens = TokenRange(0, 32, is_final=True)
        return plan_copies(source, target, source_pages, [(0, target_ids)], tokens)

    with pytest.raises(AssertionError, match="wrong bytes"):
        check_case(case, wrong)


# ---- what can't be planned -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source_pages", "target_pages", "complaint"),
    [
        ([(0, [1, 2, 3])], [(0, [1, 2, 3, 4])], "source pages 0..2 of group 0 do not cover 0..3"),
        ([(0, [1, 2, 3, 4])], [(0, [1, 2, 3])], "target pages 0..2 of group 0 do not cover 0..3"),
        ([(1, [1, 2, 3, 4])], [(0, [1, 2, 3, 4])], "source pages 1..4"),
        ([(0, [1, 2, 3, 4])], [(1, [1, 2, 3, 4])], "target pages 1..4"),
        ([(0, [])], [(0, [1, 2, 3, 4])], "source pages 0..-1"),
        ([(0, [1, 2, 0, 4])], [(0, [1, 2, 3, 4])], "source page 0 of group 0: ids start at 1"),
        ([(0, [1, 2, 3, 4])], [(0, [1, 2, 3, -4])], "target page -4"),
        ([], [(0, [1, 2, 3, 4])], "pages of 0 and 1 page groups for a cache of 1"),
        ([(0, [1, 2, 3, 4])] * 2, [(0, [1, 2, 3, 4])] * 2, "pages of 2 and 2 page groups"),
    ],
)
def test_a_list_that_does_not_cover_the_range_is_never_cut(
    source_pages: PageLists, target_pages: PageLists, complaint: str
) -> None:
    rank = gqa(1).ranks[0]
    with pytest.raises(PlanMismatch, match=complaint):
        plan_copies(rank, rank, source_pages, target_pages, TokenRange(0, 50, is_final=True))


@pytest.mark.parametrize("tokens", [TokenRange(-1, 5, False), TokenRange(6, 5, True)])
def test_a_range_that_is_none_is_refused(tokens: TokenRange) -> None:
    rank = gqa(1).ranks[0]
    with pytest.raises(PlanMismatch, match="are no range"):
        plan_copies(rank, rank, [(0, [1])], [(0, [1])], tokens)


def test_ranks_that_share_nothing_still_check_their_lists() -> None:
    with pytest.raises(PlanMismatch, match="do not cover"):
        plan_copies(
            gqa(2).ranks[0],
            gqa(4).ranks[3],
            [(0, [1])],
            [(0, [1])],
            TokenRange(0, 17, is_final=True),
        )


def test_caches_of_different_things_are_refused() -> None:
    rank = gqa(1).ranks[0]
    with pytest.raises(PlanMismatch, match="page group 0 is"):
        PairPlan(rank, one_component(1, SLOT).ranks[0])
    other = gqa_components(layer_count=4, kv_head_count=8, head_dim=4, dtype="float32")
    with pytest.raises(PlanMismatch, match="at the target"):
        PairPlan(rank, dataclasses.replace(gqa(1), components=other).ranks[0])
    hybrid = dataclasses.replace(
        gqa(1), components=gqa(1).components + one_component(1, SLOT).components
    )
    with pytest.raises(PlanMismatch, match="1 page groups here, 2 at the target"):
        PairPlan(rank, hybrid.ranks[0])
