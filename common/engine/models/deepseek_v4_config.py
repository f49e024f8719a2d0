"""Reads config.json of DeepSeek-V4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from common.engine.config.json_fields import JsonFields
from common.engine.config.model import FamilyConfig, ModelConfig, MoeConfig
from common.engine.config.reading import (
    CheckpointConfig,
    check_silu,
    read_decoder,
    read_experts_per_token,
    read_extra_layers,
    read_heads,
)
from common.engine.config.rope import RopeConfig, RopeKind, extended_length, read_rope
from common.engine.config.weight_format import Float4Groups, Float8Blocks, WeightFormat


class CompressionKind(StrEnum):
    """Blocks that a layer sees beside its window: none, chosen ones, or all (long) ones."""

    SLIDING = "sliding_attention"
    SPARSE = "compressed_sparse_attention"
    HEAVY = "heavily_compressed_attention"


KIND_OF_RATIO = {0: CompressionKind.SLIDING, 4: CompressionKind.SPARSE, 128: CompressionKind.HEAVY}
"""Meaning of the numbers of `compress_ratios`."""
EXPERT_DTYPES = ("fp8", "fp4", "bf16")
MLP_KINDS = ("hash_moe", "moe")
HASH_LAYERS_DEFAULT = 3
ROTATED_SHARE_DEFAULT = 64 / 512
LEGACY_RATIOS = {
    CompressionKind.SPARSE: "compress_rate_csa",
    CompressionKind.HEAVY: "compress_rate_hca",
}


@dataclass(frozen=True, slots=True)
class V4Config(FamilyConfig):
    """kinds: of every layer. sparse_ratio, heavy_ratio: tokens of a block.

    block_rope: the rotation of layers with blocks. query_rank: width that queries are projected
    through. output_groups, output_rank: heads of a group are projected to a rank together.
    index_*: the small heads that choose blocks, and how many they choose.
    stream_*: of the parallel residuals, and what makes their mixing doubly stochastic.
    clamp: bound of what goes into an activation. hash_layers: choose experts by token id.
    """

    kinds: tuple[CompressionKind, ...]
    sparse_ratio: int
    heavy_ratio: int
    window: int
    block_rope: RopeConfig
    query_rank: int
    output_groups: int
    output_rank: int
    index_head_count: int
    index_dim: int
    index_count: int
    stream_count: int
    stream_rounds: int
    stream_epsilon: float
    clamp: float
    share_scaling: float
    hash_layers: tuple[int, ...]

    def cuts(self) -> Mapping[str, int]:
        return {"o_groups": self.output_groups}

    def layers_of(self, kind: CompressionKind) -> tuple[int, ...]:
        return tuple(layer for layer, of_layer in enumerate(self.kinds) if of_layer is kind)


def read_deepseek_v4(source: CheckpointConfig) -> ModelConfig:
    """Raises: ConfigError naming the value that is missing, impossible or not implemented."""
    fields = source.fields
    check_silu(fields)
    _check_fixed(fields)
    max_position = fields.integer("max_position_embeddings")
    heads = read_heads(fields)
    rope, block_rope = _read_ropes(fields, max_position)
    rope_dim = _read_rope_dim(fields, heads.dim)
    base = read_decoder(
        source,
        heads=heads,
        rope=rope,
        context_length=extended_length(block_rope, max_position),
        intermediate_key="moe_intermediate_size",
    )
    layers = base.layer_count
    expert_count = fields.integer("n_routed_experts")
    groups = fields.integer("o_groups")
    if heads.count % groups != 0:
        raise fields.error("o_groups", f"a divisor of num_attention_heads = {heads.count}")
    index_dim = fields.integer("index_head_dim")
    if index_dim < rope_dim:
        raise fields.error("index_head_dim", f"at least {rope_dim}, the rotated part of a head")
    ratios = _read_ratios(fields)
    return replace(
        base,
        weight_format=_with_float4(fields, base.weight_format),
        rotated_dim=rope_dim,
        extra_layer_count=read_extra_layers(fields),
        is_compressed=True,
        moe=MoeConfig(
            expert_count=expert_count,
            experts_per_token=read_experts_per_token(fields, "n_routed_experts", expert_count),
            intermediate_size=base.intermediate_size,
            is_normalized=True,
            layers=tuple(range(layers)),
            shared_size=base.intermediate_size,
        ),
        family=V4Config(
            kinds=_read_kinds(fields, layers),
            sparse_ratio=ratios[CompressionKind.SPARSE],
            heavy_ratio=ratios[CompressionKind.HEAVY],
            window=fields.integer("sliding_window"),
            block_rope=block_rope,
            query_rank=fields.integer("q_lora_rank"),
            output_groups=groups,
            output_rank=fields.integer("o_lora_rank"),
            index_head_count=fields.integer("index_n_heads"),
            index_dim=index_dim,
            index_count=fields.integer("index_topk"),
            stream_count=fields.integer("hc_mult"),
            stream_rounds=fields.integer("hc_sinkhorn_iters"),
            stream_epsilon=fields.number("hc_eps", 1e-6),
            clamp=fields.number("swiglu_limit", 10.0),
            share_scaling=fields.number("routed_scaling_factor", 1.5),
            hash_layers=_read_hash_layers(fields, layers),
        ),
    )


def v4_config(config: ModelConfig) -> V4Config:
    """Settings that only these layers have."""
    assert isinstance(config.family, V4Config), config.architecture
    return config.family


def _check_fixed(fields: JsonFields) -> None:
    """Values that the published code could vary and no checkpoint does."""
    if fields.integer("num_key_value_heads", 1) != 1:
        raise fields.error("num_key_value_heads", "1: keys and values are one row for all heads")
    if fields.text("scoring_func", "sqrtsoftplus") != "sqrtsoftplus":
        raise fields.error("scoring_func", '"sqrtsoftplus"')
    if fields.text("topk_method", "noaux_tc") != "noaux_tc":
        raise fields.error("topk_method", '"noaux_tc"')
    if not fields.flag("norm_topk_prob", True):
        raise fields.error("norm_topk_prob", "true")
    if fields.integer("n_shared_experts", 1) != 1:
        raise fields.error("n_shared_experts", "1")
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name, False):
            raise fields.error(name, "false")


def _with_float4(fields: JsonFields, weight_format: WeightFormat | None) -> WeightFormat | None:
    """float8 checkpoints may have experts of 4-bit floats; which they are shows in the files."""
    for source in (fields, fields.object("quantization_config")):
        if source is not None and source.text("expert_dtype", "fp8") not in EXPERT_DTYPES:
            raise source.error("expert_dtype", f"one of {', '.join(EXPERT_DTYPES)}")
    if isinstance(weight_format, Float8Blocks):
        return replace(weight_format, float4=Float4Groups())
    return weight_format


def _read_kinds(fields: JsonFields, layer_count: int) -> tuple[CompressionKind, ...]:
    """`layer_types`, or `compress_ratios`, whose numbers behind the last layer are of layers that
    predict more tokens at a time."""
    if fields.has("layer_types"):
        names = fields.texts("layer_types")
        if len(names) != layer_count or any(name not in list(CompressionKind) for name in names):
            raise fields.error("layer_types", f"{layer_count} of {', '.join(CompressionKind)}")
        return tuple(map(CompressionKind, names))
    ratios = fields.integers("compress_ratios")
    if len(ratios) < layer_count or any(ratio not in KIND_OF_RATIO for ratio in ratios):
        known = ", ".join(map(str, KIND_OF_RATIO))
        raise fields.error("compress_ratios", f"a list of at least {layer_count} of {known}")
    return tuple(KIND_OF_RATIO[ratio] for ratio in ratios[:layer_count])


def _read_ratios(fields: JsonFields) -> dict[CompressionKind, int]:
    ratios = {kind: ratio for ratio, kind in KIND_OF_RATIO.items() if ratio}
    given = fields.object("compress_rates") or JsonFields({}, fields.where)
    return {
        kind: fields.integer(LEGACY_RATIOS[kind], given.integer(kind.value, ratio))
        for kind, ratio in ratios.items()
    }


def _read_hash_layers(fields: JsonFields, layer_count: int) -> tuple[int, ...]:
    if not fields.has("mlp_layer_types"):
        count = fields.integer("num_hash_layers", HASH_LAYERS_DEFAULT, minimum=0)
        return tuple(range(min(count, layer_count)))
    names = fields.texts("mlp_layer_types")
    if len(names) != layer_count or any(name not in MLP_KINDS for name in names):
        raise fields.error("mlp_layer_types", f"{layer_count} of {', '.join(MLP_KINDS)}")
    return tuple(layer for layer, name in enumerate(names) if name == "hash_moe")


def _read_ropes(fields: JsonFields, max_position: int) -> tuple[RopeConfig, RopeConfig]:
    """(of layers with a window only, of layers with blocks).

    Either two sets of parameters, or one and two bases. One set scales the positions of layers
    with blocks alone; it never scales cos and sin.
    """
    nested = fields.object("rope_parameters")
    if nested is not None and nested.has("main"):
        main, blocks = nested.object("main"), nested.object("compress")
        if main is None or blocks is None:
            raise nested.error("compress", "an object, as main is")
        return _read_rope(main, max_position), _read_rope(blocks, max_position)
    scaling = fields.object("rope_scaling") or nested or JsonFields({}, fields.where)
    theta = fields.number("rope_theta", 10_000.0, above=1.0)
    block_theta = fields.number("compress_rope_theta", 160_000.0, above=1.0)
    scaled = JsonFields({**scaling.values, "rope_theta": block_theta}, scaling.where)
    block_rope = _read_rope(scaled, max_position)
    if block_rope.kind is RopeKind.YARN and block_rope.attention_factor is None:
        block_rope = replace(block_rope, attention_factor=1.0)
    return RopeConfig(RopeKind.DEFAULT, theta, is_interleaved=True), block_rope


def _read_rope(parameters: JsonFields, max_position: int) -> RopeConfig:
    # The rotated share of a head is read beside this.
    values = {k: v for k, v in parameters.values.items() if k != "partial_rotary_factor"}
    one_set = JsonFields({"rope_parameters": values}, parameters.where)
    return replace(read_rope(one_set, max_position=max_position), is_interleaved=True)


def _read_rope_dim(fields: JsonFields, head_dim: int) -> int:
    """Elements of a head that are rotated; the places that may say so have to agree."""
    nested = fields.object("rope_parameters") or JsonFields({}, fields.where)
    parts = [part for name in ("main", "compress") if (part := nested.object(name)) is not None]
    dims = {
        int(head_dim * source.number("partial_rotary_factor"))
        for source in (fields, nested, *parts)
        if source.has("partial_rotary_factor")
    }
    if fields.has("qk_rope_head_dim"):
        dims.add(fields.integer("qk_rope_head_dim"))
    if not dims:
        dims = {int(head_dim * ROTATED_SHARE_DEFAULT)}
    (rope_dim, *others) = sorted(dims)
    if others or rope_dim % 2 != 0 or not 0 < rope_dim <= head_dim:
        name = "qk_rope_head_dim" if fields.has("qk_rope_head_dim") else "partial_rotary_factor"
        raise fields.error(
            name, f"one even size in 2..{head_dim} wherever it is said; it comes out as "
            f"{', '.join(map(str, (rope_dim, *others)))}"
        )  # fmt: skip
    return rope_dim
