"""DeepSeek V3.2 and GLM-5: latent attention to the tokens that an indexer chooses.

Every rank computes all of the indexer, so that all of them choose alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.attention.best_keys import KeyChoice
from common.engine.attention.latent import LatentPass, Selection
from common.engine.attention.sparse import INDEX_KEY, select
from common.engine.checkpoint.weights import Weight
from common.engine.config.model import ModelConfig
from common.engine.layers.fused_rotation import AnyRotation
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.linear import whole_linear
from common.engine.layers.norm import LayerNorm
from common.engine.layers.rotary import RotaryEmbedding
from common.engine.models.causal_lm import CausalLm
from common.engine.models.deepseek import MlaAttention, build_mlp, nextn_names
from common.engine.models.deepseek_sparse_config import read_sparse, sparse_config
from common.engine.models.draft import NextnFamily, with_layer
from common.engine.models.family import Family
from common.engine.models.layer_pass import MAIN, LayerPass
from common.engine.models.pre_norm_layer import PreNormLayer
from common.layout.component import CacheComponent
from common.layout.families import sparse_mla_components

INDEX = "index"
"""Name of the indexer's rotation where it pairs channels in another way than attention."""

KEY_NORM_EPSILON = 1e-6


class TokenIndexer:
    """Queries from the input of attention's queries; keys and weights from the hidden states."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        assert config.mla is not None and config.mla.query_rank is not None
        name = f"model.layers.{layer}.self_attn.indexer"
        sparse = sparse_config(config)
        self.name = name
        self.head_count = sparse.head_count
        self.token_count = sparse.token_count
        self.rotated_dim = config.mla.rope_dim
        self.rotation = INDEX if _has_own_rotation(config) else MAIN
        self.query = whole_linear(
            context, f"{name}.wq_b", config.mla.query_rank, sparse.head_count * sparse.head_dim,
            has_bias=False,
        )  # fmt: skip
        self.key = whole_linear(
            context, f"{name}.wk", config.hidden_size, sparse.head_dim, has_bias=False
        )
        self.key_norm = LayerNorm(context, f"{name}.k_norm", sparse.head_dim, KEY_NORM_EPSILON)
        # In fp32 whatever the model's dtype: a rounded weight chooses other tokens.
        shape = (sparse.head_count, config.hidden_size)
        self.weigh = torch.empty(shape, dtype=torch.float32, device=context.device)
        # Of the average over the heads, and of scores by the size of a head.
        self.scale = (sparse.head_count * sparse.head_dim) ** -0.5

    def __call__(
        self, hidden: Tensor, query_input: Tensor, layer_pass: LayerPass
    ) -> tuple[Tensor, KeyChoice]:
        """The new tokens' keys [T, dim] and what chooses among all keys."""
        rotation = layer_pass.rotations[self.rotation]
        query = self.query(query_input).view(hidden.shape[0], self.head_count, -1)
        key = self.key_norm(self.key(hidden))
        weights = F.linear(hidden.float(), self.weigh) * self.scale
        choice = KeyChoice(INDEX_KEY, self._rotate(query, rotation), weights, self.token_count)
        return self._rotate(key[:, None], rotation)[:, 0], choice

    def _rotate(self, heads: Tensor, rotation: AnyRotation) -> Tensor:
        rotated = rotation.apply(heads[..., : self.rotated_dim])
        return torch.cat((rotated, heads[..., self.rotated_dim :]), dim=-1)

    def weights(self) -> Iterator[Weight]:
        yield from self.query.weights()
        yield from self.key.weights()
        yield from self.key_norm.weights()
        yield Weight.whole(f"{self.name}.weights_proj.weight", self.weigh)


class SparseMlaAttention(MlaAttention):
    """`MlaAttention` to the tokens that its indexer chooses, or that of a layer before it."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        super().__init__(context, config, layer)
        self.indexer: TokenIndexer | None = None
        if layer in sparse_config(config).layers:
            self.indexer = TokenIndexer(context, config, layer)

    def select(
        self, hidden: Tensor, query_input: Tensor, layer_pass: LayerPass
    ) -> Selection | None:
        attention = layer_pass.attention
        assert isinstance(attention, LatentPass)
        if self.indexer is not None:
            key, choice = self.indexer(hidden, query_input, layer_pass)
            attention.selection = select(attention, self.layer, key, choice)
        assert attention.selection is not None, "a stage begins with a layer that chooses"
        return attention.selection

    def weights(self) -> Iterator[Weight]:
        yield from super().weights()
        if self.indexer is not None:
            yield from self.indexer.weights()


def build_sparse_layer(context: LayerContext, config: ModelConfig, layer: int) -> PreNormLayer:
    """The layer of a global id, with experts or a plain MLP."""
    attention = SparseMlaAttention(context, config, layer)
    return PreNormLayer(context, config, layer, attention, build_mlp(context, config, layer))


class SparseLm(CausalLm):
    """A rotation for the indexer, where it has its own, and indexers that are never run."""

    def build_rotaries(self) -> dict[str, RotaryEmbedding]:
        rotaries = super().build_rotaries()
        config, context = self.config, self.context
        if _has_own_rotation(config):
            rope = replace(config.rope, is_interleaved=sparse_config(config).is_interleaved)
            rotaries[INDEX] = RotaryEmbedding(
                rope, config.rotary_dim, device=context.device, dtype=context.dtype
            )
        return rotaries

    def is_ignored(self, name: str) -> bool:
        """Sharing may be decided after training: the indexers of such layers are still there."""
        shared = sparse_config(self.config).shared_layers
        if any(name.startswith(f"model.layers.{layer}.self_attn.indexer.") for layer in shared):
            return True
        return super().is_ignored(name)


def _has_own_rotation(config: ModelConfig) -> bool:
    return sparse_config(config).is_interleaved != config.rope.is_interleaved


def _cache(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
    assert config.mla is not None
    sparse = sparse_config(config)
    return sparse_mla_components(
        layer_count=config.layer_count,
        latent_dim=config.mla.latent_dim,
        rope_dim=config.mla.rope_dim,
        is_interleaved=config.rope.is_interleaved,
        index_layers=sparse.layers,
        index_dim=sparse.head_dim,
        is_index_interleaved=sparse.is_interleaved,
        dtype=dtype,
    )


def _with_layer(config: ModelConfig) -> ModelConfig:
    """The layer that predicts one token more chooses by itself."""
    sparse = sparse_config(config)
    chooses = replace(sparse, layers=(*sparse.layers, config.layer_count))
    return replace(with_layer(config), family=chooses)


_SPARSE = Family(
    read_sparse,
    build_sparse_layer,
    _cache,
    model=SparseLm,
    nextn=NextnFamily(_with_layer, nextn_names),
)
FAMILIES = {"DeepseekV32ForCausalLM": _SPARSE, "GlmMoeDsaForCausalLM": _SPARSE}
