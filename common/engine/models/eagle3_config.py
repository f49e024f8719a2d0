"""Reads config.json of an EAGLE-3 head: one layer that guesses tokens of another checkpoint.

Published heads name themselves LlamaForCausalLMEagle3, Eagle3LlamaForCausalLM, or as a plain Llama.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common.engine.config.draft import DraftConfig
from common.engine.config.json_fields import JsonFields
from common.engine.config.model import ModelConfig
from common.engine.config.reading import CheckpointConfig
from common.engine.models.llama_config import read_llama
from common.errors import ConfigError
from common.speculative import SpeculativeAlgorithm

LLAMA = "LlamaForCausalLM"
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", LLAMA)
TARGETS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
TAP_COUNT = 3


def read_eagle3(config: ModelConfig, draft_path: Path) -> DraftConfig:
    """config: of the model that it guesses for, as served.

    Raises: ConfigError naming the value that is missing, impossible or not implemented, or what of
        it does not fit the model.
    """
    if config.architecture not in TARGETS:
        raise ConfigError(
            f"--speculative-algorithm {SpeculativeAlgorithm.EAGLE3}: a model must be one of "
            f"{', '.join(TARGETS)}; this one is {config.architecture}"
        )
    source = CheckpointConfig.read(draft_path, architectures=ARCHITECTURES)
    fields = source.fields
    own = read_llama(replace(source, architecture=LLAMA))
    _check(fields, own, config)
    layer = config.layer_count
    own = replace(
        own, layer_count=layer + 1, windows=(0,) * (layer + 1), dtype=config.dtype, moe=None
    )
    vocab_size = fields.integer("draft_vocab_size", config.vocab_size)
    if vocab_size > config.vocab_size:
        raise fields.error("draft_vocab_size", f"at most the model's {config.vocab_size}")
    return DraftConfig(
        SpeculativeAlgorithm.EAGLE3, own, (layer,), _read_taps(fields, layer), vocab_size
    )


def _check(fields: JsonFields, own: ModelConfig, config: ModelConfig) -> None:
    """What a head has in common with its model, and that it is one layer."""
    if own.layer_count != 1:
        raise fields.error("num_hidden_layers", "1")
    for name, ours, theirs in (
        ("hidden_size", own.hidden_size, config.hidden_size),
        ("vocab_size", own.vocab_size, config.vocab_size),
    ):
        if ours != theirs:
            raise fields.error(name, f"the model's {theirs}")
    if fields.integer("target_hidden_size", config.hidden_size) != config.hidden_size:
        raise fields.error("target_hidden_size", f"the model's {config.hidden_size}")
    if own.has_qkv_bias or own.has_mlp_bias or fields.flag("bias", False):
        raise ConfigError(f"{fields.where}: biases: must be absent in an EAGLE-3 head")


def _read_taps(fields: JsonFields, layer_count: int) -> tuple[int, ...]:
    """The layers whose inputs are read; the published code takes an early, a middle and a late one
    unless the config names the layers whose outputs it wants."""
    eagle = fields.object("eagle_config")
    key = "eagle_aux_hidden_state_layer_ids"
    if eagle is not None and eagle.has(key):
        outputs = eagle.integers(key)
        taps = tuple(layer + 1 for layer in outputs)
        is_fit = len(set(taps)) == TAP_COUNT and all(layer <= layer_count for layer in taps)
        if not is_fit:
            raise eagle.error(key, f"{TAP_COUNT} different layers in 0..{layer_count - 1}")
        return taps
    taps = (2, layer_count // 2, layer_count - 3)
    if len(set(taps)) < TAP_COUNT or min(taps) < 0:
        raise ConfigError(
            f"{fields.where}: eagle_config.{key} is missing: a model of {layer_count} layers has "
            "no early, middle and late one of its own"
        )
    return taps
