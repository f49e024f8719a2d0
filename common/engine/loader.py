"""From a checkpoint directory to a model that runs. Knows nothing of pools, steps or requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from common.engine.attention.attention import KEY, Attention
from common.engine.attention.choose import AttentionChoice, choose_attention
from common.engine.attention.kinds import AttentionKind, LatentKind
from common.engine.attention.sparse import INDEX_KEY
from common.engine.attention.trial import AttentionShape
from common.engine.cache.kv_pool import DTYPES
from common.engine.checkpoint.weights import fill_with_noise, load_weights
from common.engine.config.draft import DraftConfig
from common.engine.config.model import ModelConfig, check_parallel
from common.engine.distributed import ParallelContext
from common.engine.draft_loader import (
    add_draft,
    fill_eagle3,
    has_own_head,
    nextn_renaming,
)
from common.engine.layers.choose_fused import FusedShape, choose_fused
from common.engine.layers.fused import ROTATED_HEAD_DIMS, RotationShape
from common.engine.layers.fused_experts import (
    ExpertCounts,
    GroupedRouter,
    Router,
    SoftmaxRouter,
)
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.narrow import NarrowWeights
from common.engine.layers.rotary import score_scale
from common.engine.models.causal_lm import CausalLm
from common.engine.models.registry import FAMILIES, cache_components, read_model_config
from common.errors import ConfigError
from common.layout.component import Shard
from common.layout.parallel import units_of_rank

LOAD_FORMATS = ("auto", "dummy")


def read_served_config(model_path: str | Path, *, dtype: str = "auto") -> ModelConfig:
    """The checkpoint's config with `dtype` resolved: what the server will compute in.

    Raises: ConfigError as `read_model_config`, and for an unknown dtype.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype}: must be auto or one of {', '.join(DTYPES)}")
    config = read_model_config(Path(model_path))
    return config if dtype == "auto" else replace(config, dtype=dtype)


def load_model(
    model_path: str | Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    parallel: ParallelContext | None = None,
    load_format: str = "auto",
    seed: int = 0,
    page_size: int = 16,
    attention: Attention | None = None,
    packs: bool = False,
    narrow: NarrowWeights = NarrowWeights.WIDE,
    draft: DraftConfig | None = None,
    draft_path: str = "",
) -> CausalLm:
    """Build this rank's part of a model and fill its tensors.

    dtype: "auto" for the checkpoint's own. load_format: "auto" reads safetensors; "dummy" draws
    weights from `seed` and needs only config.json. page_size: of the pool it will run over, in
    tokens. attention: chosen by device, and checked, if None. packs: whether weights are arranged
    for the library that multiplies, after which `weights()` can't be read any more; nor with
    other quantised weights than wide ones. narrow: which of them stay as they are stored.
    draft: layers behind the model's own, which its last stage has, that guess tokens.
    draft_path: of their checkpoint; "" if they are in the model's own.
    Raises: ConfigError naming what is wrong with the checkpoint or an argument.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format={load_format}: must be one of {', '.join(LOAD_FORMATS)}")
    config = read_served_config(model_path, dtype=dtype)
    parallel = parallel or ParallelContext()
    check_parallel(config, parallel.tp_size, parallel.pp_size)
    device = torch.device(device)
    fused = choose_fused(fused_shape(config, parallel, device)).kernels
    context = LayerContext(parallel, device, DTYPES[config.dtype], fused, narrow)
    if attention is None:
        choice = choose_attention(attention_shape(config, parallel, context.device, page_size))
    else:
        choice = AttentionChoice(attention, "asked for")
    family = FAMILIES[config.architecture]
    if draft is None:
        model = family.model(config, context, choice, family.build_layer)
    else:
        model = family.model(config, context, choice, family.build_layer, has_draft=True)
        has_head = load_format == "dummy" or (bool(draft_path) and has_own_head(draft_path))
        add_draft(model, draft, has_head=has_head)
    with torch.inference_mode():
        weights = list(model.weights())
        if model.draft is not None and not draft_path:
            weights += model.draft.weights()
        if load_format == "dummy":
            fill_with_noise(weights, seed=seed)
        else:
            load_weights(
                Path(model_path),
                weights,
                is_ignored=model.is_ignored,
                rename=nextn_renaming(draft if parallel.is_last_stage else None, family.rename),
                weight_format=config.weight_format,
            )
        if draft_path:
            fill_eagle3(model, draft_path, load_format=load_format, seed=seed)
        if packs:
            for matrix in context.matrices:
                matrix.pack()
    return model


def attention_shape(
    config: ModelConfig,
    parallel: ParallelContext,
    device: torch.device,
    page_size: int,
    cache_dtype: torch.dtype | None = None,
    draft: DraftConfig | None = None,
) -> AttentionShape:
    """Requirements on a rank's attention. cache_dtype: None for the model's own. draft: whose
    layers attend as well."""
    kinds = _attention_kinds(config, parallel)
    if draft is not None:
        kinds = tuple(dict.fromkeys((*kinds, *_attention_kinds(draft.model, parallel))))
    return AttentionShape(
        kinds=kinds,
        dtype=DTYPES[config.dtype],
        device=device,
        page_size=page_size,
        cache_dtype=cache_dtype,
        latent=_latent_kind(config, parallel),
        is_compressed=config.is_compressed,
    )


def fused_shape(config: ModelConfig, parallel: ParallelContext, device: torch.device) -> FusedShape:
    """Requirements on a rank's fused functions."""
    return FusedShape(
        size=config.hidden_size,
        inner_size=config.intermediate_size // parallel.tp_size,
        dtype=DTYPES[config.dtype],
        device=device,
        rope=config.rope,
        rotations=_rotations(config, device),
        has_qk_norm=config.has_qk_norm,
        expert_counts=_expert_counts(config),
        router=_router(config),
    )


