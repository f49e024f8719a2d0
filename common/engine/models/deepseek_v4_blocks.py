"""DeepSeek-V4: how rows become blocks, and how a layer chooses among blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.attention.best_keys import KeyChoice
from common.engine.attention.blocks import BlockPass, BlockRows
from common.engine.checkpoint.weights import Weight
from common.engine.config.model import ModelConfig
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.linear import ColumnLinear, OutputBlock, whole_linear
from common.engine.layers.norm import WideNorm
from common.engine.layers.rotary import Rotation
from common.engine.models.deepseek_v4_config import v4_config


@dataclass(frozen=True, slots=True)
class BlockShape:
    """size: tokens of a block. dim: of what is made of them. overlaps: whether the tokens of the
    block before take part; a token then has features for each of the two blocks it is part of.

    tail, block: the components.
    """

    size: int
    dim: int
    overlaps: bool
    tail: str
    block: str

    @property
    def row_dim(self) -> int:
        """Elements of a token's keys, and of its gates: [for the next block | for its own]."""
        return 2 * self.dim if self.overlaps else self.dim


class Compressor:
    """Every `size` tokens become one row: per channel, a softmax over the tokens' gates weighs
    their features."""

    def __init__(
        self, context: LayerContext, config: ModelConfig, layer: int, name: str, shape: BlockShape
    ) -> None:
        self.layer = layer
        self.name = name
        self.shape = shape
        self.rope_dim = config.rotary_dim
        self.dtype = context.dtype
        # Keys and gates side by side are what the tail keeps of a token.
        self.project = ColumnLinear(
            context,
            config.hidden_size,
            [
                OutputBlock.whole(f"{name}.{part}", shape.row_dim)
                for part in ("kv_proj", "gate_proj")
            ],
        )
        self.bias = context.empty_fp32(shape.size, shape.row_dim)
        self.norm = WideNorm(context, f"{name}.kv_norm", shape.dim, config.rms_norm_eps)

    def __call__(self, hidden: Tensor, blocks: BlockPass, rotation: Rotation) -> None:
        """hidden: [T, hidden], of the new tokens. rotation: of the blocks they close."""
        rows = blocks.collect(self.shape.tail, self.layer, self.project(hidden))
        if rows is not None:
            made = self.norm(self._pool(rows).to(self.dtype))
            made = rotate_end(made[:, None], rotation, self.rope_dim)[:, 0]
            blocks.put(self.shape.block, self.layer, made)

    def weights(self) -> Iterator[Weight]:
        yield from self.project.weights()
        yield Weight.whole(f"{self.name}.position_bias", self.bias)
        yield from self.norm.weights()

    def _pool(self, rows: BlockRows) -> Tensor:
        """fp32[n, dim]."""
        size, dim = self.shape.size, self.shape.dim
        keys, gates = rows.rows.float().chunk(2, dim=-1)
        own_keys, own_gates = keys[:, -size:, -dim:], gates[:, -size:, -dim:] + self.bias[:, -dim:]
        if not self.shape.overlaps:
            return (own_keys * own_gates.softmax(dim=1)).sum(dim=1)
        before = gates[:, :size, :dim] + self.bias[:, :dim]
        before = before.masked_fill(rows.is_missing[:, :size], float("-inf"))
        keys = torch.cat((keys[:, :size, :dim], own_keys), dim=1)
        return (keys * torch.cat((before, own_gates), dim=1).softmax(dim=1)).sum(dim=1)


class BlockIndexer:
    """Small heads that choose the blocks a token attends to, over blocks of their own."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int, name: str) -> None:
        v4 = v4_config(config)
        self.head_count = v4.index_head_count
        self.count = v4.index_count
        self.dim = v4.index_dim
        self.rope_dim = config.rotary_dim
        self.scale = self.dim**-0.5
        self.weight_scale = self.head_count**-0.5
        shape = BlockShape(v4.sparse_ratio, self.dim, True, "csa_index_tail", "csa_index")
        self.compressor = Compressor(context, config, layer, name, shape)
        query_size = self.head_count * self.dim
        self.query = whole_linear(context, f"{name}.q_b_proj", v4.query_rank, query_size)
        self.head_weights = whole_linear(
            context, f"{name}.weights_proj", config.hidden_size, self.head_count
        )

    def __call__(self, hidden: Tensor, query_input: Tensor, rotation: Rotation) -> KeyChoice:
        """query_input: [T, query rank]. rotation: of the tokens."""
        query = self.query(query_input).view(len(hidden), self.head_count, self.dim)
        # Scores are not negative, so their factor may as well be the weights'.
        weights = self.head_weights(hidden).float() * (self.weight_scale * self.scale)
        return KeyChoice(
            component=self.compressor.shape.block,
            query=rotate_end(query, rotation, self.rope_dim),
            weights=weights,
            count=self.count,
        )

    def weights(self) -> Iterator[Weight]:
        yield from self.compressor.weights()
        yield from self.query.weights()
        yield from self.head_weights.weights()


def rotate_end(heads: Tensor, rotation: Rotation, rope_dim: int) -> Tensor:
    """Rotate the last `rope_dim` elements of heads [T, heads, element]."""
    plain, turned = heads[..., :-rope_dim], heads[..., -rope_dim:]
    return torch.cat((plain, rotation.apply(turned)), dim=-1)
