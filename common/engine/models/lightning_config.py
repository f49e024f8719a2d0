"""Reads config.json of Ling and Ring 2.5 and 2.6: most layers are linear attention with a fixed
decay, the last one of each group attends to latent rows.

Their model_type is that of Ling 3.0, which is another architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from common.engine.config.json_fields import JsonFields, JsonValue
from common.engine.config.model import FamilyConfig, ModelConfig
from common.engine.config.reading import CheckpointConfig
from common.engine.models.latent_hybrid_config import (
    read_grouped_layers,
    read_latent_hybrid,
    read_latent_rope,
    respell,
)

# Of the published code, where config.json has no such key.
DEFAULTS: Mapping[str, JsonValue] = {
    "rope_theta": 6e5,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "q_lora_rank": None,
}
ROTATED_SHARE = 0.5
# Flags that change numbers, and the value that is implemented.
FIXED_FLAGS = {
    "use_qkv_bias": False,
    "use_bias": False,
    "use_rmsnorm": True,
    "norm_head": False,
    "norm_softmax": False,
    "use_qk_norm": True,
    "linear_rope": True,
    "moe_router_enable_expert_bias": True,
    "norm_topk_prob": True,
}


@dataclass(frozen=True, slots=True)
class LightningConfig(FamilyConfig):
    """linear_layers: global ids of the layers of linear attention; the others are latent.

    head_dim: of linear attention, whose heads are as many as those of the others. rotated_dim:
    channels of it that are rotated, the first ones. group_count: of features that a norm behind
    linear attention takes together. has_silu: whether queries, keys and values go through one.
    """

    linear_layers: tuple[int, ...]
    head_dim: int
    rotated_dim: int
    group_count: int
    has_silu: bool

    def shared_cuts(self) -> Mapping[str, int]:
        return {"group_norm_size": self.group_count}


def lightning_config(config: ModelConfig) -> LightningConfig:
    """Settings that only these layers have."""
    assert isinstance(config.family, LightningConfig), config.architecture
    return config.family


def read_ling_2_5(source: CheckpointConfig) -> ModelConfig:
    """Raises: ConfigError naming the value that is missing, impossible or not implemented."""
    source = respell(source, DEFAULTS)
    fields = source.fields
    _check_fixed(fields)
    head_dim = fields.integer("head_dim")
    rope, rotated_dim = read_latent_rope(fields, head_dim=head_dim, share_default=ROTATED_SHARE)
    if fields.integer("rotary_dim", rotated_dim) != rotated_dim:
        raise fields.error("rotary_dim", f"{rotated_dim}, the rotated share of head_dim")
    if rotated_dim < 2 or rotated_dim % 2:
        raise fields.error(
            "partial_rotary_factor", f"such that an even part of {head_dim} is rotated"
        )
    base = read_latent_hybrid(source, rope=rope, bias_key="use_qkv_bias")
    assert base.moe is not None
    if base.moe.experts_per_token == 1:
        raise fields.error("num_experts_per_tok", "at least 2")
    size = fields.integer("layer_group_size")
    if base.layer_count % size:
        raise fields.error("layer_group_size", f"a divisor of {base.layer_count}, the layer count")
    group_count = fields.integer("group_norm_size")
    if base.head_count * head_dim % group_count:
        raise fields.error(
            "group_norm_size", f"a divisor of {base.head_count * head_dim}, the features of heads"
        )
    return replace(
        base,
        family=LightningConfig(
            linear_layers=read_grouped_layers(fields, base.layer_count),
            head_dim=head_dim,
            rotated_dim=rotated_dim,
            group_count=group_count,
            has_silu=fields.flag("linear_silu", False),
        ),
    )


def _check_fixed(fields: JsonFields) -> None:
    for name, value in FIXED_FLAGS.items():
        if fields.flag(name, value) is not value:
            raise fields.error(name, "true" if value else "false")
    if fields.text("router_dtype", "fp32") != "fp32":
        raise fields.error("router_dtype", '"fp32"')
