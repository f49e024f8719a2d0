"""Reads config.json of Nemotron-H: a sequence of Mamba-2 mixers, attentions, MLPs and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from common.engine.config.json_fields import JsonFields, JsonValue
from common.engine.config.mla import read_router
from common.engine.config.model import ModelConfig, MoeConfig
from common.engine.config.reading import (
    CheckpointConfig,
    Heads,
    read_decoder,
    read_experts_per_token,
)
from common.engine.config.rope import DEFAULT_THETA, RopeConfig, RopeKind
from common.engine.layers.group_norm import GateStyle
from common.engine.models.mamba_config import (
    MambaConfig,
    MambaFamily,
    check_sizes,
    check_step_limit,
)

# Defaults of the published code for missing keys.
DEFAULTS: Mapping[str, JsonValue] = {
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
}
# Older spellings, by the one that is read here.
OLDER = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "time_step_limit": "mamba_dt_limit",
    "head_dim": "attention_head_dim",
}
# Switches that would change numbers and are off in every published checkpoint.
OFF = ("use_bias", "mamba_proj_bias", "attention_bias", "mlp_bias", "residual_in_fp32")


class MixerKind(StrEnum):
    """What a layer mixes with. Values are the letters of a pattern."""

    MAMBA = "M"
    ATTENTION = "*"
    MLP = "-"
    EXPERTS = "E"


KINDS = {
    "linear_attention": MixerKind.MAMBA,
    "mamba": MixerKind.MAMBA,
    "full_attention": MixerKind.ATTENTION,
    "attention": MixerKind.ATTENTION,
    "mlp": MixerKind.MLP,
    "moe": MixerKind.EXPERTS,
}


@dataclass(frozen=True, slots=True)
class NemotronConfig(MambaFamily):
    """kinds: of every layer. expert_io_size: what experts are given and return, projected from and
    to the hidden size if it is another. shared_size: of the MLP beside them. 0 without experts."""

    kinds: tuple[MixerKind, ...]
    expert_io_size: int
    shared_size: int

    def cuts(self) -> Mapping[str, int]:
        # Not super(): a dataclass with slots is another class than the one it is written in.
        return {
            **MambaFamily.cuts(self),
            "moe_shared_expert_intermediate_size": self.shared_size,
        }


def read_nemotron(source: CheckpointConfig) -> ModelConfig:
    """Raises: ConfigError naming the value that is missing, impossible or not implemented."""
    kinds = _read_kinds(source.fields)
    fields = _completed(source.fields, len(kinds))
    _check_supported(fields)
    base = read_decoder(
        replace(source, fields=fields),
        heads=_read_heads(fields),
        # Nothing is rotated: order comes from the recurrence.
        rope=RopeConfig(RopeKind.DEFAULT, DEFAULT_THETA),
        context_length=fields.integer("max_position_embeddings"),
        intermediate_key="intermediate_size"
        if MixerKind.EXPERTS not in kinds or MixerKind.MLP in kinds
        else "moe_shared_expert_intermediate_size",
    )
    check_sizes(
        fields, heads_key="mamba_num_heads", groups_key="n_groups", kernel_key="conv_kernel"
    )
    epsilon = fields.number("layer_norm_epsilon")
    expert_layers = _layers(kinds, MixerKind.EXPERTS)
    moe = _read_experts(fields, expert_layers) if expert_layers else None
    return replace(
        base,
        rms_norm_eps=epsilon,
        windows=(0,) * base.layer_count,
        moe=moe,
        family=NemotronConfig(
            mamba=MambaConfig(
                head_count=fields.integer("mamba_num_heads"),
                head_dim=fields.integer("mamba_head_dim"),
                group_count=fields.integer("n_groups"),
                state_dim=fields.integer("ssm_state_size"),
                kernel_size=fields.integer("conv_kernel"),
                gate=GateStyle.BEFORE_NORM,
                epsilon=epsilon,
                has_conv_bias=fields.flag("use_conv_bias", True),
            ),
            mamba_layers=_layers(kinds, MixerKind.MAMBA),
            attention_layers=_layers(kinds, MixerKind.ATTENTION),
            is_rotated=False,
            kinds=kinds,
            expert_io_size=fields.integer("moe_latent_size", base.hidden_size) if moe else 0,
            shared_size=moe.shared_size if moe else 0,
        ),
    )


def _layers(kinds: tuple[MixerKind, ...], kind: MixerKind) -> tuple[int, ...]:
    return tuple(layer for layer, of_layer in enumerate(kinds) if of_layer is kind)


def _read_kinds(fields: JsonFields) -> tuple[MixerKind, ...]:
    """Of the list of layer types if there is one, else of the published pattern, "M*-E"."""
    key = next((k for k in ("layers_block_type", "layer_types") if fields.has(k)), None)
    if key is not None:
        names = fields.texts(key)
        if not all(name in KINDS for name in names):
            raise fields.error(key, f"a list of {', '.join(KINDS)}")
        kinds = tuple(KINDS[name] for name in names)
    else:
        key = "hybrid_override_pattern"
        letters = fields.text(key)
        if not all(letter in list(MixerKind) for letter in letters):
            raise fields.error(key, f"a string of the letters {' '.join(MixerKind)}")
        kinds = tuple(MixerKind(letter) for letter in letters)
    if MixerKind.MAMBA not in kinds or MixerKind.ATTENTION not in kinds:
        raise fields.error(key, "layers of which some are Mamba mixers and some are attention")
    if fields.has("num_hidden_layers") and fields.integer("num_hidden_layers") != len(kinds):
        raise fields.error("num_hidden_layers", f"{len(kinds)}, the length of {key}")
    return kinds


def _completed(fields: JsonFields, layer_count: int) -> JsonFields:
    """In one spelling, and with the published code's defaults."""
    values = {key: value for key, value in fields.values.items() if value is not None}
    for key, older in OLDER.items():
        if older in values:
            values.setdefault(key, values[older])
    return JsonFields({**DEFAULTS, **values, "num_hidden_layers": layer_count}, fields.where)


