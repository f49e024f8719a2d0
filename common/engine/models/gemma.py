"""Gemma 2 and Gemma 3 (text): norms before and behind each half of a layer, scores scaled by a
constant of the config, capped or normalised, and a gated MLP with GELU.

Which layers see a window only is the cache's business. What the two differ in are values of
`ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from common.engine.attention.scores import ScoreRule
from common.engine.checkpoint.weights import Weight, text_name
from common.engine.config.model import ModelConfig
from common.engine.forward_batch import ForwardBatch
from common.engine.layers.embedding import Embedding, Head
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.mlp import GatedMlp, gated_gelu
from common.engine.layers.norm import OffsetNorm, OffsetQkNorm
from common.engine.layers.rotary import RotaryEmbedding
from common.engine.models.causal_lm import CausalLm
from common.engine.models.family import Family, gqa_cache
from common.engine.models.gemma_config import GemmaConfig, read_gemma
from common.engine.models.gqa import GqaAttention
from common.engine.models.layer_pass import LOCAL, MAIN, LayerPass

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class GemmaAttention(GqaAttention):
    """`GqaAttention` with norms whose weights are offsets, and a rule for the scores."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        gemma = gemma_config(config)
        super().__init__(
            context,
            config,
            layer,
            norm=OffsetQkNorm,
            rotation=LOCAL if layer in gemma.local_layers else MAIN,
            rule=ScoreRule(scale=config.scores.scale, softcap=config.scores.softcap),
        )


class GemmaLayer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        name = f"model.layers.{layer}"
        self.norms = tuple(
            OffsetNorm(context, f"{name}.{part}", config.hidden_size, config.rms_norm_eps)
            for part in NORMS
        )
        self.attention = GemmaAttention(context, config, layer)
        self.mlp = GatedMlp(
            context,
            f"{name}.mlp",
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            activation=gated_gelu,
        )

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor:
        before, behind, before_mlp, behind_mlp = self.norms
        hidden = hidden + behind(self.attention(before(hidden), layer_pass))
        return hidden + behind_mlp(self.mlp(before_mlp(hidden)))

    def weights(self) -> Iterator[Weight]:
        for norm in self.norms:
            yield from norm.weights()
        yield from self.attention.weights()
        yield from self.mlp.weights()


def build_gemma_layer(context: LayerContext, config: ModelConfig, layer: int) -> GemmaLayer:
    """The layer of a global id."""
    return GemmaLayer(context, config, layer)


class GemmaLm(CausalLm):
    """Embeddings scaled by the root of their size, logits that may be capped, and window layers
    that may have a rotation of their own."""

    norm_type = OffsetNorm

    def build_rotaries(self) -> dict[str, RotaryEmbedding]:
        rotaries = super().build_rotaries()
        local_rope = gemma_config(self.config).local_rope
        if local_rope is not None:
            rotaries[LOCAL] = RotaryEmbedding(
                local_rope,
                self.config.rotary_dim,
                device=self.context.device,
                dtype=self.context.dtype,
            )
        return rotaries

    def embed(self, embedding: Embedding, batch: ForwardBatch) -> Tensor:
        return embed_scaled(embedding, batch.token_ids, self.config.hidden_size)

    def finish(self, head: Head, normed: Tensor) -> Tensor:
        return soft_capped(head(normed), gemma_config(self.config).logit_softcap)


def embed_scaled(embedding: Embedding, token_ids: Tensor, size: int) -> Tensor:
    """Embeddings times the root of `size`."""
    hidden = embedding(token_ids)
    # Models were trained with the factor rounded to the dtype of the weights.
    return hidden * float(torch.tensor(size**0.5, dtype=hidden.dtype))


def soft_capped(logits: Tensor, softcap: float) -> Tensor:
    """c * tanh(x / c); as they are if c is 0."""
    return torch.tanh(logits / softcap) * softcap if softcap else logits


def gemma_config(config: ModelConfig) -> GemmaConfig:
    """Settings that only these layers have."""
    assert isinstance(config.family, GemmaConfig), config.architecture
    return config.family


_GEMMA = Family(read_gemma, build_gemma_layer, gqa_cache, model=GemmaLm)
FAMILIES = {
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma3ForConditionalGeneration": replace(_GEMMA, rename=text_name),
}
