"""Reads config.json of Qwen3-Next and Qwen3.5: most layers recur, every few attend.

A composite's language model is read as one alone. What the published code fixes and config.json
does not say is declared here as data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from common.engine.config.json_fields import JsonFields
from common.engine.config.model import FamilyConfig, ModelConfig, MoeConfig
from common.engine.config.reading import CheckpointConfig, check_silu, read_decoder, read_heads
from common.engine.config.rope import extended_length, read_partial_rope
from common.engine.models.llama_config import read_routed_experts

LINEAR, FULL = "linear_attention", "full_attention"
STATE_DTYPES = ("float32", "bfloat16", "float16")
# Of the published code, where config.json has no such key.
ROTATED_SHARE = 0.25
FULL_INTERVAL = 4
SHARED_SIZE_KEY = "shared_expert_intermediate_size"


@dataclass(frozen=True, slots=True)
class DeltaNetConfig(FamilyConfig):
    """linear_layers: global ids of the layers that recur; the others attend.

    key_head_count, value_head_count: of the recurrence; consecutive value heads share a key head.
    key_dim, value_dim: of one of them. kernel_size: tokens that the convolution sees, the newest
    included. is_fused: whether all projections of a key head lie side by side in the checkpoint.
    state_dtype: of the recurrence's state in the cache. shared_size: as `MoeConfig.shared_size`.
    """

    linear_layers: tuple[int, ...]
    key_head_count: int
    value_head_count: int
    key_dim: int
    value_dim: int
    kernel_size: int
    is_fused: bool
    state_dtype: str
    shared_size: int

    def cuts(self) -> Mapping[str, int]:
        cuts = {"linear_num_value_heads": self.value_head_count}
        if self.shared_size:
            cuts[SHARED_SIZE_KEY] = self.shared_size
        return cuts

    def shared_cuts(self) -> Mapping[str, int]:
        return {"linear_num_key_heads": self.key_head_count}


@dataclass(frozen=True, slots=True)
class _Variant:
    """Settings that the published model code fixes."""

    is_fused: bool
    has_dense_layers: bool
    has_experts: bool
    is_always_normalized: bool = False


_NEXT = _Variant(is_fused=True, has_dense_layers=True, has_experts=True)
_DENSE = _Variant(is_fused=False, has_dense_layers=True, has_experts=False)
_SPARSE = _Variant(
    is_fused=False, has_dense_layers=False, has_experts=True, is_always_normalized=True
)
_VARIANTS = {
    "Qwen3NextForCausalLM": _NEXT,
    "Qwen3_5ForCausalLM": _DENSE,
    "Qwen3_5ForConditionalGeneration": _DENSE,
    "Qwen3_5MoeForCausalLM": _SPARSE,
    "Qwen3_5MoeForConditionalGeneration": _SPARSE,
}


def read_qwen3_next(source: CheckpointConfig) -> ModelConfig:
    """Raises: ConfigError naming the value that is missing, impossible or not implemented."""
    source = source.text_part()
    fields, variant = source.fields, _VARIANTS[source.architecture]
    check_silu(fields)
    _check_fixed(fields)
    max_position = fields.integer("max_position_embeddings")
    heads = read_heads(fields, dim_default=256)
    rope, share = read_partial_rope(fields, max_position=max_position, share_default=ROTATED_SHARE)
    rotated_dim = int(heads.dim * share)
    if rotated_dim < 2 or rotated_dim % 2:
        raise fields.error(
            "partial_rotary_factor", f"such that an even part of {heads.dim} is rotated"
        )
    base = read_decoder(
        source,
        heads=heads,
        rope=rope,
        context_length=extended_length(rope, max_position),
        intermediate_key="intermediate_size"
        if variant.has_dense_layers
        else "moe_intermediate_size",
    )
    has_bias = fields.flag("attention_bias", False)
    moe = _read_experts(fields, base.layer_count, variant) if variant.has_experts else None
    return replace(
        base,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=True,
        rotated_dim=rotated_dim,
        moe=moe,
        family=_read_delta_net(
            fields,
            base.layer_count,
            is_fused=variant.is_fused,
            shared_size=0 if moe is None else moe.shared_size,
        ),
    )


def _check_fixed(fields: JsonFields) -> None:
    if not fields.flag("attn_output_gate", True):
        raise fields.error("attn_output_gate", "true")
    if fields.text("output_gate_type", "swish") not in ("swish", "silu"):
        raise fields.error("output_gate_type", '"swish"')


def _read_delta_net(
    fields: JsonFields, layer_count: int, *, is_fused: bool, shared_size: int
) -> DeltaNetConfig:
    key_head_count = fields.integer("linear_num_key_heads", 16)
    value_head_count = fields.integer("linear_num_value_heads", 32)
    if value_head_count % key_head_count:
        raise fields.error(
            "linear_num_value_heads", f"a multiple of linear_num_key_heads = {key_head_count}"
        )
    state_dtype = fields.text("mamba_ssm_dtype", "float32").removeprefix("torch.")
    if state_dtype not in STATE_DTYPES:
        raise fields.error("mamba_ssm_dtype", f"one of {', '.join(STATE_DTYPES)}")
    return DeltaNetConfig(
        linear_layers=read_linear_layers(fields, layer_count),
        key_head_count=key_head_count,
        value_head_count=value_head_count,
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        kernel_size=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        is_fused=is_fused,
        state_dtype=state_dtype,
        shared_size=shared_size,
    )


def read_linear_layers(fields: JsonFields, layer_count: int) -> tuple[int, ...]:
    """Global ids of the layers that `layer_types` marks, or of all but every n-th."""
    if fields.has("layer_types"):
        key, kinds = "layer_types", fields.texts("layer_types")
        if len(kinds) != layer_count:
            raise fields.error(key, f"one for each of {layer_count} layers")
        if set(kinds) - {LINEAR, FULL}:
            raise fields.error(key, f'"{LINEAR}" or "{FULL}" each')
    else:
        key = "full_attention_interval"
        interval = fields.integer(key, FULL_INTERVAL)
        kinds = tuple(LINEAR if (layer + 1) % interval else FULL for layer in range(layer_count))
    if len(set(kinds)) != 2:
        raise fields.error(key, f"such that {layer_count} layers are of both kinds")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)


def _read_experts(fields: JsonFields, layer_count: int, variant: _Variant) -> MoeConfig | None:
    if variant.has_dense_layers and fields.integer("num_experts", minimum=0) == 0:
        return None
    moe = read_routed_experts(fields, layer_count)
    if not variant.has_dense_layers and len(moe.layers) != layer_count:
        key = "mlp_only_layers" if fields.integers("mlp_only_layers") else "decoder_sparse_step"
        raise fields.error(key, "absent: all layers of this architecture have experts")
    is_normalized = fields.flag("norm_topk_prob", True)
    if variant.is_always_normalized and not is_normalized:
        raise fields.error("norm_topk_prob", "true for this architecture")
    return replace(moe, is_normalized=is_normalized, shared_size=fields.integer(SHARED_SIZE_KEY))
