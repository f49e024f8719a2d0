"""Reads config.json of DeepSeek V3.2 and GLM-5: attention to tokens that an indexer chooses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from common.engine.config.json_fields import JsonFields
from common.engine.config.model import FamilyConfig, ModelConfig
from common.engine.config.reading import CheckpointConfig
from common.engine.models.deepseek_config import read_deepseek, read_mlp_types

LAYER_TYPE = "indexed_attention"
IS_OWN_CHOICE = {"full": True, "F": True, "shared": False, "S": False}


@dataclass(frozen=True, slots=True)
class SparseConfig(FamilyConfig):
    """The indexer.

    head_count, head_dim: of its queries; all of them meet one key. token_count: that are chosen.
    is_interleaved: how it pairs the channels that it rotates. layers: global ids of those that
    choose; the others share the choice of the last one before them.
    """

    head_count: int
    head_dim: int
    token_count: int
    is_interleaved: bool
    layers: tuple[int, ...]
    shared_layers: tuple[int, ...]

    def joined_layers(self) -> Collection[int]:
        return self.shared_layers


@dataclass(frozen=True, slots=True)
class _Variant:
    """Settings that the published model code fixes."""

    is_interleaved: bool
    may_share: bool


_VARIANTS = {
    "DeepseekV32ForCausalLM": _Variant(is_interleaved=False, may_share=False),
    "GlmMoeDsaForCausalLM": _Variant(is_interleaved=True, may_share=True),
}


def read_sparse(source: CheckpointConfig) -> ModelConfig:
    """Raises: ConfigError naming the value that is missing, impossible or not implemented."""
    fields, variant = source.fields, _VARIANTS[source.architecture]
    if "q_lora_rank" in fields.values and not fields.has("q_lora_rank"):
        raise fields.error("q_lora_rank", "an integer: the indexer reads what it projects to")
    if not fields.flag("rope_interleave", True):
        raise fields.error("rope_interleave", "true for this architecture")
    if fields.flag("indexer_rope_interleave", variant.is_interleaved) != variant.is_interleaved:
        allowed = "true" if variant.is_interleaved else "false"
        raise fields.error("indexer_rope_interleave", f"{allowed} for this architecture")
    base = read_deepseek(source)
    assert base.mla is not None and base.moe is not None
    if any(kind != LAYER_TYPE for kind in fields.texts("layer_types")):
        raise fields.error("layer_types", f'"{LAYER_TYPE}" for every layer')
    head_dim = fields.integer("index_head_dim")
    if head_dim < base.mla.rope_dim:
        raise fields.error("index_head_dim", f"at least qk_rope_head_dim = {base.mla.rope_dim}")
    chooses = _read_choosers(fields, base)
    if not variant.may_share and not all(chooses):
        raise fields.error(_schedule_key(fields), "such that every layer of this architecture "
                           "chooses its own tokens")  # fmt: skip
    layers = range(base.layer_count)
    return replace(
        base,
        moe=read_mlp_types(fields, base.moe, base.layer_count),
        family=SparseConfig(
            head_count=fields.integer("index_n_heads"),
            head_dim=head_dim,
            token_count=fields.integer("index_topk"),
            is_interleaved=variant.is_interleaved,
            layers=tuple(layer for layer in layers if chooses[layer]),
            shared_layers=tuple(layer for layer in layers if not chooses[layer]),
        ),
    )


def sparse_config(config: ModelConfig) -> SparseConfig:
    """Settings that only these layers have."""
    assert isinstance(config.family, SparseConfig), config.architecture
    return config.family


def _schedule_key(fields: JsonFields) -> str:
    """The key that says which layers choose: a list, a pattern, or a period, in this order."""
    keys = ("indexer_types", "index_topk_pattern")
    return next((key for key in keys if fields.has(key)), "index_topk_freq")


def _read_choosers(fields: JsonFields, base: ModelConfig) -> list[bool]:
    """Of every layer, whether it chooses by itself."""
    key = _schedule_key(fields)
    if key == "index_topk_freq":
        period = max(1, fields.integer(key, 1, minimum=0))
        offset = fields.integer("index_skip_topk_offset", 2, minimum=0)
        chooses = [max(layer - offset + 1, 0) % period == 0 for layer in range(base.layer_count)]
    else:
        value = fields.values[key]
        kinds = tuple(value) if isinstance(value, str) else fields.texts(key)
        if any(kind not in IS_OWN_CHOICE for kind in kinds):
            raise fields.error(key, f"made of {', '.join(IS_OWN_CHOICE)}")
        counts = (base.layer_count, base.layer_count + base.extra_layer_count)
        if len(kinds) not in counts:
            raise fields.error(key, f"one kind for each of num_hidden_layers = {counts[0]}")
        chooses = [IS_OWN_CHOICE[kind] for kind in kinds[: base.layer_count]]
    if not chooses[0]:
        raise fields.error(key, "such that the first layer chooses: there is none before it")
    return chooses
