"""DeepSeek-V4: a window and compressed blocks under one softmax, streams instead of a residual.

Layers are of three kinds: with a window only, with blocks of few tokens of which an indexer chooses
some, and with blocks of many tokens. One row is key and value of all heads; what is rotated in it
is turned back behind the attention.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from common.engine.attention.best_keys import KeyChoice
from common.engine.attention.blocks import ClosedBlocks
from common.engine.attention.compressed import CompressedPass, SinkRule
from common.engine.checkpoint.weights import Weight
from common.engine.config.model import ModelConfig
from common.engine.forward_batch import ForwardBatch
from common.engine.layers.embedding import Embedding
from common.engine.layers.fused_rotation import AnyRotation
from common.engine.layers.hyper_connections import CollapsingNorm, HyperConnection, StreamShape
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.linear import ColumnLinear, OutputBlock, RowLinear
from common.engine.layers.norm import RmsNorm, WideNorm, normalize
from common.engine.layers.rotary import RotaryEmbedding, Rotation
from common.engine.models.causal_lm import CausalLm
from common.engine.models.deepseek_v4_blocks import BlockIndexer, BlockShape, Compressor, rotate_end
from common.engine.models.deepseek_v4_config import CompressionKind, read_deepseek_v4, v4_config
from common.engine.models.deepseek_v4_moe import HashMoeMlp
from common.engine.models.deepseek_v4_names import layer_name
from common.engine.models.family import Family
from common.engine.models.layer_pass import MAIN, LayerPass
from common.layout.component import CacheComponent
from common.layout.families import compressed_components

BLOCKED = "blocked"
"""Name of the rotation of layers with blocks; with a size behind it, that of blocks themselves."""


class V4Attention:
    """Projections, norms and rotations around the attention of window and blocks.

    Heads and output groups are cut over the ranks; what is cached is made by every rank.
    """

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        v4 = v4_config(config)
        name = f"model.layers.{layer}.self_attn"
        dim, size, epsilon = config.head_dim, config.hidden_size, config.rms_norm_eps
        heads = context.cut(config.head_count)
        kind = v4.kinds[layer]
        self.layer = layer
        self.name = name
        self.head_dim = dim
        self.head_count = len(heads)
        self.rope_dim = config.rotary_dim
        self.epsilon = epsilon
        self.sizes = (v4.query_rank, dim)
        self.rotation = MAIN if kind is CompressionKind.SLIDING else BLOCKED
        self.input = ColumnLinear(
            context,
            size,
            [
                OutputBlock.whole(f"{name}.q_a_proj", v4.query_rank),
                OutputBlock.whole(f"{name}.kv_proj", dim),
            ],
        )
        self.query_norm = WideNorm(context, f"{name}.q_a_norm", v4.query_rank, epsilon)
        self.row_norm = WideNorm(context, f"{name}.kv_norm", dim, epsilon)
        self.query = ColumnLinear(
            context,
            v4.query_rank,
            [OutputBlock.of_units(f"{name}.q_b_proj", config.head_count, heads, dim)],
        )
        self.sinks = context.empty_fp32(len(heads))
        self.all_sinks = (config.head_count, heads)
        self.output = GroupedOutput(context, config, name)
        self.compressor: Compressor | None = None
        self.indexer: BlockIndexer | None = None
        if kind is CompressionKind.SPARSE:
            shape = BlockShape(v4.sparse_ratio, dim, True, "csa_tail", "csa_block")
            self.compressor = Compressor(context, config, layer, f"{name}.compressor", shape)
            self.indexer = BlockIndexer(context, config, layer, f"{name}.indexer")
        elif kind is CompressionKind.HEAVY:
            shape = BlockShape(v4.heavy_ratio, dim, False, "hca_tail", "hca_block")
            self.compressor = Compressor(context, config, layer, f"{name}.compressor", shape)

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor:
        attention = layer_pass.attention
        assert isinstance(attention, CompressedPass), "blocks are the compressed backend's"
        rotation = layer_pass.rotations[self.rotation]
        assert isinstance(rotation, Rotation), "one that can be undone"
        query_input, row = self.input(hidden).split_with_sizes(self.sizes, dim=-1)
        query_input = self.query_norm(query_input)
        query = self.query(query_input).view(len(hidden), self.head_count, self.head_dim)
        query = rotate_end(normalize(query, self.epsilon), rotation, self.rope_dim)
        row = rotate_end(self.row_norm(row)[:, None], rotation, self.rope_dim)[:, 0]
        choice: KeyChoice | None = None
        if self.compressor is not None:
            turned = layer_pass.rotations[block_rotation(self.compressor.shape.size)]
            assert isinstance(turned, Rotation), "of other tokens than the pass has"
            self.compressor(hidden, attention.blocks, turned)
            if self.indexer is not None:
                self.indexer.compressor(hidden, attention.blocks, turned)
                choice = self.indexer(hidden, query_input, rotation)
        attended = attention.attend_compressed(
            self.layer,
            query,
            row,
            SinkRule(self.head_dim**-0.5, self.sinks),
            blocks=None if self.compressor is None else self.compressor.shape.block,
            choice=choice,
        )
        # The values came with their positions; what is left is their distance from the query.
        return self.output(rotate_end(attended, rotation.inverse(), self.rope_dim))

    def weights(self) -> Iterator[Weight]:
        yield from self.input.weights()
        yield from self.query_norm.weights()
        yield from self.row_norm.weights()
        yield from self.query.weights()
        head_count, heads = self.all_sinks
        yield Weight.cut(f"{self.name}.sinks", head_count, heads, self.sinks)
        yield from self.output.weights()
        if self.compressor is not None:
            yield from self.compressor.weights()
        if self.indexer is not None:
            yield from self.indexer.weights()


class GroupedOutput:
    """Heads [T, heads, head dim] of this rank to [T, hidden]: each group of heads through a product
    of its own, all groups through one more. Groups are cut over the ranks."""

    def __init__(self, context: LayerContext, config: ModelConfig, name: str) -> None:
        v4 = v4_config(config)
        groups = context.cut(v4.output_groups)
        width = config.head_count * config.head_dim // v4.output_groups
        rank = v4.output_rank
        self.group_count = len(groups)
        self.first = ColumnLinear(
            context,
            width,
            [OutputBlock.of_units(f"{name}.o_a_proj", v4.output_groups, groups, rank)],
            is_read=True,
        )
        self.second = RowLinear(
            context,
            f"{name}.o_b_proj",
            input_size=v4.output_groups * rank,
            output_size=config.hidden_size,
        )

    def __call__(self, heads: Tensor) -> Tensor:
        grouped = heads.reshape(len(heads), self.group_count, -1).transpose(0, 1)
        weight = self.first.rows.view(self.group_count, -1, grouped.shape[-1])
        inner = torch.bmm(grouped, weight.transpose(1, 2)).transpose(0, 1)
        return self.second(inner.flatten(1))

    def weights(self) -> Iterator[Weight]:
        yield from self.first.weights()
        yield from self.second.weights()


class V4Layer:
    """Streams [T, S, hidden] to the same shape: attention, then experts."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        name = f"model.layers.{layer}"
        size, epsilon, shape = config.hidden_size, config.rms_norm_eps, stream_shape(config)
        self.attention_streams = HyperConnection(context, f"{name}.attn_hc", shape)
        self.attention_norm = WideNorm(context, f"{name}.input_layernorm", size, epsilon)
        self.attention = V4Attention(context, config, layer)
        self.mlp_streams = HyperConnection(context, f"{name}.ffn_hc", shape)
        self.mlp_norm = WideNorm(context, f"{name}.post_attention_layernorm", size, epsilon)
        self.mlp = HashMoeMlp(context, config, layer)

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor:
        given, mix = self.attention_streams.open(hidden)
        hidden = mix.close(self.attention(self.attention_norm(given), layer_pass), hidden)
        given, mix = self.mlp_streams.open(hidden)
        made = self.mlp(self.mlp_norm(given), layer_pass.batch.token_ids)
        return mix.close(made, hidden)

    def weights(self) -> Iterator[Weight]:
        yield from self.attention_streams.weights()
        yield from self.attention_norm.weights()
        yield from self.attention.weights()
        yield from self.mlp_streams.weights()
        yield from self.mlp_norm.weights()
        yield from self.mlp.weights()


