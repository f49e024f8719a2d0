"""Ling 2.5 in plain torch, to check the engine with: transformers has no model of it.

Tensors have their published names. Linear attention is written as attention whose scores fall with
distance, over all keys and values so far: no state, no chunks, no pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

Past = tuple[Tensor, Tensor]


class LingConfig(PreTrainedConfig):
    """The values are whatever config.json has."""

    model_type = "ling_2_5_reference"


@dataclass
class Output:
    """past_key_values: what every layer needs of the tokens so far, [token, ..] each."""

    logits: Tensor
    past_key_values: list[Past]


class Norm(nn.Module):
    def __init__(self, size: int, epsilon: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon, self.groups = epsilon, groups

    def forward(self, hidden: Tensor) -> Tensor:
        grouped = hidden.unflatten(-1, (self.groups, -1))
        scale = torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (grouped * scale).flatten(-2) * self.weight


def angles(positions: Tensor, dim: int, theta: float) -> Tensor:
    """[token, 1, dim / 2]."""
    return positions[:, None, None] / theta ** (torch.arange(0, dim, 2) / dim)


def rotate(first: Tensor, second: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    return (
        first * angle.cos() - second * angle.sin(),
        second * angle.cos() + first * angle.sin(),
    )


def rotate_halves(heads: Tensor, angle: Tensor) -> Tensor:
    """The first channels of heads, in pairs (i, i + half)."""
    half = angle.shape[-1]
    turned = rotate(heads[..., :half], heads[..., half : 2 * half], angle)
    return torch.cat((*turned, heads[..., 2 * half :]), dim=-1)


def rotate_pairs(heads: Tensor, angle: Tensor) -> Tensor:
    """All channels of heads, in pairs (2i, 2i + 1)."""
    return torch.stack(rotate(heads[..., 0::2], heads[..., 1::2], angle), dim=-1).flatten(-2)


def slopes(head_count: int) -> list[float]:
    if math.log2(head_count).is_integer():
        start = 2 ** (-(2 ** -(math.log2(head_count) - 3)))
        return [start * start**head for head in range(head_count)]
    closest = 2 ** math.floor(math.log2(head_count))
    return slopes(closest) + slopes(2 * closest)[0::2][: head_count - closest]


class LinearAttention(nn.Module):
    def __init__(self, config: LingConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        size = config.num_attention_heads * config.head_dim
        epsilon = config.rms_norm_eps
        self.query_key_value = nn.Linear(config.hidden_size, 3 * size, bias=False)
        self.query_layernorm = Norm(config.head_dim, epsilon)
        self.key_layernorm = Norm(config.head_dim, epsilon)
        self.g_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.g_norm = Norm(size, epsilon, config.group_norm_size)
        self.dense = nn.Linear(size, config.hidden_size, bias=False)
        depth = 1 - layer / (config.num_hidden_layers - 1) + 1e-5
        self.rates = [slope * depth for slope in slopes(config.num_attention_heads)]

    def forward(self, hidden: Tensor, positions: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        config = self.config
        mixed = self.query_key_value(hidden)
        if config.linear_silu:
            mixed = F.silu(mixed)
        query, key, value = mixed.view(len(hidden), 3, -1, config.head_dim).unbind(1)
        rotated_dim = int(config.head_dim * config.partial_rotary_factor)
        angle = angles(positions, rotated_dim, config.rope_theta)
        query = rotate_halves(self.query_layernorm(query), angle)
        key = rotate_halves(self.key_layernorm(key), angle)
        if past is not None:
            key, value = torch.cat((past[0], key)), torch.cat((past[1], value))
        distance = positions[:, None] - torch.arange(len(key))
        decay = torch.exp(-torch.tensor(self.rates)[:, None, None] * distance.clamp(min=0))
        scores = torch.einsum("thd,shd->hts", query, key) * config.head_dim**-0.5
        scores = (scores * decay).masked_fill(distance < 0, 0.0)
        mixed = torch.einsum("hts,shd->thd", scores, value).flatten(1)
        return self.dense(self.g_norm(mixed) * self.g_proj(hidden).sigmoid()), (key, value)


class LatentAttention(nn.Module):
    def __init__(self, config: LingConfig) -> None:
        super().__init__()
        self.config = config
        heads, hidden = config.num_attention_heads, config.hidden_size
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
        self.q_a_layernorm = Norm(config.q_lora_rank, 1e-6)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.kv_lora_rank + rope, bias=False)
        self.kv_a_layernorm = Norm(config.kv_lora_rank, 1e-6)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, heads * (nope + value), bias=False)
        self.dense = nn.Linear(heads * value, hidden, bias=False)

    def forward(self, hidden: Tensor, positions: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        config = self.config
        nope, rope, value_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        angle = angles(positions, rope, config.rope_theta)
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        plain, turned = query.view(len(hidden), -1, nope + rope).split([nope, rope], dim=-1)
        query = torch.cat((plain, rotate_pairs(turned, angle)), dim=-1)
        latent, turned = self.kv_a_proj_with_mqa(hidden).split([config.kv_lora_rank, rope], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent))
        plain, value = expanded.view(len(hidden), -1, nope + value_dim).split(
            [nope, value_dim], dim=-1
        )
        turned = rotate_pairs(turned[:, None], angle).expand(-1, plain.shape[1], -1)
        key = torch.cat((plain, turned), dim=-1)
        if past is not None:
            key, value = torch.cat((past[0], key)), torch.cat((past[1], value))
        scores = torch.einsum("thd,shd->hts", query, key) * (nope + rope) ** -0.5
        is_later = torch.arange(len(key)) > positions[:, None]
        shares = scores.masked_fill(is_later, float("-inf")).softmax(dim=-1)
        mixed = torch.einsum("hts,shd->thd", shares, value).flatten(1)
        return self.dense(mixed), (key, value)


class Mlp(nn.Module):
    def __init__(self, hidden_size: int, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, size, bias=False)
        self.up_proj = nn.Linear(hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Gate(nn.Module):
    def __init__(self, config: LingConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, hidden: Tensor) -> Tensor:
        """The share of every expert, 0 for those that are not chosen."""
        config = self.config
        scores = F.linear(hidden, self.weight).sigmoid()
        groups = (scores + self.expert_bias).view(len(hidden), config.n_group, -1)
        group_scores = groups.topk(2, dim=-1).values.sum(dim=-1)
        worst_chosen = group_scores.topk(config.topk_group, dim=-1).values[:, -1:]
        wanted = groups.masked_fill((group_scores < worst_chosen)[..., None], -1e9).flatten(1)
        chosen = wanted.topk(config.num_experts_per_tok, dim=-1).indices
        shares = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        return config.routed_scaling_factor * shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)


class Experts(nn.Module):
    def __init__(self, config: LingConfig) -> None:
        super().__init__()
        size = config.moe_intermediate_size
        self.gate = Gate(config)
        self.experts = nn.ModuleList(
            Mlp(config.hidden_size, size) for _ in range(config.num_experts)
        )
        self.shared_experts = Mlp(config.hidden_size, size * config.num_shared_experts)

    def forward(self, hidden: Tensor) -> Tensor:
        shares = self.gate(hidden)
        routed = sum(shares[:, i, None] * expert(hidden) for i, expert in enumerate(self.experts))
        return routed + self.shared_experts(hidden)


class Layer(nn.Module):
    def __init__(self, config: LingConfig, layer: int) -> None:
        super().__init__()
        epsilon = config.rms_norm_eps
        is_last = (layer + 1) % config.layer_group_size == 0
        self.input_layernorm = Norm(config.hidden_size, epsilon)
        self.attention = LatentAttention(config) if is_last else LinearAttention(config, layer)
        self.post_attention_layernorm = Norm(config.hidden_size, epsilon)
        is_dense = layer < config.first_k_dense_replace
        self.mlp = (
            Mlp(config.hidden_size, config.intermediate_size) if is_dense else Experts(config)
        )

    def forward(self, hidden: Tensor, positions: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        mixed, past = self.attention(self.input_layernorm(hidden), positions, past)
        hidden = hidden + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), past


class Body(nn.Module):
    def __init__(self, config: LingConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class BailingMoeV2_5ForCausalLM(PreTrainedModel):
    """Named as published, because that is what config.json is to say."""

    config_class = LingConfig

    def __init__(self, config: LingConfig) -> None:
        super().__init__(config)
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: list[Past] | None = None,
        use_cache: bool = True,
    ) -> Output:
        """input_ids: [1, new tokens]. Returns: logits [1, new tokens, vocabulary]."""
        hidden = self.model.word_embeddings(input_ids[0])
        pasts: list[Past | None] = [None] * len(self.model.layers)
        start = 0
        if past_key_values is not None:
            pasts[:] = past_key_values
            start = len(past_key_values[0][0])
        positions = start + torch.arange(len(hidden))
        after = []
        for layer, past in zip(self.model.layers, pasts, strict=True):
            hidden, kept = layer(hidden, positions, past)
            after.append(kept)
        return Output(self.lm_head(self.model.norm(hidden))[None], after)
