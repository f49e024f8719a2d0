"""Reads config.json of Kimi-Linear and Ling 3.0: most layers recur by a delta rule that forgets
every key channel on its own, the others attend to latent rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from common.engine.config.json_fields import JsonFields, JsonValue
from common.engine.config.model import FamilyConfig, ModelConfig
from common.engine.config.reading import CheckpointConfig
from common.engine.config.rope import DEFAULT_THETA, RopeConfig, RopeKind
from common.engine.models.latent_hybrid_config import (
    FULL,
    LINEAR,
    check_kinds,
    read_grouped_layers,
    read_latent_hybrid,
    read_latent_rope,
    respell,
)

# Of the published code, where config.json has no such key.
KIMI_DEFAULTS: Mapping[str, JsonValue] = {
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
}
LING_DEFAULTS: Mapping[str, JsonValue] = {
    "rope_theta": 6e6,
    "first_k_dense_replace": 2,
    "n_shared_experts": 1,
    "q_lora_rank": None,
}


@dataclass(frozen=True, slots=True)
class KdaConfig(FamilyConfig):
    """linear_layers: global ids of the layers that recur; the others attend to latent rows.

    head_count: of the recurrence. head_dim: of its keys and of its values. kernel_size: tokens that
    the convolution sees, the newest included.
    gate_rank: width that decays and output gates are projected through, None if directly.
    decay_floor: below 0, what the log of a decay lies above; None for one without a bound.
    is_rotated: whether latent rows have a rotated part; it is there, unrotated, if not.
    has_head_gate: whether outputs of latent attention are multiplied by a gate of each head.
    """

    linear_layers: tuple[int, ...]
    head_count: int
    head_dim: int
    kernel_size: int
    gate_rank: int | None
    decay_floor: float | None
    is_rotated: bool
    has_head_gate: bool

    def cuts(self) -> Mapping[str, int]:
        return {"linear attention heads": self.head_count}


def kda_config(config: ModelConfig) -> KdaConfig:
    """Settings that only these layers have."""
    assert isinstance(config.family, KdaConfig), config.architecture
    return config.family


def read_kimi_linear(source: CheckpointConfig) -> ModelConfig:
    """Raises: ConfigError naming the value that is missing, impossible or not implemented."""
    source = respell(source, KIMI_DEFAULTS)
    fields = source.fields
    if not fields.flag("mla_use_nope", True):
        raise fields.error("mla_use_nope", "true")
    if not fields.flag("use_grouped_topk", True) and fields.integer("n_group") != 1:
        raise fields.error("use_grouped_topk", "true with more than one group")
    # No rotation, in spite of config.json.
    base = read_latent_hybrid(
        source, rope=RopeConfig(RopeKind.DEFAULT, DEFAULT_THETA), bias_key="attention_bias"
    )
    head_dim = _linear_size(fields, "head_dim", "linear_head_dim")
    return replace(
        base,
        family=KdaConfig(
            linear_layers=_read_linear_layers(fields, base.layer_count),
            head_count=_linear_size(fields, "num_heads", "linear_num_heads"),
            head_dim=head_dim,
            kernel_size=_linear_size(
                fields, "short_conv_kernel_size", "linear_conv_kernel_dim", minimum=2
            ),
            gate_rank=head_dim,
            decay_floor=None,
            is_rotated=False,
            has_head_gate=False,
        ),
    )


def read_ling_3(source: CheckpointConfig) -> ModelConfig:
    """Raises: ConfigError naming the value that is missing, impossible or not implemented."""
    source = respell(source, LING_DEFAULTS)
    fields = source.fields
    # transformers keeps the rotated part's size under the published name of the heads' size.
    dim_key = "linear_head_dim" if fields.has("linear_head_dim") else "head_dim"
    head_dim = fields.integer(dim_key)
    rope, rotated_dim = read_latent_rope(fields, head_dim=head_dim)
    base = read_latent_hybrid(source, rope=rope, bias_key="attention_bias")
    assert base.mla is not None
    if base.mla.query_rank is not None:
        raise fields.error("q_lora_rank", "absent for this architecture")
    if rotated_dim not in (head_dim, base.mla.rope_dim):
        raise fields.error(
            "partial_rotary_factor", f"such that qk_rope_head_dim = {base.mla.rope_dim} is rotated"
        )
    return replace(
        base,
        family=KdaConfig(
            linear_layers=read_grouped_layers(fields, base.layer_count),
            head_count=base.head_count,
            head_dim=head_dim,
            kernel_size=fields.integer("short_conv_kernel_size", 4, minimum=2),
            gate_rank=None,
            decay_floor=_read_floor(fields),
            is_rotated=True,
            has_head_gate=True,
        ),
    )


def _read_floor(fields: JsonFields) -> float | None:
    if not fields.flag("kda_safe_gate", True):
        return None
    key = "kda_lower_bound"
    floor = fields.number(key, -5.0, above=float("-inf"))
    if floor >= 0.0:
        raise fields.error(key, "below 0")
    return floor


def _read_linear_layers(fields: JsonFields, layer_count: int) -> tuple[int, ...]:
    """From `layer_types`, or from two lists of numbers that begin with 1."""
    linear = fields.object("linear_attn_config")
    if fields.has("layer_types") or linear is None:
        return check_kinds(fields, "layer_types", fields.texts("layer_types"), layer_count)
    key = "kda_layers"
    numbers = {
        kind: linear.integers(name, minimum=1)
        for kind, name in ((LINEAR, key), (FULL, "full_attn_layers"))
    }
    if sorted(numbers[LINEAR] + numbers[FULL]) != list(range(1, layer_count + 1)):
        raise linear.error(
            key, f"all of 1..{layer_count} that full_attn_layers = {numbers[FULL]} leaves out"
        )
    is_linear = set(numbers[LINEAR])
    kinds = [LINEAR if layer + 1 in is_linear else FULL for layer in range(layer_count)]
    return check_kinds(linear, key, kinds, layer_count)


def _linear_size(fields: JsonFields, published: str, flat: str, minimum: int = 1) -> int:
    """A size of the recurrence: of `linear_attn_config`, or under a name of its own."""
    linear = fields.object("linear_attn_config")
    if linear is not None and linear.has(published):
        return linear.integer(published, minimum=minimum)
    return fields.integer(flat, minimum=minimum)
