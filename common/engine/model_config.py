"""What a checkpoint's config.json says of the model, checked and in one spelling.

Dispatches on `architectures[0]`. What an architecture's code fixes and its config.json does not say
is declared here as data. Knows nothing of tensors, weights files or devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from common.engine.gemma_config import GemmaConfig, read_gemma, read_global_rope
from common.engine.json_fields import JsonFields
from common.engine.mla_config import (
    MlaConfig,
    RouterConfig,
    read_mla,
    read_router,
    read_weight_blocks,
)
from common.engine.rope_config import RopeConfig, extended_length, read_rope
from common.engine.window_config import WindowStyle, read_windows, window_layers
from common.errors import ConfigError

CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts, and the global layers that have them; the other layers have a plain MLP.

    router: None for a plain softmax and top-k. shared_size: inner width of the MLP that every token
        takes beside its experts, 0 if there is none.
    """

    expert_count: int
    experts_per_token: int
    intermediate_size: int
    is_normalized: bool
    layers: tuple[int, ...]
    router: RouterConfig | None = None
    shared_size: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of grouped-query or latent attention, whichever architecture it is published as.

    dtype: what the checkpoint asks to be computed in. context_length: tokens, after any extension.
    eos_token_ids: every id that ends an answer, of config.json and generation_config.json.
    mla: of latent attention, where all heads share one KV head and head_dim is the query's.
    weight_blocks: (rows, columns) of the blocks of float8 weights, None if there are none.
    extra_layer_count: layers behind the last one that a checkpoint carries to predict more tokens
        at a time; they are not loaded.
    windows: tokens that each layer sees, itself included; 0 for all.
    gemma: what only Gemma's layers have.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    context_length: int
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_head_tied: bool
    moe: MoeConfig | None
    dtype: str
    eos_token_ids: tuple[int, ...]
    mla: MlaConfig | None = None
    weight_blocks: tuple[int, int] | None = None
    extra_layer_count: int = 0
    windows: tuple[int, ...] = ()
    gemma: GemmaConfig | None = None

    @property
    def has_windows(self) -> bool:
        return any(self.windows)

    @property
    def needs_sdpa(self) -> bool:
        """Whether attention is more than causal softmax over all of the past."""
        return self.has_windows or self.gemma is not None

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.head_dim if self.mla is None else self.mla.rope_dim


class _Bias(StrEnum):
    """Which of q, k, v and o carry a bias."""

    NEVER = "never"
    QKV = "qkv"
    CONFIGURED = "configured"  # all four if `attention_bias`


@dataclass(frozen=True, slots=True)
class _Architecture:
    """What the published model code fixes. head_dim_default: 0 if there is none.

    is_latent: attention is latent, experts are grouped; has_sigmoid_router is of those only.
    is_gemma: the rest is of those only. window_period_default: n of `WindowStyle.PATTERN`.
    """

    bias: _Bias
    window: WindowStyle
    has_qk_norm: bool = False
    has_mlp_bias_key: bool = False
    is_kv_head_count_required: bool = True
    head_dim_default: int = 0
    is_moe: bool = False
    is_latent: bool = False
    has_sigmoid_router: bool = False
    is_gemma: bool = False
    window_period_default: int = 0
    softcap_defaults: tuple[float, float] = (0.0, 0.0)
    has_local_rope: bool = False


_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(
        bias=_Bias.CONFIGURED,
        window=WindowStyle.NONE,
        has_mlp_bias_key=True,
        is_kv_head_count_required=False,
    ),
    "MistralForCausalLM": _Architecture(bias=_Bias.NEVER, window=WindowStyle.ALL_LAYERS),
    "Qwen2ForCausalLM": _Architecture(bias=_Bias.QKV, window=WindowStyle.UPPER_LAYERS),
    "Qwen3ForCausalLM": _Architecture(
        bias=_Bias.CONFIGURED,
        window=WindowStyle.UPPER_LAYERS,
        has_qk_norm=True,
        head_dim_default=128,
    ),
    "Qwen3MoeForCausalLM": _Architecture(
        bias=_Bias.CONFIGURED, window=WindowStyle.SWITCHED, has_qk_norm=True, is_moe=True
    ),
    "DeepseekV2ForCausalLM": _Architecture(
        bias=_Bias.CONFIGURED, window=WindowStyle.NONE, is_moe=True, is_latent=True
    ),
    "DeepseekV3ForCausalLM": _Architecture(
        bias=_Bias.CONFIGURED,
        window=WindowStyle.NONE,
        is_moe=True,
        is_latent=True,
        has_sigmoid_router=True,
    ),
    "Gemma2ForCausalLM": _Architecture(
        bias=_Bias.CONFIGURED,
        window=WindowStyle.PATTERN,
        head_dim_default=256,
        is_gemma=True,
        window_period_default=2,
        softcap_defaults=(50.0, 30.0),
    ),
    "Gemma3ForCausalLM": _Architecture(
        bias=_Bias.CONFIGURED,
        window=WindowStyle.PATTERN,
        has_qk_norm=True,
        head_dim_default=256,
        is_gemma=True,
        window_period_default=6,
        has_local_rope=True,
    ),
}

