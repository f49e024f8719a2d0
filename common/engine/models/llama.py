"""Llama, Mistral, Qwen2 and Qwen3: pre-norm layers of grouped-query attention and a gated MLP.

Their differences (biases, q/k norms, head sizes) are values of `ModelConfig`.
"""

from __future__ import annotations

from common.engine.config.model import ModelConfig
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.mlp import GatedMlp
from common.engine.models.family import Family, gqa_cache
from common.engine.models.gqa import GqaAttention
from common.engine.models.llama_config import read_llama
from common.engine.models.pre_norm_layer import PreNormLayer


def build_llama_layer(context: LayerContext, config: ModelConfig, layer: int) -> PreNormLayer:
    """The layer of a global id, with a plain MLP."""
    mlp = GatedMlp(
        context,
        f"model.layers.{layer}.mlp",
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        has_bias=config.has_mlp_bias,
    )
    return PreNormLayer(context, config, layer, GqaAttention(context, config, layer), mlp)


_LLAMA = Family(read_llama, build_llama_layer, gqa_cache)
FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
}
