"""Reads of a checkpoint's config.json what most models have, checked and in one spelling.

Each family's reader (`models/*_config.py`) starts from `read_decoder` and adds what is its own.
Knows nothing of tensors, weights files or devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from common.engine.config.json_fields import JsonFields, JsonValue
from common.engine.config.model import ModelConfig
from common.engine.config.rope import RopeConfig
from common.engine.config.weight_format import METHODS, WeightMethod, read_weight_format
from common.errors import ConfigError

CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")
DTYPE_KEYS = ("dtype", "torch_dtype")
# Keys of a composite config.json that hold for the whole model. They win over its text_config.
OUTER_KEYS = (*DTYPE_KEYS, "tie_word_embeddings", "eos_token_id", "quantization_config")


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """The files that say what a checkpoint is.

    fields: config.json. generation: generation_config.json, None if there is none.
    """

    architecture: str
    fields: JsonFields
    generation: JsonFields | None

    @staticmethod
    def read(model_path: Path, *, architectures: tuple[str, ...]) -> CheckpointConfig:
        """architectures: the ones that are known.

        Raises: ConfigError if the directory or file is missing or unreadable, or the architecture
            is not known.
        """
        if not model_path.is_dir():
            raise ConfigError(f"model path {model_path}: must be a directory with a config.json")
        fields = JsonFields.read(model_path / "config.json")
        names = fields.texts("architectures")
        if not names or names[0] not in architectures:
            raise fields.error("architectures", f"one of {', '.join(architectures)}")
        generation = model_path / "generation_config.json"
        return CheckpointConfig(
            names[0], fields, JsonFields.read(generation) if generation.is_file() else None
        )

    def text_part(self, defaults: Mapping[str, JsonValue] | None = None) -> CheckpointConfig:
        """The language model of a composite, which has towers for images or sound beside it.

        Itself if it is no composite: only those have a text_config.
        defaults: what the published code takes for keys that a text_config leaves out.
        """
        text = self.fields.object("text_config")
        if text is None:
            return self
        outer = {key: self.fields.values[key] for key in OUTER_KEYS if self.fields.has(key)}
        inner = dict(text.values)
        if any(key in outer for key in DTYPE_KEYS):
            inner = {key: value for key, value in inner.items() if key not in DTYPE_KEYS}
        merged = {**(defaults or {}), **inner, **outer}
        return replace(self, fields=JsonFields(merged, text.where))


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of the whole model, and the elements of one."""

    count: int
    kv_count: int
    dim: int


def read_decoder(
    source: CheckpointConfig,
    *,
    heads: Heads,
    rope: RopeConfig,
    context_length: int,
    is_tied_default: bool = False,
    intermediate_key: str = "intermediate_size",
    dtype_default: str = "float32",
    weight_methods: tuple[WeightMethod, ...] = METHODS,
) -> ModelConfig:
    """The fields that every decoder's config.json has; the rest keeps its default.

    intermediate_key: of the inner width of plain MLPs, or of the experts if there are none.
    dtype_default: where config.json has none. weight_methods: of quantised weights that can be.
    Raises: ConfigError for a value that is missing, impossible or not implemented; it names file
        and value.
    """
    fields = source.fields
    vocab_size = fields.integer("vocab_size")
    return ModelConfig(
        architecture=source.architecture,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer(intermediate_key),
        layer_count=fields.integer("num_hidden_layers"),
        head_count=heads.count,
        kv_head_count=heads.kv_count,
        head_dim=heads.dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        context_length=context_length,
        dtype=read_dtype(fields, dtype_default),
        eos_token_ids=read_eos(source, vocab_size),
        is_head_tied=fields.flag("tie_word_embeddings", is_tied_default),
        weight_format=read_weight_format(fields, weight_methods),
    )


def read_heads(
    fields: JsonFields, *, is_kv_count_required: bool = True, dim_default: int = 0
) -> Heads:
    """dim_default: of an architecture whose heads have a size of their own; 0 if the hidden size
    is shared out."""
    head_count = fields.integer("num_attention_heads")
    kv_head_count = fields.integer(
        "num_key_value_heads", None if is_kv_count_required else head_count
    )
    if head_count % kv_head_count != 0:
        raise fields.error(
            "num_key_value_heads", f"a divisor of num_attention_heads = {head_count}"
        )
    hidden_size = fields.integer("hidden_size")
    if not fields.has("head_dim") and not dim_default:
        if hidden_size % head_count != 0:
            raise fields.error("hidden_size", f"a multiple of num_attention_heads = {head_count}")
        return Heads(head_count, kv_head_count, _even(fields, hidden_size // head_count))
    head_dim = fields.integer("head_dim", dim_default or None)
    return Heads(head_count, kv_head_count, _even(fields, head_dim))


def check_silu(fields: JsonFields) -> None:
    """Raises: ConfigError for an MLP with another activation."""
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", '"silu"')


def read_experts_per_token(fields: JsonFields, count_key: str, expert_count: int) -> int:
    experts_per_token = fields.integer("num_experts_per_tok")
    if experts_per_token > expert_count:
        raise fields.error("num_experts_per_tok", f"at most {count_key} = {expert_count}")
    return experts_per_token


def read_extra_layers(fields: JsonFields) -> int:
    """Layers behind the last one that predict more tokens at a time."""
    key = "num_mtp_layers" if fields.has("num_mtp_layers") else "num_nextn_predict_layers"
    return fields.integer(key, 0, minimum=0)


def read_dtype(fields: JsonFields, default: str = "float32") -> str:
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    dtype = fields.text(key, default).removeprefix("torch.")
    if dtype not in CHECKPOINT_DTYPES:
        raise fields.error(key, f"one of {', '.join(CHECKPOINT_DTYPES)}")
    return dtype


def read_eos(source: CheckpointConfig, vocab_size: int) -> tuple[int, ...]:
    """Ids that end an answer, of both files."""
    token_ids: list[int] = []
    for fields in (source.fields, source.generation):
        if fields is not None:
            found = fields.integers("eos_token_id")
            if any(token_id >= vocab_size for token_id in found):
                raise fields.error("eos_token_id", f"below vocab_size = {vocab_size}")
            token_ids.extend(found)
    return tuple(dict.fromkeys(token_ids))


def _even(fields: JsonFields, head_dim: int) -> int:
    if head_dim % 2 != 0:
        raise fields.error("head_dim", f"even, for rotary embeddings; it comes out as {head_dim}")
    return head_dim
