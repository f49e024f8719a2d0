"""Which rotary position embedding a checkpoint asks for. Knows nothing of tensors.

Two spellings exist: `rope_theta` beside `rope_scaling` (as published), and one `rope_parameters`
(as transformers 5 writes it). Both are read alike. Variants whose frequencies depend on the length
seen so far ("dynamic", "longrope") are refused: keys that are already cached could not follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from common.engine.config.json_fields import JsonFields

DEFAULT_THETA = 10_000.0


class RopeKind(StrEnum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    PROPORTIONAL = "proportional"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of the rotation; the ones that a kind does not use keep their defaults.

    original_length: tokens the model was trained on before its context was extended.
    attention_factor, mscale, mscale_all_dim: of yarn, None where the checkpoint says nothing.
    is_interleaved: pairs are (2i, 2i + 1), not (i, i + half).
    turned_share: of proportional, the share of the frequencies that turn, fast ones first; the
        others are zero.
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncates: bool = True
    is_interleaved: bool = False
    turned_share: float = 1.0


def read_rope(config: JsonFields, *, max_position: int) -> RopeConfig:
    """The rotation of a config.json in either spelling.

    Raises: ConfigError for a kind that is not supported, or a missing or impossible parameter.
    """
    fields = config.object("rope_scaling") or config.object("rope_parameters")
    fields = fields or JsonFields({}, config.where)
    if any(isinstance(value, dict) for value in fields.values.values()):
        raise config.error("rope_parameters", "one set of parameters for all layers")
    default_theta = config.number("rope_theta", DEFAULT_THETA, above=1.0)
    theta = fields.number("rope_theta", default_theta, above=1.0)
    kind_key = "rope_type" if fields.has("rope_type") else "type"
    kind_text = fields.text(kind_key, "default")
    if kind_text not in list(RopeKind):
        raise fields.error(kind_key, f"one of {', '.join(RopeKind)}")
    kind = RopeKind(kind_text)
    if kind is RopeKind.PROPORTIONAL:
        return _read_proportional(fields, theta)
    for source in (config, fields):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise source.error("partial_rotary_factor", "1 for this architecture")
    if kind is RopeKind.DEFAULT:
        return RopeConfig(kind, theta)
    if kind is RopeKind.LINEAR:
        return RopeConfig(kind, theta, factor=fields.number("factor"))
    original_length = config.integer(
        "original_max_position_embeddings",
        fields.integer("original_max_position_embeddings", max_position),
    )
    if kind is RopeKind.LLAMA3:
        low = fields.number("low_freq_factor")
        high = fields.number("high_freq_factor")
        if high <= low:
            raise fields.error("high_freq_factor", f"above low_freq_factor = {low:g}")
        return RopeConfig(
            kind,
            theta,
            factor=fields.number("factor"),
            original_length=original_length,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return _read_yarn(fields, theta, original_length, max_position)


def read_partial_rope(
    config: JsonFields, *, max_position: int, share_default: float
) -> tuple[RopeConfig, float]:
    """As `read_rope`, and the share of a head that is rotated, first channels first.

    share_default: of the published code, where config.json says nothing.
    """
    key = "partial_rotary_factor"
    values, source = dict(config.values), config
    share = config.number(key, share_default)
    values.pop(key, None)
    for name in ("rope_parameters", "rope_scaling"):
        nested = config.object(name)
        if nested is not None:
            if nested.has(key):
                share, source = nested.number(key), nested
            values[name] = {k: v for k, v in nested.values.items() if k != key}
    if share > 1.0:
        raise source.error(key, "at most 1")
    return read_rope(JsonFields(values, config.where), max_position=max_position), share


def _read_yarn(
    fields: JsonFields, theta: float, original_length: int, max_position: int
) -> RopeConfig:
    """beta_fast, beta_slow and the scales may be 0 or null, which both mean their default."""
    return RopeConfig(
        RopeKind.YARN,
        theta,
        factor=fields.number("factor", max_position / original_length),
        original_length=original_length,
        beta_fast=fields.number("beta_fast", 32.0, above=-1.0) or 32.0,
        beta_slow=fields.number("beta_slow", 1.0, above=-1.0) or 1.0,
        attention_factor=_optional(fields, "attention_factor"),
        mscale=_optional(fields, "mscale"),
        mscale_all_dim=_optional(fields, "mscale_all_dim"),
        truncates=fields.flag("truncate", True),
    )


def _read_proportional(fields: JsonFields, theta: float) -> RopeConfig:
    share = fields.number("partial_rotary_factor", 1.0)
    if share > 1.0:
        raise fields.error("partial_rotary_factor", "at most 1")
    factor = fields.number("factor", 1.0)
    return RopeConfig(RopeKind.PROPORTIONAL, theta, factor=factor, turned_share=share)


def _optional(fields: JsonFields, name: str) -> float | None:
    return fields.number(name, above=-1.0) if fields.has(name) else None


def extended_length(rope: RopeConfig, max_position: int) -> int:
    """Tokens that the model can look back on, given `max_position_embeddings`.

    Linear checkpoints keep the length from before the extension in that key; yarn ones keep either,
    so the larger reading wins; llama3 ones already hold the extended length.
    """
    match rope.kind:
        case RopeKind.LINEAR:
            return max(max_position, int(max_position * rope.factor))
        case RopeKind.YARN:
            return max(max_position, int(rope.original_length * rope.factor))
        case _:
            return max_position
