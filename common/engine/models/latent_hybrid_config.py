"""Reads of config.json what models share of which some layers recur and the others attend to
latent rows: names of several habits, latent attention, experts, and which layer is what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from common.engine.config.json_fields import JsonFields, JsonValue
from common.engine.config.mla import read_mla
from common.engine.config.model import ModelConfig
from common.engine.config.reading import (
    CheckpointConfig,
    Heads,
    check_silu,
    read_decoder,
    read_extra_layers,
)
from common.engine.config.rope import RopeConfig, extended_length, read_partial_rope
from common.engine.models.deepseek_config import read_grouped_experts, read_mlp_types

LINEAR, FULL = "linear_attention", "full_attention"
# By the name that the other readers know.
OTHER_NAMES: Mapping[str, Sequence[str]] = {
    "max_position_embeddings": ("model_max_length",),
    "n_routed_experts": ("num_experts", "num_local_experts"),
    "n_shared_experts": ("num_shared_experts",),
    "num_experts_per_tok": ("num_experts_per_token",),
    "n_group": ("num_expert_group",),
    "norm_topk_prob": ("moe_renormalize",),
    "scoring_func": ("moe_router_activation_func", "score_function"),
    "linear_silu": ("use_linear_silu",),
}


def respell(source: CheckpointConfig, defaults: Mapping[str, JsonValue]) -> CheckpointConfig:
    """The same config under the names that the other readers know.

    defaults: what the published code takes for keys that are left out.
    Raises: ConfigError if two names of one value contradict each other.
    """
    fields = source.fields
    values = dict(fields.values)
    for name, others in OTHER_NAMES.items():
        for other in others:
            if not fields.has(other):
                continue
            if values.get(name) is None:
                values[name] = fields.values[other]
            elif values[name] != fields.values[other]:
                raise fields.error(other, f"the same as {name} = {values[name]}")
    left_out = {key: value for key, value in defaults.items() if values.get(key) is None}
    return replace(source, fields=JsonFields(values | left_out, fields.where))


def read_latent_hybrid(source: CheckpointConfig, *, rope: RopeConfig, bias_key: str) -> ModelConfig:
    """All but the recurrence; of a config that was respelled.

    bias_key: whether the projections around latent attention have a bias.
    Raises: ConfigError naming the value that is missing, impossible or not implemented.
    """
    fields = source.fields
    check_silu(fields)
    max_position = fields.integer("max_position_embeddings")
    mla = read_mla(fields)
    base = read_decoder(
        source,
        heads=Heads(fields.integer("num_attention_heads"), 1, mla.query_dim),
        rope=rope,
        context_length=extended_length(rope, max_position),
    )
    moe = read_grouped_experts(fields, base.layer_count, is_sigmoid=True)
    has_bias = fields.flag(bias_key, False)
    return replace(
        base,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        mla=mla,
        moe=read_mlp_types(fields, moe, base.layer_count),
        extra_layer_count=read_extra_layers(fields),
        windows=(0,) * base.layer_count,
    )


def read_latent_rope(
    fields: JsonFields, *, head_dim: int, share_default: float = 1.0
) -> tuple[RopeConfig, int]:
    """The rotation of the latent layers, and how many channels of a recurring head it would turn.

    The checkpoint's share is of `head_dim`; the latent layers' own part is rotated as a whole.
    share_default: of the published code, where config.json says nothing.
    """
    if not fields.flag("rope_interleave", True):
        raise fields.error("rope_interleave", "true")
    rope, share = read_partial_rope(
        fields, max_position=fields.integer("max_position_embeddings"), share_default=share_default
    )
    return replace(rope, is_interleaved=True), int(head_dim * share)


def read_grouped_layers(fields: JsonFields, layer_count: int) -> tuple[int, ...]:
    """Global ids of the layers that recur: all but the last of each group, or what a list says."""
    if fields.has("layer_types"):
        return check_kinds(fields, "layer_types", fields.texts("layer_types"), layer_count)
    key = "layer_group_size"
    size = fields.integer(key)
    kinds = [FULL if (layer + 1) % size == 0 else LINEAR for layer in range(layer_count)]
    return check_kinds(fields, key, kinds, layer_count)


def check_kinds(
    fields: JsonFields, key: str, kinds: Sequence[str], layer_count: int
) -> tuple[int, ...]:
    """Global ids of the layers that recur. key: what says which they are.

    Raises: ConfigError unless every layer is of a kind, and there are both.
    """
    if len(kinds) != layer_count or set(kinds) - {LINEAR, FULL}:
        raise fields.error(key, f'"{LINEAR}" or "{FULL}" for each of {layer_count} layers')
    if len(set(kinds)) != 2:
        raise fields.error(key, f"such that {layer_count} layers are of both kinds")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
