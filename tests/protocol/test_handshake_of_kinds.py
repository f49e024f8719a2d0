"""Slots, tails and blocks in the handshake: whatever differs is refused, with both values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.config import TransferMode
from common.layout.cache_layout import ServerLayout
from common.layout.component import DTYPE_NBYTES, CacheComponent, Live, LiveKind, Segment, Shard
from common.layout.families import compressed_components, gated_delta_components, gqa_components
from common.protocol.handshake import compare_layouts

GQA = gqa_components(layer_count=4, kv_head_count=2, head_dim=8, dtype="bfloat16")
SLOTS = (
    *(replace(component, layers=(3,)) for component in GQA),
    *gated_delta_components(
        layers=(0, 1, 2),
        key_heads=(2, 8),
        value_heads=(4, 8),
        kernel_size=4,
        conv_dtype="bfloat16",
        state_dtype="float32",
    ),
)
BLOCKS = compressed_components(
    layer_count=4,
    window=12,
    head_dim=32,
    index_dim=16,
    sparse_layers=(1, 2),
    sparse_ratio=4,
    heavy_layers=(3,),
    heavy_ratio=16,
    dtype="bfloat16",
)
# Every component that lives in a slot, a tail or blocks, and whose other ones it stands beside.
KINDS = {
    name: components
    for components in (SLOTS, BLOCKS)
    for name in (component.name for component in components)
    if name not in ("k", "v", "window")
}
EACH = pytest.mark.parametrize("name", KINDS)


def layout_of(components: tuple[CacheComponent, ...]) -> ServerLayout:
    layout = ServerLayout(components, 2, ((0, 4),), 16)
    layout.check()
    return layout


def component_of(name: str) -> CacheComponent:
    (component,) = (component for component in KINDS[name] if component.name == name)
    return component


def without(name: str) -> ServerLayout:
    return layout_of(tuple(c for c in KINDS[name] if c.name != name))


def changed(name: str, **fields: object) -> ServerLayout:
    components = (
        replace(c, **fields) if c.name == name else c  # type: ignore[arg-type]
        for c in KINDS[name]
    )
    return layout_of(tuple(components))


def refusals(ours: ServerLayout, theirs: ServerLayout) -> list[str]:
    """What every kind of transfer refuses for, one and the same; both sides must see it."""
    found = [compare_layouts(ours, theirs, transfer_mode) for transfer_mode in TransferMode]
    assert found[0] == found[1] == found[2]
    assert all(compare_layouts(theirs, ours, transfer_mode) for transfer_mode in TransferMode)
    return found[0]


def test_every_kind_that_is_not_cached_by_tokens_is_here() -> None:
    kinds = {component_of(name).live.kind for name in KINDS}
    assert kinds == {LiveKind.SLOT, LiveKind.TAIL, LiveKind.BLOCK}
    assert len(KINDS) == 8


@pytest.mark.parametrize("components", [SLOTS, BLOCKS])
def test_equal_components_are_accepted_whatever_they_are_cut_into(
    components: tuple[CacheComponent, ...],
) -> None:
    ours, theirs = layout_of(components), ServerLayout(components, 1, ((0, 1), (1, 4)), 64)
    assert compare_layouts(ours, theirs) == compare_layouts(theirs, ours) == []


@EACH
def test_a_component_of_one_side_alone_is_refused(name: str) -> None:
    ours = layout_of(KINDS[name])
    assert refusals(ours, without(name)) == [f"component {name}: ours cached, theirs (none)"]
    assert refusals(without(name), ours) == [f"component {name}: ours (none), theirs cached"]


@EACH
def test_a_plane_more_of_a_component_is_refused(name: str) -> None:
    """Scales beside quantised rows, say: another segment of the same component."""
    component = component_of(name)
    more = (*component.segments, Segment("scale", 1, 4))
    (difference,) = refusals(layout_of(KINDS[name]), changed(name, segments=more))
    ours, theirs = difference.removeprefix(f"component {name} segments: ours ").split(", theirs ")
    assert theirs == f"{ours}, scale of 1 x 4 bytes"


@EACH
def test_another_order_of_the_same_bytes_is_refused(name: str) -> None:
    order = component_of(name).order
    assert refusals(layout_of(KINDS[name]), changed(name, order="other")) == [
        f"component {name} order: ours {order}, theirs other"
    ]
    assert refusals(changed(name, order=""), layout_of(KINDS[name])) == [
        f"component {name} order: ours (none), theirs {order}"
    ]


@EACH
def test_another_way_to_cut_it_is_refused(name: str) -> None:
    shard = component_of(name).shard
    other = Shard.SPLIT if shard is Shard.REPLICATE else Shard.REPLICATE
    assert refusals(layout_of(KINDS[name]), changed(name, shard=other)) == [
        f"component {name} shard: ours {shard}, theirs {other}"
    ]


@EACH
def test_layers_that_only_one_side_caches_are_refused(name: str) -> None:
    layers = component_of(name).layers
    fewer = tuple(layer for layer in range(4) if layer not in layers)
    assert refusals(layout_of(KINDS[name]), changed(name, layers=fewer)) == [
        f"component {name} layers: ours {layers}, theirs {fewer}"
    ]


@EACH
def test_another_live_rule_is_refused(name: str) -> None:
    live = component_of(name).live
    other = Live(LiveKind.TAIL, max(1, live.size), live.back + 1)
    assert refusals(layout_of(KINDS[name]), changed(name, live=other)) == [
        f"component {name} live rule: ours {live.kind} (size {live.size}, back {live.back}), "
        f"theirs tail (size {other.size}, back {other.back})"
    ]


@EACH
def test_elements_without_a_conversion_are_refused(name: str) -> None:
    """Of the same size, so that nothing but their type tells them apart."""
    ours, theirs = changed(name, dtype="bfloat16"), changed(name, dtype="float16")
    assert refusals(ours, theirs) == [
        f"component {name} dtype: ours bfloat16, theirs float16 "
        "(bfloat16 and float16 can't be converted into each other)"
    ]


@EACH
def test_elements_with_a_conversion_are_refused_only_where_nothing_is_staged(name: str) -> None:
    wide, narrow = (layout_of(stored_as(name, dtype)) for dtype in ("float32", "bfloat16"))
    for transfer_mode in (TransferMode.AUTO, TransferMode.STAGED):
        assert compare_layouts(wide, narrow, transfer_mode) == []
    assert compare_layouts(wide, narrow, TransferMode.DIRECT) == [
        f"component {name} dtype: ours float32, theirs bfloat16 "
        "(a direct transfer does not convert)"
    ]


@EACH
def test_as_many_bytes_of_other_elements_are_refused_even_where_they_could_be_converted(
    name: str,
) -> None:
    wide = layout_of(stored_as(name, "float32"))
    as_long = tuple(replace(c, dtype="bfloat16") if c.name == name else c for c in wide.components)
    (difference,) = refusals(wide, layout_of(as_long))
    assert difference.startswith(f"component {name} dtype: ours float32, theirs bfloat16 ")
    assert difference.endswith("(its units hold different numbers of elements)")


def stored_as(name: str, dtype: str) -> tuple[CacheComponent, ...]:
    """As many elements of another type."""

    def convert(component: CacheComponent) -> CacheComponent:
        segments = tuple(
            replace(
                segment,
                unit_nbytes=segment.unit_nbytes // component.element_nbytes * DTYPE_NBYTES[dtype],
            )
            for segment in component.segments
        )
        return replace(component, dtype=dtype, segments=segments)

    return tuple(convert(c) if c.name == name else c for c in KINDS[name])
