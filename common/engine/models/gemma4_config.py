"""Reads config.json of Gemma 4, its text part where there is more."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from common.engine.config.json_fields import JsonFields
from common.engine.config.model import FamilyConfig, ModelConfig, MoeConfig, ScoreConfig
from common.engine.config.reading import CheckpointConfig, Heads, read_decoder, read_heads
from common.engine.config.rope import RopeConfig
from common.engine.config.window import WindowStyle, read_windows, window_layers
from common.engine.models.gemma_config import ACTIVATION, read_nested_rope, read_softcap

# Defaults of the published code for missing keys.
TEXT_DEFAULTS = {
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
ROPE_DEFAULTS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}
HEAD_DIM, GLOBAL_HEAD_DIM = 256, 512
WINDOW_PERIOD, WINDOW = 6, 512
INPUT_SIZE, INPUT_VOCAB_SIZE = 256, 262_144
LAYER_KEYS = ("head_dim", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class Gemma4Config(FamilyConfig):
    """Settings that differ by layer, and parts beside the layers.

    heads: of every layer; `local_layers`, which see a window, are alike, and so are the others.
    local_rope: rotation of local_layers, global ids.
    owners: of every layer, the one whose cache it reads; itself if it has its own.
    valueless_layers: global ids of those whose values are made of their keys before norm and
        rotation.
    inner_sizes: width of every layer's MLP.
    logit_softcap: logits become c * tanh(x / c); 0 for none.
    input_size: of what every layer is given of each token beside the hidden state; 0 for nothing.
    input_vocab_size: tokens of the table that this comes from.
    """

    heads: tuple[Heads, ...]
    local_rope: RopeConfig | None
    local_layers: tuple[int, ...]
    owners: tuple[int, ...]
    valueless_layers: tuple[int, ...]
    inner_sizes: tuple[int, ...]
    logit_softcap: float
    input_size: int
    input_vocab_size: int

    def joined_layers(self) -> Collection[int]:
        """All behind the first layer whose cache another one reads: the last one may be that."""
        shared = {owner for layer, owner in enumerate(self.owners) if owner != layer}
        return range(min(shared) + 1, len(self.owners)) if shared else ()


def read_gemma4(source: CheckpointConfig) -> ModelConfig:
    """Raises: ConfigError naming the value that is missing, impossible or not implemented."""
    source = source.text_part(TEXT_DEFAULTS)
    fields = source.fields
    if fields.text("hidden_activation", ACTIVATION) != ACTIVATION:
        raise fields.error("hidden_activation", f'"{ACTIVATION}"')
    if fields.values.get("use_bidirectional_attention") not in (None, "vision"):
        raise fields.error(
            "use_bidirectional_attention", 'null or "vision": text is always seen causally'
        )
    context_length = fields.integer("max_position_embeddings")
    layer_count = fields.integer("num_hidden_layers")
    marked = window_layers(fields, WindowStyle.PATTERN, layer_count, period_default=WINDOW_PERIOD)
    # The last layer sees everything, in spite of config.json.
    local = tuple(layer for layer in marked if layer != layer_count - 1)
    base = read_decoder(
        source,
        heads=read_heads(fields, dim_default=HEAD_DIM),
        rope=_read_rope(fields, "full_attention", context_length),
        context_length=context_length,
        is_tied_default=True,
    )
    has_bias = fields.flag("attention_bias", False)
    return replace(
        base,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=True,
        moe=_read_experts(fields, layer_count),
        windows=read_windows(fields, local, layer_count, context_length, width_default=WINDOW),
        scores=ScoreConfig(scale=1.0),
        family=_read_family(fields, base, local),
    )


def _read_family(fields: JsonFields, base: ModelConfig, local: tuple[int, ...]) -> Gemma4Config:
    layers = range(base.layer_count)
    owners = _read_owners(fields, base.layer_count, local)
    is_doubled = fields.flag("use_double_wide_mlp", False)
    has_shared_keys = fields.flag("attention_k_eq_v", False)
    input_size = 0
    if "hidden_size_per_layer_input" not in fields.values or fields.has(
        "hidden_size_per_layer_input"
    ):
        input_size = fields.integer("hidden_size_per_layer_input", INPUT_SIZE, minimum=0)
    input_vocab_size = fields.integer("vocab_size_per_layer_input", INPUT_VOCAB_SIZE)
    if input_size and input_vocab_size < base.vocab_size:
        raise fields.error("vocab_size_per_layer_input", f"at least {base.vocab_size}, vocab_size")
    return Gemma4Config(
        heads=_read_layer_heads(fields, base.layer_count, local),
        local_rope=_read_rope(fields, "sliding_attention", base.context_length) if local else None,
        local_layers=local,
        owners=owners,
        valueless_layers=tuple(layer for layer in layers if has_shared_keys and layer not in local),
        inner_sizes=tuple(
            base.intermediate_size * (2 if is_doubled and owners[layer] != layer else 1)
            for layer in layers
        ),
        logit_softcap=read_softcap(fields, "final_logit_softcapping", 0.0),
        input_size=input_size,
        input_vocab_size=input_vocab_size if input_size else 0,
    )


def _read_rope(fields: JsonFields, kind: str, max_position: int) -> RopeConfig:
    nested = fields.object("rope_parameters") or JsonFields(ROPE_DEFAULTS, fields.where)
    return read_nested_rope(fields, nested, kind, max_position)


def _read_layer_heads(
    fields: JsonFields, layer_count: int, local: tuple[int, ...]
) -> tuple[Heads, ...]:
    """Of every layer, in either spelling: by layer, or for all that see everything."""
    by_layer = fields.object("per_layer_config")
    if by_layer is None:
        changes: dict[str, object] = {
            "head_dim": fields.integer("global_head_dim", GLOBAL_HEAD_DIM)
        }
        if fields.flag("attention_k_eq_v", False) and fields.has("num_global_key_value_heads"):
            changes["num_key_value_heads"] = fields.integer("num_global_key_value_heads")
        wide = {str(layer): changes for layer in range(layer_count) if layer not in local}
        by_layer = JsonFields(wide, fields.where)
    unknown = by_layer.values.keys() - {str(layer) for layer in range(layer_count)}
    if unknown:
        raise fields.error("per_layer_config", f"of layers 0..{layer_count - 1}")
    heads: list[Heads] = []
    for layer in range(layer_count):
        entry = by_layer.object(str(layer)) or JsonFields({}, by_layer.where)
        if entry.values.keys() - set(LAYER_KEYS):
            raise fields.error("per_layer_config", f"of {' and '.join(LAYER_KEYS)} only")
        merged = JsonFields({**fields.values, **entry.values}, entry.where)
        heads.append(read_heads(merged, dim_default=HEAD_DIM))
    if len({(layer in local, of_layer) for layer, of_layer in enumerate(heads)}) > 1 + bool(local):
        raise fields.error("per_layer_config", "the same for all layers of a type")
    return tuple(heads)


def _read_owners(fields: JsonFields, layer_count: int, local: tuple[int, ...]) -> tuple[int, ...]:
    """The last layers may read the cache of the last one of their type that has its own."""
    shared_count = fields.integer("num_kv_shared_layers", 0, minimum=0)
    owning = range(layer_count - shared_count)
    owners = list(owning)
    for layer in range(len(owning), layer_count):
        alike = [owner for owner in owning if (owner in local) == (layer in local)]
        if not alike:
            raise fields.error(
                "num_kv_shared_layers", f"smaller: layer {layer} has none of its type before it"
            )
        owners.append(alike[-1])
    return tuple(owners)


def _read_experts(fields: JsonFields, layer_count: int) -> MoeConfig | None:
    """On every layer, beside the MLP."""
    if not fields.flag("enable_moe_block", False):
        return None
    expert_count = fields.integer("num_experts")
    experts_per_token = fields.integer("top_k_experts")
    if experts_per_token > expert_count:
        raise fields.error("top_k_experts", f"at most num_experts = {expert_count}")
    return MoeConfig(
        expert_count=expert_count,
        experts_per_token=experts_per_token,
        intermediate_size=fields.integer("moe_intermediate_size"),
        is_normalized=True,
        layers=tuple(range(layer_count)),
    )
