"""Gemma 2 and Gemma 3 (text): norms before and behind each half of a layer, scores scaled by a
constant of the config, capped or normalised, and a gated MLP with GELU.

Which layers see a window only is the cache's business. What the two differ in are values of
`ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from common.engine.attention.attention import AttentionPass
from common.engine.attention.scores import ScoreRule
from common.engine.attention.sdpa import SdpaPass
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.mlp import GatedMlp
from common.engine.layers.norm import OffsetNorm, OffsetQkNorm
from common.engine.layers.rotary import Rotation
from common.engine.model_config import ModelConfig
from common.engine.models.llama import GqaAttention
from common.engine.weights import Weight

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class GemmaAttention(GqaAttention):
    """`GqaAttention` with norms whose weights are offsets, and a rule for the scores."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        super().__init__(context, config, layer)
        assert config.gemma is not None
        self.rule = ScoreRule(scale=config.gemma.score_scale, softcap=config.gemma.score_softcap)
        if config.has_qk_norm:
            self.qk_norm = OffsetQkNorm(
                context,
                f"model.layers.{layer}.self_attn",
                head_count=self.head_count,
                kv_head_count=self.kv_head_count,
                head_dim=self.head_dim,
                epsilon=config.rms_norm_eps,
            )

    def __call__(self, hidden: Tensor, rotation: Rotation, attention: AttentionPass) -> Tensor:
        assert isinstance(attention, SdpaPass), "scores with a rule are SDPA's"
        token_count = hidden.shape[0]
        heads = self.qkv(hidden).view(token_count, -1, self.head_dim)
        query_key = heads[:, : self.head_count + self.kv_head_count]
        if self.qk_norm is not None:
            query_key = self.qk_norm(query_key)
        query_key = rotation.apply(query_key)
        attended = attention.attend(
            self.layer,
            query_key[:, : self.head_count],
            query_key[:, self.head_count :],
            heads[:, self.head_count + self.kv_head_count :],
            self.rule,
        )
        return self.output(attended.reshape(token_count, -1))


class GemmaMlp(GatedMlp):
    """down(gelu(gate(x)) * up(x))."""

    def __call__(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(F.gelu(gate, approximate="tanh") * up)


class GemmaLayer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        name = f"model.layers.{layer}"
        self.norms = tuple(
            OffsetNorm(context, f"{name}.{part}", config.hidden_size, config.rms_norm_eps)
            for part in NORMS
        )
        self.attention = GemmaAttention(context, config, layer)
        self.mlp = GemmaMlp(
            context,
            f"{name}.mlp",
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
        )

    def __call__(self, hidden: Tensor, rotation: Rotation, attention: AttentionPass) -> Tensor:
        before, behind, before_mlp, behind_mlp = self.norms
        hidden = hidden + behind(self.attention(before(hidden), rotation, attention))
        return hidden + behind_mlp(self.mlp(before_mlp(hidden)))

    def weights(self) -> Iterator[Weight]:
        for norm in self.norms:
            yield from norm.weights()
        yield from self.attention.weights()
        yield from self.mlp.weights()


def build_gemma_layer(context: LayerContext, config: ModelConfig, layer: int) -> GemmaLayer:
    """The layer of a global id."""
    return GemmaLayer(context, config, layer)
