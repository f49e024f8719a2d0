"""The EAGLE-3 head of the demo model as it is trained, and its files as published heads have them.

Knows nothing of lessons. One layer over [embedding | state] of each token; states are those that
leave the model's three layers, reduced to one.
"""

import json
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config

from demo.model import ROPE_THETA

TAPPED: Final = (0, 1, 2)
"""Layers of the model whose outputs the head reads."""


class DraftHead(nn.Module):
    """Names of parameters are those of a published checkpoint."""

    def __init__(self, config: Qwen3Config, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        size, dim = config.hidden_size, config.head_dim
        self.config = config
        self.fc = nn.Linear(len(TAPPED) * size, size, bias=False)
        self.midlayer = _MidLayer(config)
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        half = torch.arange(dim // 2) / (dim // 2)
        self._rates = ROPE_THETA**-half

    def reduce(self, tapped: Tensor) -> Tensor:
        """float32[.., 3 * hidden] to the states that the layer takes."""
        return self.fc(tapped)  # type: ignore[no-any-return]

    def forward(self, states: Tensor, embedded: Tensor) -> Tensor:
        """States and the next tokens' embeddings, both [lesson, position, hidden], to states."""
        angles = torch.arange(states.shape[1])[:, None] * self._rates
        return self.midlayer(states, embedded, angles)  # type: ignore[no-any-return]


class _MidLayer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, epsilon)
        self.hidden_norm = nn.RMSNorm(size, epsilon)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, epsilon)
        self.mlp = _Mlp(size, config.intermediate_size)

    def forward(self, states: Tensor, embedded: Tensor, angles: Tensor) -> Tensor:
        inputs = torch.cat((self.input_layernorm(embedded), self.hidden_norm(states)), dim=-1)
        states = states + self.self_attn(inputs, angles)
        return states + self.mlp(self.post_attention_layernorm(states))  # type: ignore[no-any-return]


class _Attention(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        size, self._dim = config.hidden_size, config.head_dim
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads or heads
        self.q_proj = nn.Linear(2 * size, heads * self._dim, bias=False)
        self.k_proj = nn.Linear(2 * size, kv_heads * self._dim, bias=False)
        self.v_proj = nn.Linear(2 * size, kv_heads * self._dim, bias=False)
        self.o_proj = nn.Linear(heads * self._dim, size, bias=False)

    def forward(self, inputs: Tensor, angles: Tensor) -> Tensor:
        query, key, value = (
            part(inputs).unflatten(-1, (-1, self._dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = functional.scaled_dot_product_attention(
            _turn(query, angles), _turn(key, angles), value, is_causal=True, enable_gqa=True
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _Mlp(nn.Module):
    def __init__(self, size: int, inner_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner_size, bias=False)
        self.up_proj = nn.Linear(size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        return self.down_proj(inner)  # type: ignore[no-any-return]


def _turn(heads: Tensor, angles: Tensor) -> Tensor:
    """Rotate [.., position, head dim] by float32[position, head dim / 2], in half-split pairs."""
    cos, sin = angles.cos(), angles.sin()
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def write_draft(head: DraftHead, folder: Path) -> None:
    """Write config.json and model.safetensors; weights are rounded to bf16."""
    config = head.config
    published = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPPED)},
        "eos_token_id": config.eos_token_id,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "llama",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published, indent=2) + "\n")
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in head.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