def build_deepseek_v4_layer(context: LayerContext, config: ModelConfig, layer: int) -> V4Layer:
    """The layer of a global id."""
    return V4Layer(context, config, layer)


class DeepseekV4Lm(CausalLm):
    """Streams between the layers and between the stages; blocks have rotations of their own."""

    def build_rotaries(self) -> dict[str, RotaryEmbedding]:
        rotaries = super().build_rotaries()
        rotaries[BLOCKED] = RotaryEmbedding(
            v4_config(self.config).block_rope,
            self.config.rotary_dim,
            device=self.context.device,
            dtype=self.context.dtype,
        )
        return rotaries

    def rotate(self, batch: ForwardBatch) -> dict[str, AnyRotation]:
        rotations: dict[str, AnyRotation] = {
            name: rotary.rotate(batch.positions) for name, rotary in self.rotaries.items()
        }
        v4 = v4_config(self.config)
        for size in (v4.sparse_ratio, v4.heavy_ratio):
            # A block stands where its first token does.
            positions = ClosedBlocks.of(batch, size).first_positions
            rotations[block_rotation(size)] = self.rotaries[BLOCKED].rotate(positions)
        return rotations

    def build_norm(self) -> RmsNorm:
        shape = stream_shape(self.config)
        return CollapsingNorm(self.context, "model.norm", "model.hc_head", shape)

    def embed(self, embedding: Embedding, batch: ForwardBatch) -> Tensor:
        hidden = embedding(batch.token_ids)
        count = v4_config(self.config).stream_count
        return hidden[:, None].expand(-1, count, -1).contiguous()

    def stage_input(self, token_count: int) -> Tensor:
        count = v4_config(self.config).stream_count
        return self.context.empty(token_count, count, self.config.hidden_size)

    def is_ignored(self, name: str) -> bool:
        return name.startswith("model.hc_head.") or super().is_ignored(name)


def block_rotation(size: int) -> str:
    """Name of the rotation of blocks of so many tokens that end in a pass."""
    return f"{BLOCKED}-{size}"


def stream_shape(config: ModelConfig) -> StreamShape:
    v4 = v4_config(config)
    return StreamShape(
        hidden_size=config.hidden_size,
        stream_count=v4.stream_count,
        rounds=v4.stream_rounds,
        epsilon=v4.stream_epsilon,
        norm_epsilon=config.rms_norm_eps,
    )


def _cache(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
    v4 = v4_config(config)
    return compressed_components(
        layer_count=config.layer_count,
        window=v4.window,
        head_dim=config.head_dim,
        index_dim=v4.index_dim,
        sparse_layers=v4.layers_of(CompressionKind.SPARSE),
        sparse_ratio=v4.sparse_ratio,
        heavy_layers=v4.layers_of(CompressionKind.HEAVY),
        heavy_ratio=v4.heavy_ratio,
        dtype=dtype,
    )


FAMILIES = {
    "DeepseekV4ForCausalLM": Family(
        read_deepseek_v4,
        build_deepseek_v4_layer,
        _cache,
        model=DeepseekV4Lm,
        rename=layer_name,
    )
}
