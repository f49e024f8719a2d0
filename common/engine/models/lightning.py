"""Ling and Ring 2.5 and 2.6: linear attention with a fixed decay, latent attention in every group's
last layer, grouped experts.

A head's state forgets at a rate that depends on the head and on the layer. The rate is made of the
layer's id counted from 0, as the serving engines do; the model code that was published beside the
checkpoints subtracts 1 from it, and no config says which one a checkpoint was trained with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.checkpoint.weights import Weight
from common.engine.config.model import ModelConfig
from common.engine.layers.delta_rule import STATE
from common.engine.layers.group_norm import GatedGroupNorm, GateStyle
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.linear import ColumnLinear, OutputBlock, RowLinear, features_of, shifted
from common.engine.layers.norm import QkNorm
from common.engine.layers.rotary import RotaryEmbedding
from common.engine.layers.ssd import SsdInputs, SsdRule, apply_ssd
from common.engine.models.causal_lm import CausalLm
from common.engine.models.deepseek import MlaAttention, build_mlp
from common.engine.models.family import Family, hybrid_mla_cache
from common.engine.models.latent_hybrid import rename_ling
from common.engine.models.layer_pass import LayerPass
from common.engine.models.lightning_config import lightning_config, read_ling_2_5
from common.engine.models.pre_norm_layer import LayerAttention, PreNormLayer
from common.layout.component import CacheComponent
from common.layout.families import lightning_components

LINEAR = "linear"
"""The name of linear attention's rotation: half-split pairs of a head's first channels."""


class LightningAttention:
    """S <- exp(-rate) S + v k^T, o = S q, per head. It is the recurrence of Mamba-2 with steps of
    one, keys and queries of every head, and nothing beside the state. All of it is fp32.
    """

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        name = f"model.layers.{layer}.self_attn"
        lightning = lightning_config(config)
        dim = lightning.head_dim
        size = config.head_count * dim
        heads = context.cut(config.head_count)
        features = features_of(heads, dim)
        self.layer = layer
        self.head_dim = dim
        self.head_count = len(heads)
        self.has_silu = lightning.has_silu
        blocks = [
            OutputBlock(f"{name}.query_key_value", 3 * size, shifted(features, part * size))
            for part in range(3)
        ]
        blocks.append(OutputBlock(f"{name}.g_proj", size, features))
        self.projection = ColumnLinear(context, config.hidden_size, blocks)
        self.qk_norm = QkNorm(
            context,
            name,
            head_count=len(heads),
            kv_head_count=len(heads),
            head_dim=dim,
            epsilon=config.rms_norm_eps,
        )
        rates = decay_rates(config.head_count, layer, config.layer_count)
        own = torch.tensor(rates[heads.start : heads.stop], device=context.device)
        self.rule = SsdRule(a=-own, d=torch.zeros_like(own))
        self.norm = GatedGroupNorm(
            context,
            f"{name}.g_norm",
            size=size,
            group_count=lightning.group_count,
            epsilon=config.rms_norm_eps,
            style=GateStyle.BEHIND_NORM,
            activation=torch.sigmoid,
        )
        self.output = RowLinear(
            context,
            f"{name}.o_proj",
            input_size=size,
            output_size=config.hidden_size,
        )

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor:
        slots, rows = layer_pass.slots, layer_pass.rows
        size = self.head_count * self.head_dim
        mixed, gate = torch.split(self.projection(hidden), [3 * size, size], dim=-1)
        mixed = mixed.float()
        if self.has_silu:
            mixed = F.silu(mixed)
        heads = mixed.view(len(hidden), 3 * self.head_count, self.head_dim)
        query_key, value = torch.split(heads, [2 * self.head_count, self.head_count], dim=1)
        query_key = layer_pass.rotations[LINEAR].apply(self.qk_norm(query_key))
        query, key = query_key.chunk(2, dim=1)
        inputs = SsdInputs(
            x=value,
            dt=torch.ones_like(value[..., 0]),
            b=key,
            c=query * self.head_dim**-0.5,
        )
        kept = slots.read(STATE, self.layer)
        states = kept.view(*kept.shape[:2], self.head_dim, self.head_dim)
        outputs, states = apply_ssd(self.rule, inputs, rows, states)
        slots.write(STATE, self.layer, None, states.flatten(2))
        return self.output(self.norm(outputs.flatten(1), gate).to(hidden.dtype))

    def weights(self) -> Iterator[Weight]:
        yield from self.projection.weights()
        yield from self.qk_norm.weights()
        yield from self.norm.weights()
        yield from self.output.weights()


def decay_rates(head_count: int, layer: int, layer_count: int) -> list[float]:
    """By how much the log of each head's state falls with a token; layer: global id."""
    depth = 1 - layer / (layer_count - 1) + 1e-5
    return [slope * depth for slope in head_slopes(head_count)]


def head_slopes(count: int) -> list[float]:
    """2^-(8/count), its square, its cube ..; the odd ones of twice as many fill up a count that is
    no power of two (Press et al., Train Short, Test Long)."""
    whole = 2 ** math.floor(math.log2(count))
    slopes = [2.0 ** (-8 * head / whole) for head in range(1, whole + 1)]
    return slopes + [2.0 ** (-8 * (2 * i + 1) / (2 * whole)) for i in range(count - whole)]


def build_lightning_layer(context: LayerContext, config: ModelConfig, layer: int) -> PreNormLayer:
    """The layer of a global id."""
    mixer: LayerAttention
    if layer in lightning_config(config).linear_layers:
        mixer = LightningAttention(context, config, layer)
    else:
        mixer = MlaAttention(context, config, layer)
    return PreNormLayer(context, config, layer, mixer, build_mlp(context, config, layer))


class LightningLm(CausalLm):
    """Rotates heads of linear attention in its own way, in fp32."""

    def build_rotaries(self) -> dict[str, RotaryEmbedding]:
        config = self.config
        linear = RotaryEmbedding(
            replace(config.rope, is_interleaved=False),
            lightning_config(config).rotated_dim,
            device=self.context.device,
            dtype=torch.float32,
        )
        return super().build_rotaries() | {LINEAR: linear}


def _cache(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
    lightning = lightning_config(config)
    slots = lightning_components(
        layers=lightning.linear_layers,
        head_count=config.head_count,
        head_dim=lightning.head_dim,
    )
    return (*hybrid_mla_cache(config, lightning.linear_layers, True, dtype), *slots)


FAMILIES = {
    "BailingMoeV2_5ForCausalLM": Family(
        read_ling_2_5, build_lightning_layer, _cache, model=LightningLm, rename=rename_ling
    )
}
