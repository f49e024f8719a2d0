"""A family's entry in the registry: how its config is read, its model built and its cache declared.

Also cache declarations of attention that several families share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from common.engine.checkpoint.weights import same_name
from common.engine.config.draft import DraftConfig
from common.engine.config.model import ModelConfig
from common.engine.config.reading import CheckpointConfig
from common.engine.models.causal_lm import CausalLm, LayerBuilder
from common.engine.models.draft import NextnFamily
from common.layout.component import CacheComponent
from common.layout.families import (
    CachedHeads,
    gqa_components,
    hybrid_mla_components,
    mixed_gqa_components,
    mla_components,
    windowed_gqa_components,
)


@dataclass(frozen=True, slots=True)
class Family:
    """read: config.json to `ModelConfig`. build_layer: the model's layers.

    components: (config, cache dtype) to what it caches. model: what stands around the layers.
    rename: a checkpoint's tensor name to the one that layers ask for, None for a tensor that is
        not of the decoder. nextn: how its checkpoints predict more tokens at a time, if that is
        served.
    """

    read: Callable[[CheckpointConfig], ModelConfig]
    build_layer: LayerBuilder
    components: Callable[[ModelConfig, str], tuple[CacheComponent, ...]]
    model: type[CausalLm] = CausalLm
    rename: Callable[[str], str | None] = same_name
    nextn: NextnFamily | None = None


def draft_gqa_cache(draft: DraftConfig, dtype: str) -> tuple[CacheComponent, ...]:
    """Keys and values of a draft's layers."""
    config = draft.model
    heads = CachedHeads(0, config.kv_head_count, config.head_dim)
    shapes = [heads if layer in draft.layer_ids else None for layer in range(config.layer_count)]
    return mixed_gqa_components(shapes, dtype)


def gqa_cache(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
    """Keys and values of every layer, some of which may see a window only."""
    if config.has_windows:
        return windowed_gqa_components(
            windows=config.windows,
            kv_head_count=config.kv_head_count,
            head_dim=config.head_dim,
            dtype=dtype,
        )
    return gqa_components(
        layer_count=config.layer_count,
        kv_head_count=config.kv_head_count,
        head_dim=config.head_dim,
        dtype=dtype,
    )


def mla_cache(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
    """Latent rows of every layer."""
    assert config.mla is not None
    return mla_components(
        layer_count=config.layer_count,
        latent_dim=config.mla.latent_dim,
        rope_dim=config.mla.rope_dim,
        is_interleaved=config.rope.is_interleaved,
        dtype=dtype,
    )


def hybrid_mla_cache(
    config: ModelConfig, linear_layers: Collection[int], is_rotated: bool, dtype: str
) -> tuple[CacheComponent, ...]:
    """Latent rows of the layers that do not recur.

    is_rotated: whether the last part of a row is.
    """
    assert config.mla is not None
    return hybrid_mla_components(
        layers=tuple(layer for layer in range(config.layer_count) if layer not in linear_layers),
        latent_dim=config.mla.latent_dim,
        rope_dim=config.mla.rope_dim,
        is_rotated=is_rotated,
        dtype=dtype,
    )
