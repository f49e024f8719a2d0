"""Falcon-H1: attention and a Mamba-2 mixer side by side behind one norm, then a gated MLP.

Its factors are numbers of the config that stand where the model was trained with them: moved into
weights, they would round differently.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.checkpoint.weights import Weight
from common.engine.config.model import ModelConfig
from common.engine.forward_batch import ForwardBatch
from common.engine.layers.embedding import Embedding, Head
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.mlp import GatedMlp
from common.engine.layers.norm import RmsNorm
from common.engine.models.causal_lm import CausalLm
from common.engine.models.falcon_config import FalconConfig, read_falcon
from common.engine.models.family import Family
from common.engine.models.gqa import GqaAttention
from common.engine.models.layer_pass import LayerPass
from common.engine.models.mamba_mixer import MambaMixer, mamba_cache


class ScaledKeyAttention(GqaAttention):
    """`GqaAttention` whose keys are scaled before they are rotated."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        super().__init__(context, config, layer)
        self.key_factor = falcon_config(config).key

    def turn(self, query_key: Tensor, layer_pass: LayerPass) -> tuple[Tensor, Tensor]:
        query, key = torch.split(query_key, [self.head_count, self.kv_head_count], dim=1)
        return super().turn(torch.cat((query, key * self.key_factor), dim=1), layer_pass)


class ScaledMixer(MambaMixer):
    """`MambaMixer` whose input and whose every projected part are scaled."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        falcon = falcon_config(config)
        name = f"model.layers.{layer}.mamba"
        super().__init__(context, falcon.mamba, name, layer, hidden_size=config.hidden_size)
        self.input_factor = falcon.mamba_in
        self.factors = torch.cat(
            [
                torch.full((size,), factor, dtype=context.dtype, device=context.device)
                for size, factor in zip(self.sizes, falcon.mamba_parts, strict=True)
            ]
        )

    def project(self, hidden: Tensor) -> Tensor:
        return self.projection(hidden * self.input_factor) * self.factors


class ScaledMlp(GatedMlp):
    """down(silu(gate(x) * factor) * up(x)) * factor."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        falcon = falcon_config(config)
        super().__init__(
            context,
            f"model.layers.{layer}.feed_forward",
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            has_bias=config.has_mlp_bias,
        )
        self.gate_factor, self.down_factor = falcon.mlp_gate, falcon.mlp_down

    def __call__(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(up * F.silu(gate * self.gate_factor)) * self.down_factor


class FalconLayer:
    """x + attention(norm(x)) + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        falcon = falcon_config(config)
        name = f"model.layers.{layer}"
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.norm = RmsNorm(context, f"{name}.input_layernorm", size, epsilon)
        self.attention = ScaledKeyAttention(context, config, layer)
        self.mixer = ScaledMixer(context, config, layer)
        self.mlp_norm = RmsNorm(context, f"{name}.pre_ff_layernorm", size, epsilon)
        self.mlp = ScaledMlp(context, config, layer)
        self.attention_in, self.attention_out = falcon.attention_in, falcon.attention_out
        self.mixer_out = falcon.mamba_out

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor:
        normed = self.norm(hidden)
        mixed = self.mixer(normed, layer_pass) * self.mixer_out
        attended = self.attention(normed * self.attention_in, layer_pass) * self.attention_out
        hidden = hidden + (mixed + attended)
        return hidden + self.mlp(self.mlp_norm(hidden))

    def weights(self) -> Iterator[Weight]:
        yield from self.norm.weights()
        yield from self.attention.weights()
        yield from self.mixer.weights()
        yield from self.mlp_norm.weights()
        yield from self.mlp.weights()


def build_falcon_layer(context: LayerContext, config: ModelConfig, layer: int) -> FalconLayer:
    """The layer of a global id."""
    return FalconLayer(context, config, layer)


class FalconLm(CausalLm):
    """Embeddings and logits are scaled."""

    def embed(self, embedding: Embedding, batch: ForwardBatch) -> Tensor:
        return embedding(batch.token_ids) * falcon_config(self.config).embedding

    def finish(self, head: Head, normed: Tensor) -> Tensor:
        return head(normed) * falcon_config(self.config).logits


def rename_falcon(name: str) -> str | None:
    """The last norm has a name of its own."""
    return name.replace("model.final_layernorm.", "model.norm.")


def falcon_config(config: ModelConfig) -> FalconConfig:
    """Settings that only these layers have."""
    assert isinstance(config.family, FalconConfig), config.architecture
    return config.family


FAMILIES = {
    "FalconH1ForCausalLM": Family(
        read_falcon, build_falcon_layer, mamba_cache, model=FalconLm, rename=rename_falcon
    )
}
