"""Reads config.json of DeepSeek V2, V3 and R1, and Kimi K2."""

from __future__ import annotations

from dataclasses import replace

from common.engine.config.json_fields import JsonFields
from common.engine.config.mla import read_mla, read_router
from common.engine.config.model import ModelConfig, MoeConfig
from common.engine.config.reading import (
    CheckpointConfig,
    Heads,
    check_silu,
    read_decoder,
    read_experts_per_token,
    read_extra_layers,
)
from common.engine.config.rope import extended_length, read_rope

HAS_SIGMOID_ROUTER = {
    "DeepseekV2ForCausalLM": False,
    "DeepseekV3ForCausalLM": True,
    "DeepseekV32ForCausalLM": True,
    "GlmMoeDsaForCausalLM": True,
}
IS_SPARSE_MLP = {"dense": False, "sparse": True}


def read_deepseek(source: CheckpointConfig) -> ModelConfig:
    """Raises: ConfigError naming the value that is missing, impossible or not implemented."""
    fields = source.fields
    check_silu(fields)
    max_position = fields.integer("max_position_embeddings")
    rope = read_rope(fields, max_position=max_position)
    mla = read_mla(fields)
    base = read_decoder(
        source,
        heads=Heads(fields.integer("num_attention_heads"), 1, mla.query_dim),
        rope=replace(rope, is_interleaved=fields.flag("rope_interleave", True)),
        context_length=extended_length(rope, max_position),
    )
    has_bias = fields.flag("attention_bias", False)
    return replace(
        base,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        mla=mla,
        moe=read_grouped_experts(
            fields, base.layer_count, is_sigmoid=HAS_SIGMOID_ROUTER[source.architecture]
        ),
        extra_layer_count=read_extra_layers(fields),
        windows=(0,) * base.layer_count,
    )


def read_grouped_experts(fields: JsonFields, layer_count: int, *, is_sigmoid: bool) -> MoeConfig:
    """Experts on all layers but the first ones, and an MLP beside them that every token takes."""
    expert_count = fields.integer("n_routed_experts")
    experts_per_token = read_experts_per_token(fields, "n_routed_experts", expert_count)
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.error("moe_layer_freq", "1")
    if fields.flag("mlp_bias", False):
        raise fields.error("mlp_bias", "false for this architecture")
    is_normalized = fields.flag("norm_topk_prob", is_sigmoid)
    if is_normalized and not is_sigmoid:
        raise fields.error("norm_topk_prob", "false for this architecture")
    intermediate_size = fields.integer("moe_intermediate_size")
    plain_count = fields.integer("first_k_dense_replace", 0, minimum=0)
    return MoeConfig(
        expert_count=expert_count,
        experts_per_token=experts_per_token,
        intermediate_size=intermediate_size,
        is_normalized=is_normalized,
        layers=tuple(range(plain_count, layer_count)),
        router=read_router(fields, is_sigmoid=is_sigmoid, expert_count=expert_count),
        shared_size=fields.integer("n_shared_experts", 0, minimum=0) * intermediate_size,
    )


def read_mlp_types(fields: JsonFields, moe: MoeConfig, layer_count: int) -> MoeConfig:
    """`mlp_layer_types`, where it is there, says what `first_k_dense_replace` says otherwise."""
    kinds = fields.texts("mlp_layer_types")
    if not kinds:
        return moe
    if len(kinds) != layer_count or any(kind not in IS_SPARSE_MLP for kind in kinds):
        raise fields.error(
            "mlp_layer_types", f"one of {', '.join(IS_SPARSE_MLP)} for each of {layer_count} layers"
        )
    layers = tuple(layer for layer, kind in enumerate(kinds) if IS_SPARSE_MLP[kind])
    return replace(moe, layers=layers)