def _expert_counts(config: ModelConfig) -> ExpertCounts | None:
    moe = config.moe
    return None if moe is None else ExpertCounts(moe.expert_count, moe.experts_per_token)


def _router(config: ModelConfig) -> Router | None:
    """That kernels may know: a softmax, or groups of sigmoids whose shares are normalised."""
    moe = config.moe
    if moe is None:
        return None
    counts = (moe.expert_count, moe.experts_per_token, moe.is_normalized)
    if moe.router is None:
        return SoftmaxRouter(*counts)
    is_known = moe.router.is_sigmoid and moe.is_normalized
    return GroupedRouter(*counts, moe.router) if is_known else None


def _rotations(config: ModelConfig, device: torch.device) -> tuple[RotationShape, ...]:
    """Heads that are turned by the model's own rotation: whole ones, or their rotated part."""
    dim = config.head_dim if config.mla is None else config.rotary_dim
    if not dim or (device.type == "cuda" and dim not in ROTATED_HEAD_DIMS):
        return ()
    return (RotationShape(dim, config.rotary_dim, config.rope.is_interleaved),)


def _attention_kinds(config: ModelConfig, parallel: ParallelContext) -> tuple[AttentionKind, ...]:
    """Of the model's layers over keys and values, each once."""
    kinds: list[AttentionKind] = []
    for component in cache_components(config, config.dtype):
        if component.name != KEY:
            continue
        (heads,) = component.segments
        owned = units_of_rank(heads.unit_count, Shard.SPLIT, parallel.tp_size, parallel.tp_rank)
        kinds.append(
            AttentionKind(
                head_count=config.head_count // parallel.tp_size,
                kv_head_count=len(owned),
                head_dim=heads.unit_nbytes // component.element_nbytes,
                window=component.live.size,
                scale=config.scores.scale,
                softcap=config.scores.softcap,
                has_sinks=config.scores.has_sinks,
            )
        )
    return tuple(kinds)


def _latent_kind(config: ModelConfig, parallel: ParallelContext) -> LatentKind | None:
    mla = config.mla
    if mla is None:
        return None
    return LatentKind(
        head_count=config.head_count // parallel.tp_size,
        latent_dim=mla.latent_dim,
        rope_dim=mla.rope_dim,
        nope_dim=mla.nope_dim,
        value_dim=mla.value_dim,
        scale=score_scale(config.rope, mla.query_dim),
        has_selection=any(c.name == INDEX_KEY for c in cache_components(config, config.dtype)),
    )
