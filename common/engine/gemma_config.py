"""What config.json says of the parts that Gemma 2 and 3 have and others have not.

Checked and in one spelling, as `model_config.py`, which calls it. Knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.json_fields import JsonFields
from common.engine.rope_config import RopeConfig, read_rope

ACTIVATION = "gelu_pytorch_tanh"
GLOBAL_THETA = 1_000_000.0
LOCAL_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class GemmaConfig:
    """score_scale: on attention scores. score_softcap, logit_softcap: scores and logits become
    c * tanh(x / c); 0 for none.

    local_rope: rotation of `local_layers`, global layer ids; None if all layers share one.
    """

    score_scale: float
    score_softcap: float
    logit_softcap: float
    local_rope: RopeConfig | None
    local_layers: tuple[int, ...]


def read_gemma(
    fields: JsonFields,
    *,
    softcap_defaults: tuple[float, float],
    local_layers: tuple[int, ...],
    max_position: int,
) -> GemmaConfig:
    """softcap_defaults: of scores and logits. local_layers: with a rotation of their own.

    Raises: ConfigError naming the value that is impossible or not implemented.
    """
    if fields.text("hidden_activation", ACTIVATION) != ACTIVATION:
        raise fields.error("hidden_activation", f'"{ACTIVATION}"')
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "false: only decoders are served")
    return GemmaConfig(
        score_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        score_softcap=_read_softcap(fields, "attn_logit_softcapping", softcap_defaults[0]),
        logit_softcap=_read_softcap(fields, "final_logit_softcapping", softcap_defaults[1]),
        local_rope=_read_local_rope(fields, max_position) if local_layers else None,
        local_layers=local_layers,
    )


def read_global_rope(fields: JsonFields, *, max_position: int) -> RopeConfig:
    """The rotation of the layers that see everything, where window layers have their own."""
    nested = fields.object("rope_parameters")
    if nested is not None:
        return _read_nested(fields, nested, "full_attention", max_position)
    values = {
        "rope_theta": fields.values.get("rope_theta") or GLOBAL_THETA,
        "rope_scaling": fields.values.get("rope_scaling"),
    }
    return read_rope(JsonFields(values, fields.where), max_position=max_position)


def _read_local_rope(fields: JsonFields, max_position: int) -> RopeConfig:
    nested = fields.object("rope_parameters")
    if nested is not None:
        return _read_nested(fields, nested, "sliding_attention", max_position)
    theta = fields.number("rope_local_base_freq", LOCAL_THETA, above=1.0)
    return read_rope(JsonFields({"rope_theta": theta}, fields.where), max_position=max_position)


def _read_nested(
    fields: JsonFields, nested: JsonFields, kind: str, max_position: int
) -> RopeConfig:
    chosen = nested.object(kind)
    if chosen is None:
        raise fields.error("rope_parameters", f"parameters by layer type, {kind} among them")
    return read_rope(
        JsonFields({"rope_parameters": chosen.values}, nested.where), max_position=max_position
    )


def _read_softcap(fields: JsonFields, name: str, default: float) -> float:
    """null means none, an absent key the default of the published code."""
    if name not in fields.values:
        return default
    return fields.number(name) if fields.has(name) else 0.0
