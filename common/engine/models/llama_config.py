"""Reads config.json of Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE.

What the published code fixes and config.json does not say is declared here as data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from common.engine.config.json_fields import JsonFields
from common.engine.config.model import ModelConfig, MoeConfig
from common.engine.config.reading import (
    CheckpointConfig,
    check_silu,
    read_decoder,
    read_experts_per_token,
    read_heads,
)
from common.engine.config.rope import extended_length, read_rope
from common.engine.config.window import WindowStyle, read_windows, window_layers


class _Bias(StrEnum):
    """Which of q, k, v and o carry a bias."""

    NEVER = "never"
    QKV = "qkv"
    CONFIGURED = "configured"  # all four if `attention_bias`


@dataclass(frozen=True, slots=True)
class _Variant:
    """Settings that the published model code fixes. head_dim_default: 0 if there is none."""

    bias: _Bias
    window: WindowStyle
    has_qk_norm: bool = False
    has_mlp_bias_key: bool = False
    is_kv_head_count_required: bool = True
    head_dim_default: int = 0
    is_moe: bool = False


_VARIANTS = {
    "LlamaForCausalLM": _Variant(
        bias=_Bias.CONFIGURED,
        window=WindowStyle.NONE,
        has_mlp_bias_key=True,
        is_kv_head_count_required=False,
    ),
    "MistralForCausalLM": _Variant(bias=_Bias.NEVER, window=WindowStyle.ALL_LAYERS),
    "Qwen2ForCausalLM": _Variant(bias=_Bias.QKV, window=WindowStyle.UPPER_LAYERS),
    "Qwen3ForCausalLM": _Variant(
        bias=_Bias.CONFIGURED,
        window=WindowStyle.UPPER_LAYERS,
        has_qk_norm=True,
        head_dim_default=128,
    ),
    "Qwen3MoeForCausalLM": _Variant(
        bias=_Bias.CONFIGURED, window=WindowStyle.SWITCHED, has_qk_norm=True, is_moe=True
    ),
}


def read_llama(source: CheckpointConfig) -> ModelConfig:
    """Raises: ConfigError naming the value that is missing, impossible or not implemented."""
    fields, variant = source.fields, _VARIANTS[source.architecture]
    check_silu(fields)
    max_position = fields.integer("max_position_embeddings")
    rope = read_rope(fields, max_position=max_position)
    base = read_decoder(
        source,
        heads=read_heads(
            fields,
            is_kv_count_required=variant.is_kv_head_count_required,
            dim_default=variant.head_dim_default,
        ),
        rope=rope,
        context_length=extended_length(rope, max_position),
    )
    attention_bias = fields.flag("attention_bias", False)
    is_configured = variant.bias is _Bias.CONFIGURED and attention_bias
    if attention_bias and variant.bias is not _Bias.CONFIGURED:
        raise fields.error("attention_bias", f"false for {source.architecture}")
    layers = base.layer_count
    marked = window_layers(fields, variant.window, layers)
    return replace(
        base,
        has_qkv_bias=variant.bias is _Bias.QKV or is_configured,
        has_output_bias=is_configured,
        has_mlp_bias=variant.has_mlp_bias_key and fields.flag("mlp_bias", False),
        has_qk_norm=variant.has_qk_norm,
        moe=read_routed_experts(fields, layers) if variant.is_moe else None,
        windows=read_windows(fields, marked, layers, base.context_length),
    )


def read_routed_experts(fields: JsonFields, layer_count: int) -> MoeConfig:
    """Experts behind a plain softmax, on every `decoder_sparse_step`-th layer."""
    count_key = "num_experts" if fields.has("num_experts") else "num_local_experts"
    expert_count = fields.integer(count_key)
    step = fields.integer("decoder_sparse_step", 1)
    plain = set(fields.integers("mlp_only_layers"))
    return MoeConfig(
        expert_count=expert_count,
        experts_per_token=read_experts_per_token(fields, count_key, expert_count),
        intermediate_size=fields.integer("moe_intermediate_size"),
        is_normalized=fields.flag("norm_topk_prob", False),
        layers=tuple(
            layer for layer in range(layer_count) if layer not in plain and (layer + 1) % step == 0
        ),
    )
