"""Reads config.json of Gemma 2 and Gemma 3, its text part where there is more."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.engine.config.json_fields import JsonFields
from common.engine.config.model import FamilyConfig, ModelConfig, ScoreConfig
from common.engine.config.reading import CheckpointConfig, read_decoder, read_heads
from common.engine.config.rope import RopeConfig, extended_length, read_rope
from common.engine.config.window import WindowStyle, read_windows, window_layers

ACTIVATION = "gelu_pytorch_tanh"
GLOBAL_THETA = 1_000_000.0
LOCAL_THETA = 10_000.0
# Published composites leave these out of their text_config.
TEXT_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}


@dataclass(frozen=True, slots=True)
class GemmaConfig(FamilyConfig):
    """logit_softcap: logits become c * tanh(x / c); 0 for none.

    local_rope: rotation of `local_layers`, global layer ids; None if all layers share one.
    """

    logit_softcap: float
    local_rope: RopeConfig | None
    local_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Variant:
    """Settings that the published model code fixes.

    window_period: every n-th layer sees everything. softcaps: of scores and logits.
    """

    window_period: int
    softcaps: tuple[float, float]
    has_qk_norm: bool
    has_local_rope: bool


_THIRD = _Variant(window_period=6, softcaps=(0.0, 0.0), has_qk_norm=True, has_local_rope=True)
_VARIANTS = {
    "Gemma2ForCausalLM": _Variant(
        window_period=2, softcaps=(50.0, 30.0), has_qk_norm=False, has_local_rope=False
    ),
    "Gemma3ForCausalLM": _THIRD,
    "Gemma3ForConditionalGeneration": _THIRD,
}


def read_gemma(source: CheckpointConfig) -> ModelConfig:
    """Raises: ConfigError naming the value that is missing, impossible or not implemented."""
    source = source.text_part(TEXT_DEFAULTS)
    fields, variant = source.fields, _VARIANTS[source.architecture]
    if fields.text("hidden_activation", ACTIVATION) != ACTIVATION:
        raise fields.error("hidden_activation", f'"{ACTIVATION}"')
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "false: only decoders are served")
    max_position = fields.integer("max_position_embeddings")
    if variant.has_local_rope:
        # Its published lengths are those after the extension.
        rope = read_global_rope(fields, max_position=max_position)
        context_length = max_position
    else:
        rope = read_rope(fields, max_position=max_position)
        context_length = extended_length(rope, max_position)
    base = read_decoder(
        source,
        heads=read_heads(fields, dim_default=256),
        rope=rope,
        context_length=context_length,
        is_tied_default=True,
    )
    has_bias = fields.flag("attention_bias", False)
    marked = window_layers(
        fields, WindowStyle.PATTERN, base.layer_count, period_default=variant.window_period
    )
    return replace(
        base,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=variant.has_qk_norm,
        windows=read_windows(fields, marked, base.layer_count, context_length),
        scores=ScoreConfig(
            scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
            softcap=read_softcap(fields, "attn_logit_softcapping", variant.softcaps[0]),
        ),
        family=GemmaConfig(
            logit_softcap=read_softcap(fields, "final_logit_softcapping", variant.softcaps[1]),
            local_rope=_read_local_rope(fields, max_position)
            if variant.has_local_rope and marked
            else None,
            local_layers=marked if variant.has_local_rope else (),
        ),
    )


def read_global_rope(fields: JsonFields, *, max_position: int) -> RopeConfig:
    """The rotation of the layers that see everything, where window layers have their own."""
    nested = fields.object("rope_parameters")
    if nested is not None:
        return read_nested_rope(fields, nested, "full_attention", max_position)
    values = {
        "rope_theta": fields.values.get("rope_theta") or GLOBAL_THETA,
        "rope_scaling": fields.values.get("rope_scaling"),
    }
    return read_rope(JsonFields(values, fields.where), max_position=max_position)


def _read_local_rope(fields: JsonFields, max_position: int) -> RopeConfig:
    nested = fields.object("rope_parameters")
    if nested is not None:
        return read_nested_rope(fields, nested, "sliding_attention", max_position)
    theta = fields.number("rope_local_base_freq", LOCAL_THETA, above=1.0)
    return read_rope(JsonFields({"rope_theta": theta}, fields.where), max_position=max_position)


def read_nested_rope(
    fields: JsonFields, nested: JsonFields, kind: str, max_position: int
) -> RopeConfig:
    chosen = nested.object(kind)
    if chosen is None:
        raise fields.error("rope_parameters", f"parameters by layer type, {kind} among them")
    return read_rope(
        JsonFields({"rope_parameters": chosen.values}, nested.where), max_position=max_position
    )


def read_softcap(fields: JsonFields, name: str, default: float) -> float:
    """null means none, an absent key the default of the published code."""
    if name not in fields.values:
        return default
    return fields.number(name) if fields.has(name) else 0.0
