"""Differences are all said, and a reservation that passes can be planned for."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ProtocolError
from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.layout.families import gqa_components, mla_components, windowed_gqa_components
from common.layout.parallel import split_layers
from common.planner.copies import PairPlan, plan_copies
from common.planner.pairing import TokenRange
from common.protocol.descriptor import RankDescriptor
from common.protocol.handshake import (
    announced_page_counts,
    check_transfer_request,
    compare_fingerprints,
    compare_layouts,
    compare_versions,
    expected_writers,
    negotiate_version,
)
from common.protocol.peer import TransferRequest
from common.request import SamplingParams
from tests.planner.cases import Case, cases


def gqa(
    tp: int = 1,
    *,
    pp: int = 1,
    page_size: int = 16,
    heads: int = 8,
    layers: int = 4,
    dtype: str = "bfloat16",
) -> ServerLayout:
    components = gqa_components(layer_count=layers, kv_head_count=heads, head_dim=8, dtype=dtype)
    return ServerLayout(components, tp, split_layers(layers, pp), page_size)


def with_component(layout: ServerLayout, live: Live) -> ServerLayout:
    added = CacheComponent("x", (0,), (Segment("s", 1, 4),), live, Shard.REPLICATE, "float32")
    return dataclasses.replace(layout, components=(*layout.components, added))


# ---- versions and fingerprints -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "spoken"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 3), (2, 5), 3),
        ((2, 5), (1, 3), 3),
        ((1, 9), (4, 4), 4),
        ((1, 1), (2, 2), None),
        ((3, 4), (1, 2), None),
        ((1, 5), (4, 2), None),
    ],
)
def test_the_newest_common_version_is_spoken(
    ours: tuple[int, int], theirs: tuple[int, int], spoken: int | None
) -> None:
    assert negotiate_version(ours, theirs) == spoken
    assert (compare_versions(ours, theirs) == []) == (spoken is not None)


def test_a_version_difference_names_both_ranges() -> None:
    assert compare_versions((1, 2), (3, 4)) == ["protocol version: ours 1..2, theirs 3..4"]


def test_every_fingerprint_difference_is_said() -> None:
    ours = {"architecture": "Llama", "dtype": "float32", "weights": "abc", "rope": ""}
    theirs = {"architecture": "Llama", "dtype": "bfloat16", "rope": "yarn", "extra": "1"}

    assert compare_fingerprints(ours, ours) == []
    assert compare_fingerprints(ours, theirs) == [
        "dtype: ours float32, theirs bfloat16",
        "weights: ours abc, theirs (none)",
        "rope: ours (none), theirs yarn",
        "extra: ours (none), theirs 1",
    ]


def test_what_a_peer_sent_can_neither_break_a_line_nor_flood_it() -> None:
    (difference,) = compare_fingerprints({}, {"k\n": "v\x1b[2J" + "w" * 1000})

    assert difference.isprintable()
    assert difference.startswith("'k\\n': ours (none), theirs 'v\\x1b[2J")
    assert len(difference) < 400


# ---- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "theirs",
    [
        gqa(2),
        gqa(8),
        gqa(pp=4),
        gqa(16, page_size=64),
        dataclasses.replace(gqa(), layer_group_count=3),
    ],
)
def test_how_a_cache_is_cut_may_differ(theirs: ServerLayout) -> None:
    theirs.check()
    assert compare_layouts(gqa(4, pp=2), theirs) == []
    assert compare_layouts(theirs, gqa(4, pp=2)) == []


@pytest.mark.parametrize(
    ("theirs", "differences"),
    [
        (
            gqa(dtype="float16"),
            [
                f"component {name} dtype: ours bfloat16, theirs float16 "
                "(bfloat16 and float16 can't be converted into each other)"
                for name in ("k", "v")
            ],
        ),
        (
            gqa(dtype="float8_e4m3fn"),
            [
                f"component {name} dtype: ours bfloat16, theirs float8_e4m3fn "
                "(a direct hand-over does not convert)"
                for name in ("k", "v")
            ],
        ),
        (
            gqa(heads=4),
            [
                "component k segments: ours head of 8 x 16 bytes, theirs head of 4 x 16 bytes",
                "component v segments: ours head of 8 x 16 bytes, theirs head of 4 x 16 bytes",
            ],
        ),
        (
            gqa(layers=2),
            [
                "layer count: ours 4, theirs 2",
                "component k layers: ours (0, 1, 2, 3), theirs (0, 1)",
                "component v layers: ours (0, 1, 2, 3), theirs (0, 1)",
            ],
        ),
        (with_component(gqa(), SLOT), ["component x: ours (none), theirs cached"]),
        (
            dataclasses.replace(gqa(), components=gqa().components[:1]),
            ["component v: ours cached, theirs (none)"],
        ),
        (
            dataclasses.replace(gqa(), components=gqa().components[::-1]),
            ["components: ours ['k', 'v'], theirs ['v', 'k']"],
        ),
    ],
)
def test_every_layout_difference_is_said(theirs: ServerLayout, differences: list[str]) -> None:
    theirs.check()
    assert compare_layouts(gqa(), theirs) == differences


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("live", Live(LiveKind.WINDOW, 9), "live rule: ours full (size 0, back 0), theirs window"),
        ("shard", Shard.REPLICATE, "shard: ours split, theirs replicate"),
        ("order", "rope-pair", "order: ours rope-half, theirs rope-pair"),
        ("segments", (Segment("half", 8, 16),), "segments: ours head of 8 x 16"),
    ],
)
def test_a_difference_of_one_field_of_one_component_is_said(
    field: str, value: object, shown: str
) -> None:
    components = gqa().components
    changed = dataclasses.replace(components[0], **{field: value})  # type: ignore[arg-type]
    theirs = dataclasses.replace(gqa(), components=(changed, components[1]))

    (difference,) = compare_layouts(gqa(), theirs)
    assert difference.startswith(f"component k {shown}")


def test_components_of_one_name_on_different_layers_are_told_apart() -> None:
    def layout(second_nbytes: int) -> ServerLayout:
        first, second = (
            CacheComponent("k", layers, (Segment("s", 2, nbytes),), FULL, Shard.SPLIT, "float32")
            for layers, nbytes in (((0,), 4), ((1,), second_nbytes))
        )
        return ServerLayout((first, second), 1, ((0, 2),), 16)

    layout(8).check()
    assert compare_layouts(layout(8), layout(8)) == []
    assert compare_layouts(layout(8), layout(12)) == [
        "component k (2) segments: ours s of 2 x 8 bytes, theirs s of 2 x 12 bytes"
    ]


def windowed(*windows: int) -> ServerLayout:
    components = windowed_gqa_components(
        windows=windows, kv_head_count=2, head_dim=8, dtype="bfloat16"
    )
    return ServerLayout(components, 1, ((0, len(windows)),), 16)


def latent(rank: int) -> ServerLayout:
    components = mla_components(
        layer_count=2, latent_dim=rank, rope_dim=64, is_interleaved=True, dtype="bfloat16"
    )
    return ServerLayout(components, 1, ((0, 2),), 16)


@pytest.mark.parametrize(
    ("ours", "theirs", "differences"),
    [
        (
            windowed(128, 0),
            windowed(127, 0),
            [
                f"component {name} (2) live rule: ours window (size 128, back 0), "
                "theirs window (size 127, back 0)"
                for name in ("k", "v")
            ],
        ),
        (
            windowed(128, 128),
            windowed(0, 0),
            [
                f"component {name} live rule: ours window (size 128, back 0), "
                "theirs full (size 0, back 0)"
                for name in ("k", "v")
            ],
        ),
        (
            windowed(128, 0),
            windowed(0, 128),
            [
                f"component {name} layers: ours ({ours},), theirs ({theirs},)"
                for suffix, ours, theirs in (("", 1, 0), (" (2)", 0, 1))
                for name in (f"k{suffix}", f"v{suffix}")
            ],
        ),
        (
            latent(512),
            latent(256),
            ["component latent segments: ours row of 1 x 1152 bytes, theirs row of 1 x 640 bytes"],
        ),
    ],
)
def test_windows_and_ranks_that_differ_are_said_with_both_values(
    ours: ServerLayout, theirs: ServerLayout, differences: list[str]
) -> None:
    for layout in (ours, theirs):
        layout.check()
        assert compare_layouts(layout, layout) == []
    assert compare_layouts(ours, theirs) == differences
    mirrored = compare_layouts(theirs, ours)
    assert len(mirrored) == len(differences), "the other side sees as much"


# ---- writers and regions -------------------------------------------------------------------------


def test_every_rank_that_holds_part_of_the_cache_is_expected() -> None:
    assert expected_writers(gqa(), gqa(8)) == [0]
    assert expected_writers(gqa(2, pp=2), gqa()) == [0, 1, 2, 3]


def test_a_stage_that_caches_nothing_is_not_expected() -> None:
    component = CacheComponent("c", (2, 3), (Segment("s", 2, 4),), FULL, Shard.SPLIT, "float32")
    source = ServerLayout((component,), 2, ((0, 2), (2, 4)), 16)

    assert expected_writers(source, dataclasses.replace(source, tp_size=1)) == [2, 3]


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases())
def test_no_rank_writes_that_is_not_expected(case: Case) -> None:
    writers = {
        source.index
        for source in case.source.ranks
        for target in case.target.ranks
        if not PairPlan(source, target).is_empty
    }
    assert writers <= set(expected_writers(case.source, case.target))


def describe(layout: ServerLayout, page_counts: list[int]) -> list[RankDescriptor]:
    return [
        RankDescriptor(
            rank.index,
            b"address",
            [
                (f"pages-{index}", 0, max(1, (count + 1) * group.page_nbytes), b"key")
                for index, (group, count) in enumerate(zip(rank.groups, page_counts, strict=True))
            ],
        )
        for rank in layout.ranks
    ]


def test_page_counts_come_from_the_sizes_of_regions() -> None:
    layout = with_component(gqa(2, pp=2), SLOT)  # the slot is on stage 0 only
    assert announced_page_counts(layout, describe(layout, [10, 3])) == (10, 3)


def test_the_smallest_rank_decides() -> None:
    layout = gqa(2)
    ranks = [describe(layout, [10])[0], describe(layout, [7])[1]]
    assert announced_page_counts(layout, ranks[::-1]) == (7,)


def test_a_region_that_does_not_end_with_a_page_counts_whole_pages() -> None:
    layout = gqa()
    (rank,) = describe(layout, [5])
    name, address, nbytes, key = rank.regions[0]
    larger = msgspec.structs.replace(rank, regions=[(name, address, nbytes + 1, key)])
    smaller = msgspec.structs.replace(rank, regions=[(name, address, nbytes - 1, key)])
    assert announced_page_counts(layout, [larger]) == (5,)
    assert announced_page_counts(layout, [smaller]) == (4,)


def test_a_wrong_announcement_is_refused() -> None:
    layout = gqa(2)
    ranks = describe(layout, [10])
    with pytest.raises(ProtocolError, match=r"announced ranks \[0\]: the layout has 0..1"):
        announced_page_counts(layout, ranks[:1])
    with pytest.raises(ProtocolError, match=r"announced ranks \[0, 0\]"):
        announced_page_counts(layout, [ranks[0], ranks[0]])
    with pytest.raises(ProtocolError, match=r"announced ranks \[0, 1, 2\]"):
        announced_page_counts(layout, [*ranks, msgspec.structs.replace(ranks[0], rank=2)])
    with pytest.raises(ProtocolError, match="rank 0 announced 0 regions for 1 page groups"):
        announced_page_counts(layout, [msgspec.structs.replace(ranks[0], regions=[]), ranks[1]])
    for nbytes in (0, layout.ranks[0].groups[0].page_nbytes * 2 - 1):
        small = msgspec.structs.replace(ranks[0], regions=[("pages-0", 0, nbytes, b"")])
        with pytest.raises(ProtocolError, match=f"region pages-0 of {nbytes} bytes: must hold"):
            announced_page_counts(layout, [small, ranks[1]])


# ---- reservations --------------------------------------------------------------------------------


def reserve(source: ServerLayout, target: ServerLayout, token_count: int) -> TransferRequest:
    """An honest reservation of the pages 1, 2, 3, ... of every group."""
    indices = [group.page_indices(group.live.items(token_count)) for group in target.groups]
    return TransferRequest(
        transfer_id=1,
        incarnation="d",
        peer_incarnation="p",
        token_count=token_count,
        pages=[(needed.start, list(range(1, len(needed) + 1))) for needed in indices],
        budget_ms=1000,
        writers=expected_writers(source, target),
        token_ids=[7] * token_count,
        prompt_count=token_count,
        sampling=SamplingParams(max_new_tokens=1, seed=0),
    )


SOURCE, TARGET = gqa(2), with_component(gqa(4, page_size=8), Live(LiveKind.WINDOW, 10))
COUNTS = (10, 3)


def complaint_about(**fields: object) -> str | None:
    request = msgspec.structs.replace(reserve(SOURCE, TARGET, 40), **fields)
    return check_transfer_request(SOURCE, TARGET, COUNTS, request)


def test_an_honest_reservation_passes() -> None:
    assert complaint_about() is None
    assert complaint_about(room=5, token_ids=[], prompt_count=0, sampling=None) is None
    assert complaint_about(prompt_count=1) is None
    assert complaint_about(pages=[(0, [10, 9, 1, 2, 3]), (3, [3, 2])]) is None


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"token_count": 0}, "token_count=0: must be at least 1"),
        ({"token_count": 41}, "40 token ids for token_count=41"),
        ({"token_ids": []}, "0 token ids for token_count=40"),
        ({"prompt_count": 0}, "prompt_count=0: must be in 1..40"),
        ({"prompt_count": 41}, "prompt_count=41: must be in 1..40"),
        ({"sampling": None}, "sampling: must be given where no room is"),
        (
            {
                "sampling": SamplingParams(
                    1, 0, return_logprob=True, top_logprobs_num=2**31 - 1, logprob_start_len=0
                )
            },
            "log-probabilities of 40 prompt tokens may take 1288490189040 bytes: at most 50331648 "
            "are told",
        ),
        ({"writers": []}, "writers=[]: must be [0, 1]"),
        ({"writers": [0]}, "writers=[0]: must be [0, 1]"),
        ({"writers": [0, 1, 2]}, "writers=[0, 1, 2]: must be [0, 1]"),
        ({"writers": [0, 0]}, "writers=[0, 0]: must be [0, 1]"),
        ({"pages": []}, "pages of 0 page groups: there are 2"),
        ({"pages": [(0, [1, 2, 3, 4, 5])] * 3}, "pages of 3 page groups: there are 2"),
        (
            {"pages": [(0, [1, 2, 3, 4]), (3, [1, 2])]},
            "pages of group 0: 4 from index 0; 40 tokens need 5 from index 0",
        ),
        (
            {"pages": [(0, [1, 2, 3, 4, 5, 6]), (3, [1, 2])]},
            "pages of group 0: 6 from index 0; 40 tokens need 5 from index 0",
        ),
        (
            {"pages": [(1, [1, 2, 3, 4, 5]), (3, [1, 2])]},
            "pages of group 0: 5 from index 1; 40 tokens need 5 from index 0",
        ),
        (
            {"pages": [(0, [1, 2, 3, 4, 5]), (0, [1, 2])]},
            "pages of group 1: 2 from index 0; 40 tokens need 2 from index 3",
        ),
        (
            {"pages": [(0, [1, 2, 0, 4, 5]), (3, [1, 2])]},
            "pages of group 0: page 0: must be in 1..10",
        ),
        (
            {"pages": [(0, [1, 2, 11, 4, 5]), (3, [1, 2])]},
            "pages of group 0: page 11: must be in 1..10",
        ),
        (
            {"pages": [(0, [1, 2, 3, 4, 5]), (3, [4, 2])]},
            "pages of group 1: page 4: must be in 1..3",
        ),
        (
            {"pages": [(0, [1, 2, 3, 2, 5]), (3, [1, 2])]},
            "pages of group 0: page 2 is named twice",
        ),
        (
            {"pages": [(0, [1, 2, 3, 4, -5]), (3, [1, 2])]},
            "pages of group 0: page -5: must be in 1..10",
        ),
    ],
)
def test_a_wrong_reservation_is_refused_with_the_reason(
    fields: dict[str, object], complaint: str
) -> None:
    assert complaint_about(**fields) == complaint


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        # The list that the prefill server has for the same window, whose pages are half as large.
        ({"window": (34, [1, 2, 3, 4])}, "4 from index 34; 300 tokens need 2 from index 17"),
        ({"window": (17, [1, 2, 3])}, "3 from index 17; 300 tokens need 2 from index 17"),
        ({"window": (17, [1])}, "1 from index 17; 300 tokens need 2 from index 17"),
        ({"window": (16, [1, 2])}, "2 from index 16; 300 tokens need 2 from index 17"),
        ({"window": (0, list(range(1, 20)))}, "19 from index 0; 300 tokens need 2 from index 17"),
        ({"window": (17, [])}, "0 from index 17; 300 tokens need 2 from index 17"),
        # Fewer tokens, as many full pages, and a window that begins in the page before.
        ({"token_count": 293}, "2 from index 17; 293 tokens need 3 from index 16"),
    ],
)
def test_a_forged_window_is_refused(fields: dict[str, object], complaint: str) -> None:
    def layout(page_size: int) -> ServerLayout:
        components = windowed_gqa_components(
            windows=(24, 0), kv_head_count=2, head_dim=8, dtype="bfloat16"
        )
        return ServerLayout(components, 1, ((0, 2),), page_size)

    source, target = layout(8), layout(16)
    honest = msgspec.structs.replace(reserve(source, target, 300), room=5, token_ids=[])
    assert check_transfer_request(source, target, [100, 100], honest) is None
    full, window = honest.pages
    forged = msgspec.structs.replace(
        honest,
        token_count=fields.get("token_count", 300),
        pages=[full, fields.get("window", window)],
    )
    found = check_transfer_request(source, target, [100, 100], forged)
    assert found == f"pages of group 1: {complaint}"


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases(), st.data())
def test_a_reservation_that_passes_can_be_planned_for(case: Case, data: st.DataObject) -> None:
    """Honest, or with one page list changed: either refused, or no plan raises."""
    token_count = case.pieces[-1].stop
    request = reserve(case.source, case.target, token_count)
    page_counts = [max(1, len(ids)) for _, ids in request.pages]
    assert check_transfer_request(case.source, case.target, page_counts, request) is None

    group = data.draw(st.integers(0, len(request.pages) - 1))
    changed = data.draw(
        st.tuples(st.integers(-1, 4), st.lists(st.integers(-1, 8), max_size=8, unique=True))
    )
    pages = [*request.pages[:group], changed, *request.pages[group + 1 :]]
    mutated = msgspec.structs.replace(request, pages=pages)
    if check_transfer_request(case.source, case.target, page_counts, mutated) is None:
        source_pages = [
            (needed.start, list(range(1, len(needed) + 1)))
            for g in case.source.groups
            for needed in [g.page_indices(g.live.items(token_count))]
        ]
        plan_copies(
            case.source.ranks[0],
            case.target.ranks[0],
            source_pages,
            mutated.pages,
            TokenRange(0, token_count, is_final=True),
        )