def _check_supported(fields: JsonFields) -> None:
    for key in OFF:
        if fields.flag(key, False):
            raise fields.error(key, "false: it is not supported for this architecture")
    if fields.text("mlp_hidden_act", "relu2") != "relu2":
        raise fields.error("mlp_hidden_act", '"relu2"')
    if fields.text("mamba_hidden_act", "silu") != "silu":
        raise fields.error("mamba_hidden_act", '"silu"')
    if fields.has("sliding_window"):
        raise fields.error("sliding_window", "null: windows are not supported here")
    check_step_limit(fields)


def _read_heads(fields: JsonFields) -> Heads:
    """Nothing is rotated, so that heads may have any size."""
    head_count = fields.integer("num_attention_heads")
    kv_head_count = fields.integer("num_key_value_heads", head_count)
    if head_count % kv_head_count != 0:
        raise fields.error(
            "num_key_value_heads", f"a divisor of num_attention_heads = {head_count}"
        )
    return Heads(head_count, kv_head_count, fields.integer("head_dim"))


def _read_experts(fields: JsonFields, layers: tuple[int, ...]) -> MoeConfig:
    expert_count = fields.integer("n_routed_experts")
    if fields.integer("n_shared_experts", 1, minimum=0) != 1:
        raise fields.error("n_shared_experts", "1")
    return MoeConfig(
        expert_count=expert_count,
        experts_per_token=read_experts_per_token(fields, "n_routed_experts", expert_count),
        intermediate_size=fields.integer("moe_intermediate_size"),
        is_normalized=fields.flag("norm_topk_prob", True),
        layers=layers,
        router=read_router(fields, is_sigmoid=True, expert_count=expert_count),
        shared_size=fields.integer("moe_shared_expert_intermediate_size"),
    )
