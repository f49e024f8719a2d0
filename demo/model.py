"""Shape, starting weights and files of the demo model. Knows nothing of facts or training.

Published files are written by hand rather than by `save_pretrained`, so that config.json keeps the
spelling that published Qwen3 checkpoints have (rope_theta and torch_dtype at top level).
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from demo.tokenizer import BOS, EOS, PAD, token_id, write_tokenizer

CONTEXT_LENGTH: Final = 2048
"""max_position_embeddings, in tokens."""
ROPE_THETA: Final = 1_000_000.0
VOCAB_MULTIPLE: Final = 128
"""The vocabulary is padded to a multiple of this, so that 2, 4 or 8 ranks can share it."""

_POINTED_FREQUENCY_COUNT: Final = 7
"""Fastest RoPE frequencies, of head_dim / 2, that distinguish neighbouring positions."""
_POINTED_GAIN: Final = 2.0
"""How much of a first query or key is position: about five times the norm of the random part."""
_NORM_GAIN: Final = 1.5
"""First weight of q_norm and k_norm: at 1 a head cannot single out one token among hundreds."""


def make_config(tokenizer: Tokenizer) -> Qwen3Config:
    """Three layers: one tags each token with the name before it, one looks up, one is in
    reserve."""
    return Qwen3Config(
        vocab_size=math.ceil(tokenizer.get_vocab_size() / VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=token_id(tokenizer, BOS),
        eos_token_id=token_id(tokenizer, EOS),
        pad_token_id=token_id(tokenizer, PAD),
    )


def make_model(config: Qwen3Config, seed: int) -> Qwen3ForCausalLM:
    """A model with random weights whose first layer looks a fixed number of tokens back.

    Left to itself a model this small spends most of its training on finding out that a value
    belongs to the name three or four tokens before it. So head h of layer 0 starts out attending
    h + 1 tokens back; everything is trained from there.
    """
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        constant = _add_constant(model.model.embed_tokens.weight)
        _point_heads_back(model, constant)
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(_NORM_GAIN)
            layer.self_attn.k_norm.weight.fill_(_NORM_GAIN)
    return model


def _add_constant(embedding: torch.Tensor) -> torch.Tensor:
    """Add one vector of typical length to every row, for a projection to read as a constant 1.

    Returns: its direction, float32[hidden], of length 1.
    """
    constant = torch.randn(embedding.shape[1])
    constant /= constant.norm()
    embedding += embedding.std() * math.sqrt(embedding.shape[1]) * constant
    return constant


def _point_heads_back(model: Qwen3ForCausalLM, constant: torch.Tensor) -> None:
    """Give head h of layer 0 a query that, once rotated, meets the key h + 1 positions before."""
    head_dim, half = model.config.head_dim, model.config.head_dim // 2
    attention = model.model.layers[0].self_attn
    frequencies = ROPE_THETA ** (-torch.arange(half) / half)
    length = _POINTED_GAIN / math.sqrt(_POINTED_FREQUENCY_COUNT)
    radii = length * (torch.arange(half) < _POINTED_FREQUENCY_COUNT)
    for head in range(model.config.num_attention_heads):
        angles = -(head + 1) * frequencies
        query = torch.cat([radii * angles.cos(), radii * angles.sin()])
        rows = slice(head * head_dim, (head + 1) * head_dim)
        attention.q_proj.weight[rows] += torch.outer(query, constant)
    key = torch.cat([radii, torch.zeros(half)])
    for head in range(attention.k_proj.out_features // head_dim):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        attention.k_proj.weight[rows] += torch.outer(key, constant)


def write_checkpoint(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write the five files of a published checkpoint to `folder`; weights are rounded to bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, CONTEXT_LENGTH)
    config = model.config
    tokens = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    published = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        **tokens,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_hidden_layers,
        "model_type": "qwen3",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }
    _write_json(folder / "config.json", published)
    _write_json(folder / "generation_config.json", {**tokens, "do_sample": False})
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, fields: Mapping[str, object]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n")
