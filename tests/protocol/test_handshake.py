"""Differences of versions, models, layouts and regions are all said."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from common.errors import ProtocolError
from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.layout.families import mla_components, windowed_gqa_components
from common.planner.copies import PairPlan
from common.protocol.descriptor import RankDescriptor
from common.protocol.handshake import (
    announced_page_counts,
    compare_fingerprints,
    compare_layouts,
    compare_versions,
    expected_writers,
    negotiate_version,
)
from tests.planner.cases import Case, cases
from tests.protocol.layouts import gqa, with_component

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
                "(a direct transfer does not convert)"
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
