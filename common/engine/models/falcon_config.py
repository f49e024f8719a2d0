"""Reads config.json of Falcon-H1: attention and a Mamba-2 mixer side by side in every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.engine.config.json_fields import JsonFields
from common.engine.config.model import ModelConfig
from common.engine.config.reading import CheckpointConfig, check_silu, read_decoder, read_heads
from common.engine.config.rope import extended_length, read_rope
from common.engine.layers.group_norm import GateStyle
from common.engine.models.mamba_config import (
    MambaConfig,
    MambaFamily,
    check_sizes,
    check_step_limit,
)

# Of the gate z, x, B, C and the step.
PROJECTED_PARTS = 5
MLP_PARTS = 2
DEFAULT_EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class FalconConfig(MambaFamily):
    """Factors that the model was trained with, on what their names say.

    mamba_parts: on z, x, B, C and dt as projected.
    """

    embedding: float
    logits: float
    key: float
    attention_in: float
    attention_out: float
    mamba_in: float
    mamba_out: float
    mamba_parts: tuple[float, ...]
    mlp_gate: float
    mlp_down: float


def read_falcon(source: CheckpointConfig) -> ModelConfig:
    """Raises: ConfigError naming the value that is missing, impossible or not implemented."""
    fields = source.fields
    _check_supported(fields)
    max_position = fields.integer("max_position_embeddings")
    rope = read_rope(fields, max_position=max_position)
    base = read_decoder(
        source,
        heads=read_heads(fields, is_kv_count_required=False),
        rope=rope,
        context_length=extended_length(rope, max_position),
    )
    has_attention_bias = fields.flag("attention_bias", False)
    layers = tuple(range(base.layer_count))
    mlp_gate, mlp_down = _read_factors(fields, "mlp_multipliers", MLP_PARTS)
    return replace(
        base,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=fields.flag("mlp_bias", False),
        rms_norm_eps=fields.number("rms_norm_eps", DEFAULT_EPSILON),
        windows=(0,) * base.layer_count,
        family=FalconConfig(
            mamba=_read_mamba(fields, base),
            mamba_layers=layers,
            attention_layers=layers,
            is_rotated=True,
            embedding=fields.number("embedding_multiplier", 1.0),
            logits=fields.number("lm_head_multiplier", 1.0),
            key=fields.number("key_multiplier", 1.0),
            attention_in=fields.number("attention_in_multiplier", 1.0),
            attention_out=fields.number("attention_out_multiplier", 1.0),
            mamba_in=fields.number("ssm_in_multiplier", 1.0),
            mamba_out=fields.number("ssm_out_multiplier", 1.0),
            mamba_parts=_read_factors(fields, "ssm_multipliers", PROJECTED_PARTS),
            mlp_gate=mlp_gate,
            mlp_down=mlp_down,
        ),
    )


def _check_supported(fields: JsonFields) -> None:
    check_silu(fields)
    check_step_limit(fields)
    if fields.has("attn_layer_indices"):
        raise fields.error("attn_layer_indices", "null: every layer has attention")
    if not fields.flag("mamba_use_mlp", True):
        raise fields.error("mamba_use_mlp", "true: every layer has an MLP")
    if fields.has("sliding_window"):
        raise fields.error("sliding_window", "null: windows are not supported here")


def _read_mamba(fields: JsonFields, base: ModelConfig) -> MambaConfig:
    check_sizes(
        fields, heads_key="mamba_n_heads", groups_key="mamba_n_groups", kernel_key="mamba_d_conv"
    )
    head_count = fields.integer("mamba_n_heads")
    inner_size = _read_inner_size(fields, base.hidden_size)
    is_chosen = fields.has("mamba_d_head") and fields.values["mamba_d_head"] != "auto"
    head_dim = fields.integer("mamba_d_head") if is_chosen else inner_size // head_count
    if head_count * head_dim != inner_size:
        raise fields.error("mamba_d_head", f"{inner_size} / mamba_n_heads = {head_count}")
    gate = GateStyle.NO_NORM
    if fields.flag("mamba_rms_norm", False):
        is_norm_first = fields.flag("mamba_norm_before_gate", True)
        gate = GateStyle.BEHIND_NORM if is_norm_first else GateStyle.BEFORE_NORM
    return MambaConfig(
        head_count=head_count,
        head_dim=head_dim,
        group_count=fields.integer("mamba_n_groups"),
        state_dim=fields.integer("mamba_d_state"),
        kernel_size=fields.integer("mamba_d_conv"),
        gate=gate,
        epsilon=fields.number("rms_norm_eps", DEFAULT_EPSILON),
        has_conv_bias=fields.flag("mamba_conv_bias", True),
        has_input_bias=fields.flag("mamba_proj_bias", False),
        has_output_bias=fields.flag("projectors_bias", False),
    )


def _read_inner_size(fields: JsonFields, hidden_size: int) -> int:
    """null means that the hidden size is expanded; an absent key is none of that."""
    if "mamba_d_ssm" in fields.values and not fields.has("mamba_d_ssm"):
        return fields.integer("mamba_expand", 2) * hidden_size
    return fields.integer("mamba_d_ssm")


def _read_factors(fields: JsonFields, name: str, count: int) -> tuple[float, ...]:
    """A list of numbers above 0; all 1 if absent."""
    factors = fields.values.get(name)
    if factors is None:
        return (1.0,) * count
    allowed = f"a list of {count} numbers above 0"
    if not isinstance(factors, list) or len(factors) != count:
        raise fields.error(name, allowed)
    for factor in factors:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
            raise fields.error(name, allowed)
    return tuple(float(factor) for factor in factors)
