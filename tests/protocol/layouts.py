"""Small layouts to compare and to reserve pages in."""

from __future__ import annotations

import dataclasses

from common.layout.cache_layout import ServerLayout
from common.layout.component import CacheComponent, Live, Segment, Shard
from common.layout.families import gqa_components
from common.layout.parallel import split_layers


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
