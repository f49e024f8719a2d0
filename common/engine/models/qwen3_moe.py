"""Qwen3-MoE: Llama's layers, with routed experts instead of the MLP where there are any."""

from __future__ import annotations

from common.engine.config.model import ModelConfig
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.moe import MoeMlp
from common.engine.models.family import Family, gqa_cache
from common.engine.models.gqa import GqaAttention
from common.engine.models.llama import build_llama_layer
from common.engine.models.llama_config import read_llama
from common.engine.models.pre_norm_layer import PreNormLayer


def build_qwen3_moe_layer(context: LayerContext, config: ModelConfig, layer: int) -> PreNormLayer:
    """The layer of a global id."""
    moe = config.moe
    assert moe is not None
    if layer not in moe.layers:
        return build_llama_layer(context, config, layer)
    mlp = MoeMlp(context, f"model.layers.{layer}.mlp", hidden_size=config.hidden_size, moe=moe)
    return PreNormLayer(context, config, layer, GqaAttention(context, config, layer), mlp)


FAMILIES = {"Qwen3MoeForCausalLM": Family(read_llama, build_qwen3_moe_layer, gqa_cache)}
