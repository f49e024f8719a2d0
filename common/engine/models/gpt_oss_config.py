"""Reads config.json of gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.engine.config.json_fields import JsonFields
from common.engine.config.model import FamilyConfig, ModelConfig, MoeConfig, ScoreConfig
from common.engine.config.reading import (
    CheckpointConfig,
    check_silu,
    read_decoder,
    read_experts_per_token,
    read_heads,
)
from common.engine.config.rope import RopeConfig, extended_length, read_rope
from common.engine.config.weight_format import WeightMethod
from common.engine.config.window import WindowStyle, read_windows, window_layers

# Defaults of the published code.
HEAD_DIM = 64
WINDOW = 128
WINDOW_PERIOD = 2
THETA = 150_000.0
GATE_GAIN = 1.702
GATE_LIMIT = 7.0


@dataclass(frozen=True, slots=True)
class GptOssConfig(FamilyConfig):
    """The activation of an expert: gate and up are cut at `gate_limit`, then
    (up + 1) * gate * sigmoid(gate_gain * gate)."""

    gate_gain: float
    gate_limit: float


def read_gpt_oss(source: CheckpointConfig) -> ModelConfig:
    """Raises: ConfigError naming the value that is missing, impossible or not implemented."""
    fields = source.fields
    check_silu(fields)
    max_position = fields.integer("max_position_embeddings")
    rope = _read_rope(fields, max_position)
    base = read_decoder(
        source,
        heads=read_heads(fields, dim_default=HEAD_DIM),
        rope=rope,
        context_length=extended_length(rope, max_position),
        # Published without a dtype, for weights of 4 bits and 16.
        dtype_default="bfloat16",
        weight_methods=(WeightMethod.FLOAT4,),
    )
    layers = base.layer_count
    marked = window_layers(fields, WindowStyle.PATTERN, layers, period_default=WINDOW_PERIOD)
    has_bias = fields.flag("attention_bias", True)
    return replace(
        base,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        moe=_read_experts(fields, layers),
        windows=read_windows(fields, marked, layers, base.context_length, width_default=WINDOW),
        scores=ScoreConfig(has_sinks=True),
        family=GptOssConfig(
            gate_gain=fields.number("swiglu_alpha", GATE_GAIN),
            gate_limit=fields.number("swiglu_limit", GATE_LIMIT),
        ),
    )


def _read_experts(fields: JsonFields, layer_count: int) -> MoeConfig:
    count_key = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    expert_count = fields.integer(count_key)
    return MoeConfig(
        expert_count=expert_count,
        experts_per_token=read_experts_per_token(fields, count_key, expert_count),
        intermediate_size=fields.integer("intermediate_size"),
        is_normalized=True,
        layers=tuple(range(layer_count)),
    )


def _read_rope(fields: JsonFields, max_position: int) -> RopeConfig:
    """Without a scaling entry the published code takes its own, which is no default to guess."""
    if not fields.has("rope_scaling") and not fields.has("rope_parameters"):
        raise fields.error("rope_parameters", "an object with a rope_type, or rope_scaling instead")
    theta = fields.number("rope_theta", THETA, above=1.0)
    return read_rope(
        JsonFields({**fields.values, "rope_theta": theta}, fields.where),
        max_position=max_position,
    )
