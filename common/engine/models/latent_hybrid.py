"""Kimi-Linear and Ling 3.0: most layers recur, the others attend to latent rows, grouped experts.

Kimi's latent layers rotate nothing, Ling's multiply the output of each head by a gate of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

from common.engine.checkpoint.weights import Weight
from common.engine.config.model import ModelConfig
from common.engine.layers.choose_delta import choose_delta_kernels
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.linear import ColumnLinear, OutputBlock
from common.engine.layers.rotary import RotaryEmbedding
from common.engine.models.causal_lm import CausalLm
from common.engine.models.deepseek import MlaAttention, build_mlp
from common.engine.models.family import Family, hybrid_mla_cache
from common.engine.models.kda_config import kda_config, read_kimi_linear, read_ling_3
from common.engine.models.kimi_delta import KimiDelta, delta_shape
from common.engine.models.layer_pass import LayerPass
from common.engine.models.pre_norm_layer import LayerAttention, PreNormLayer
from common.layout.component import CacheComponent
from common.layout.families import gated_delta_components

KIMI_EXPERT = re.compile(r"\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.")
KIMI_EXPERT_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

LING_PARTS = {"dense": "o_proj", "query_layernorm": "q_norm", "key_layernorm": "k_norm"}


class UnrotatedMla(MlaAttention):
    """Latent attention that knows of positions only what the recurrence tells it."""

    def turn(self, query: Tensor, key: Tensor, layer_pass: LayerPass) -> None:
        """Nothing is rotated."""


class HeadGatedMla(MlaAttention):
    """Latent attention whose heads are multiplied by the sigmoid of a gate each."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        super().__init__(context, config, layer)
        block = OutputBlock(
            f"model.layers.{layer}.self_attn.g_proj",
            config.head_count,
            context.cut(config.head_count),
        )
        self.head_gate = ColumnLinear(context, config.hidden_size, [block])

    def gate(self, attended: Tensor, hidden: Tensor) -> Tensor:
        gate = self.head_gate(hidden).float().sigmoid().to(attended.dtype)
        return attended * gate[:, :, None]

    def weights(self) -> Iterator[Weight]:
        yield from super().weights()
        yield from self.head_gate.weights()


def build_kda_layer(context: LayerContext, config: ModelConfig, layer: int) -> PreNormLayer:
    """The layer of a global id."""
    kda = kda_config(config)
    mixer: LayerAttention
    if layer in kda.linear_layers:
        mixer = KimiDelta(context, config, layer)
    elif kda.has_head_gate:
        mixer = HeadGatedMla(context, config, layer)
    else:
        mixer = UnrotatedMla(context, config, layer)
    return PreNormLayer(context, config, layer, mixer, build_mlp(context, config, layer))


class KdaLm(CausalLm):
    """Says which kernels compute the recurrence, and turns nothing if nothing is turned."""

    def build_rotaries(self) -> dict[str, RotaryEmbedding]:
        return super().build_rotaries() if kda_config(self.config).is_rotated else {}

    def describe(self) -> dict[str, str]:
        choice = choose_delta_kernels(delta_shape(kda_config(self.config), self.context))
        return super().describe() | {"delta rule": f"{choice.kernels.name}: {choice.reason}"}


def rename_kimi_linear(name: str) -> str | None:
    """A name in a checkpoint as layers ask for it."""
    name = KIMI_EXPERT.sub(
        lambda found: f".mlp.experts.{found[1]}.{KIMI_EXPERT_PARTS[found[2]]}.", name
    )
    return name.replace(".block_sparse_moe.", ".mlp.")


def rename_ling(name: str) -> str | None:
    """A name in a checkpoint as layers ask for it, of every generation."""
    if name.startswith(("mtp.", "model.mtp")):
        # Layers that predict more tokens at a time.
        return None
    name = re.sub(r"^model\.word_embeddings\.", "model.embed_tokens.", name)
    name = name.replace(".attention.", ".self_attn.")
    for published, asked in LING_PARTS.items():
        name = name.replace(f".self_attn.{published}.", f".self_attn.{asked}.")
    return name.replace(".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias")


def _cache(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
    kda = kda_config(config)
    heads = (kda.head_count, kda.head_dim)
    slots = gated_delta_components(
        layers=kda.linear_layers,
        key_heads=heads,
        value_heads=heads,
        kernel_size=kda.kernel_size,
        conv_dtype=config.dtype,
        state_dtype="float32",
    )
    return (*hybrid_mla_cache(config, kda.linear_layers, kda.is_rotated, dtype), *slots)


FAMILIES = {
    "KimiLinearForCausalLM": Family(
        read_kimi_linear, build_kda_layer, _cache, model=KdaLm, rename=rename_kimi_linear
    ),
    "BailingHybridForCausalLM": Family(
        read_ling_3, build_kda_layer, _cache, model=KdaLm, rename=rename_ling
    ),
}