SUPPORTED_ARCHITECTURES = tuple(_ARCHITECTURES)


def read_model_config(model_path: Path) -> ModelConfig:
    """The model of a checkpoint directory, in either spelling of config.json.

    Raises: ConfigError if the directory or file is missing or unreadable, the architecture is not
        supported, or a value is missing, impossible or not implemented; it names file and value.
    """
    if not model_path.is_dir():
        raise ConfigError(f"model path {model_path}: must be a directory with a config.json")
    fields = JsonFields.read(model_path / "config.json")
    name = _architecture_name(fields)
    architecture = _ARCHITECTURES[name]
    weight_blocks = read_weight_blocks(fields)
    if not architecture.is_gemma and fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", '"silu"')
    layer_count = fields.integer("num_hidden_layers")
    max_position = fields.integer("max_position_embeddings")
    if architecture.has_local_rope:
        # Its published lengths are those after the extension.
        rope = read_global_rope(fields, max_position=max_position)
        context_length = max_position
    else:
        rope = read_rope(fields, max_position=max_position)
        context_length = extended_length(rope, max_position)
    marked = window_layers(
        fields,
        architecture.window,
        layer_count,
        period_default=architecture.window_period_default,
    )
    mla = read_mla(fields) if architecture.is_latent else None
    if mla is None:
        head_count, kv_head_count, head_dim = _read_heads(fields, architecture)
    else:
        head_count, kv_head_count, head_dim = (
            fields.integer("num_attention_heads"), 1, mla.query_dim,
        )  # fmt: skip
        rope = replace(rope, is_interleaved=fields.flag("rope_interleave", True))
    attention_bias = fields.flag("attention_bias", False)
    is_configured = architecture.bias is _Bias.CONFIGURED and attention_bias
    if attention_bias and architecture.bias is not _Bias.CONFIGURED:
        raise fields.error("attention_bias", f"false for {name}")
    vocab_size = fields.integer("vocab_size")
    return ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        layer_count=layer_count,
        head_count=head_count,
        kv_head_count=kv_head_count,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        context_length=context_length,
        has_qkv_bias=architecture.bias is _Bias.QKV or is_configured,
        has_output_bias=is_configured,
        has_mlp_bias=architecture.has_mlp_bias_key and fields.flag("mlp_bias", False),
        has_qk_norm=architecture.has_qk_norm,
        is_head_tied=fields.flag("tie_word_embeddings", architecture.is_gemma),
        moe=_read_moe(fields, architecture, layer_count) if architecture.is_moe else None,
        dtype=_read_dtype(fields),
        eos_token_ids=_read_eos(model_path, fields, vocab_size),
        mla=mla,
        weight_blocks=weight_blocks,
        extra_layer_count=_read_extra_layers(fields) if architecture.is_latent else 0,
        windows=read_windows(fields, marked, layer_count, context_length),
        gemma=_read_gemma(fields, architecture, marked, max_position),
    )


def check_parallel(config: ModelConfig, tp_size: int, pp_size: int) -> None:
    """Raises: ConfigError if the model can't be cut over that many ranks."""
    if not 1 <= pp_size <= config.layer_count:
        raise ConfigError(f"pp_size={pp_size}: must be in 1..{config.layer_count}, the layer count")
    cuts = {
        "attention heads": config.head_count,
        "intermediate_size": config.intermediate_size,
    }
    if config.moe is not None:
        cuts["moe_intermediate_size"] = config.moe.intermediate_size
    for name, size in cuts.items():
        if tp_size < 1 or size % tp_size != 0:
            raise ConfigError(f"tp_size={tp_size}: must divide {size}, the model's {name}")
    kv_heads = config.kv_head_count
    if kv_heads % tp_size != 0 and tp_size % kv_heads != 0:
        raise ConfigError(
            f"tp_size={tp_size}: must divide or be a multiple of {kv_heads}, the model's KV heads"
        )


def _architecture_name(fields: JsonFields) -> str:
    names = fields.texts("architectures")
    if not names or names[0] not in _ARCHITECTURES:
        raise fields.error("architectures", f"one of {', '.join(SUPPORTED_ARCHITECTURES)}")
    return names[0]


def _read_heads(fields: JsonFields, architecture: _Architecture) -> tuple[int, int, int]:
    """(query heads, KV heads, head dim)."""
    head_count = fields.integer("num_attention_heads")
    default = None if architecture.is_kv_head_count_required else head_count
    kv_head_count = fields.integer("num_key_value_heads", default)
    if head_count % kv_head_count != 0:
        raise fields.error(
            "num_key_value_heads", f"a divisor of num_attention_heads = {head_count}"
        )
    hidden_size = fields.integer("hidden_size")
    if not fields.has("head_dim") and not architecture.head_dim_default:
        if hidden_size % head_count != 0:
            raise fields.error("hidden_size", f"a multiple of num_attention_heads = {head_count}")
        return head_count, kv_head_count, _even_head_dim(fields, hidden_size // head_count)
    head_dim = fields.integer("head_dim", architecture.head_dim_default or None)
    return head_count, kv_head_count, _even_head_dim(fields, head_dim)


def _even_head_dim(fields: JsonFields, head_dim: int) -> int:
    if head_dim % 2 != 0:
        raise fields.error("head_dim", f"even, for rotary embeddings; it comes out as {head_dim}")
    return head_dim


def _read_gemma(
    fields: JsonFields, architecture: _Architecture, marked: tuple[int, ...], max_position: int
) -> GemmaConfig | None:
    if not architecture.is_gemma:
        return None
    return read_gemma(
        fields,
        softcap_defaults=architecture.softcap_defaults,
        local_layers=marked if architecture.has_local_rope else (),
        max_position=max_position,
    )


def _read_moe(fields: JsonFields, architecture: _Architecture, layer_count: int) -> MoeConfig:
    if architecture.is_latent:
        return _read_grouped_moe(fields, architecture, layer_count)
    count_key = "num_experts" if fields.has("num_experts") else "num_local_experts"
    expert_count = fields.integer(count_key)
    experts_per_token = fields.integer("num_experts_per_tok")
    if experts_per_token > expert_count:
        raise fields.error("num_experts_per_tok", f"at most {count_key} = {expert_count}")
    step = fields.integer("decoder_sparse_step", 1)
    plain = set(fields.integers("mlp_only_layers"))
    return MoeConfig(
        expert_count=expert_count,
        experts_per_token=experts_per_token,
        intermediate_size=fields.integer("moe_intermediate_size"),
        is_normalized=fields.flag("norm_topk_prob", False),
        layers=tuple(
            layer for layer in range(layer_count) if layer not in plain and (layer + 1) % step == 0
        ),
    )


def _read_grouped_moe(
    fields: JsonFields, architecture: _Architecture, layer_count: int
) -> MoeConfig:
    """Experts on all layers but the first ones, and an MLP beside them that every token takes."""
    is_sigmoid = architecture.has_sigmoid_router
    expert_count = fields.integer("n_routed_experts")
    experts_per_token = fields.integer("num_experts_per_tok")
    if experts_per_token > expert_count:
        raise fields.error("num_experts_per_tok", f"at most n_routed_experts = {expert_count}")
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.error("moe_layer_freq", "1")
    if fields.flag("mlp_bias", False):
        raise fields.error("mlp_bias", "false for this architecture")
    is_normalized = fields.flag("norm_topk_prob", is_sigmoid)
    if is_normalized and not is_sigmoid:
        raise fields.error("norm_topk_prob", "false for this architecture")
    intermediate_size = fields.integer("moe_intermediate_size")
    plain_count = fields.integer("first_k_dense_replace", 0, minimum=0)
    return MoeConfig(
        expert_count=expert_count,
        experts_per_token=experts_per_token,
        intermediate_size=intermediate_size,
        is_normalized=is_normalized,
        layers=tuple(range(plain_count, layer_count)),
        router=read_router(fields, is_sigmoid=is_sigmoid, expert_count=expert_count),
        shared_size=fields.integer("n_shared_experts", 0, minimum=0) * intermediate_size,
    )


def _read_extra_layers(fields: JsonFields) -> int:
    key = "num_mtp_layers" if fields.has("num_mtp_layers") else "num_nextn_predict_layers"
    return fields.integer(key, 0, minimum=0)


def _read_dtype(fields: JsonFields) -> str:
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    dtype = fields.text(key, "float32").removeprefix("torch.")
    if dtype not in CHECKPOINT_DTYPES:
        raise fields.error(key, f"one of {', '.join(CHECKPOINT_DTYPES)}")
    return dtype


def _read_eos(model_path: Path, fields: JsonFields, vocab_size: int) -> tuple[int, ...]:
    sources = [fields]
    if (model_path / "generation_config.json").is_file():
        sources.append(JsonFields.read(model_path / "generation_config.json"))
    token_ids: list[int] = []
    for source in sources:
        found = source.integers("eos_token_id")
        if any(token_id >= vocab_size for token_id in found):
            raise source.error("eos_token_id", f"below vocab_size = {vocab_size}")
        token_ids.extend(found)
    return tuple(dict.fromkeys(token_ids))
