"""Grouped-query attention as most families have it, and the places where they differ.

A family names another kind of q/k norm, another rotation or a rule for the scores when it builds
one, and overrides what it does in its own way.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from common.engine.attention.attention import AttentionPass
from common.engine.attention.scores import ScoreRule
from common.engine.attention.sdpa import SdpaPass
from common.engine.checkpoint.weights import Weight
from common.engine.config.model import ModelConfig
from common.engine.layers.fused_rotation import FusedRotation, apply_cut
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.linear import ColumnLinear, OutputBlock, RowLinear
from common.engine.layers.norm import QkNorm
from common.engine.models.layer_pass import MAIN, LayerPass


class GqaAttention:
    """Projections, q/k norms and rotation around the attention of the cache."""

    def __init__(
        self,
        context: LayerContext,
        config: ModelConfig,
        layer: int,
        *,
        query_parts: int = 1,
        norm: type[QkNorm] = QkNorm,
        rotation: str = MAIN,
        rule: ScoreRule | None = None,
        input_size: int | None = None,
    ) -> None:
        """query_parts: how many heads q_proj makes for each query head; `mix` uses them up.

        norm: spelling of the q/k norms, if there are any. rotation: name of the layer's.
        rule: how scores become weights, None for the softmax of scaled scores. input_size: of what
        is projected, None for the hidden size.
        """
        name = f"model.layers.{layer}.self_attn"
        dim, has_bias = config.head_dim, config.has_qkv_bias
        query_count, kv_count = config.head_count, config.kv_head_count
        heads, kv_heads = context.cut(query_count), context.share(kv_count)
        self.layer = layer
        self.head_dim = dim
        self.head_count = len(heads)
        self.kv_head_count = len(kv_heads)
        self.rotation = rotation
        self.rule = rule
        self.qkv = ColumnLinear(
            context,
            input_size or config.hidden_size,
            [
                OutputBlock.of_units(f"{name}.{part}", count, owned, width, has_bias)
                for part, count, owned, width in (
                    ("q_proj", query_count, heads, query_parts * dim),
                    ("k_proj", kv_count, kv_heads, dim),
                    ("v_proj", kv_count, kv_heads, dim),
                )
            ],
        )
        self.output = RowLinear(
            context,
            f"{name}.o_proj",
            input_size=query_count * dim,
            output_size=config.hidden_size,
            has_bias=config.has_output_bias,
        )
        self.qk_norm: QkNorm | None = None
        if config.has_qk_norm:
            self.qk_norm = norm(
                context,
                name,
                head_count=self.head_count,
                kv_head_count=self.kv_head_count,
                head_dim=dim,
                epsilon=config.rms_norm_eps,
            )

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor:
        heads = self.qkv(hidden).view(len(hidden), -1, self.head_dim)
        return self.output(self.mix(heads, layer_pass).flatten(1))

    def mix(self, heads: Tensor, layer_pass: LayerPass) -> Tensor:
        """[T, query heads + KV heads of keys + of values, dim] to [T, query heads, dim]."""
        rotated_count = self.head_count + self.kv_head_count
        query, key = self.norm_and_turn(heads[:, :rotated_count], layer_pass)
        return self.attend(layer_pass.attention, query, key, heads[:, rotated_count:])

    def norm_and_turn(self, query_key: Tensor, layer_pass: LayerPass) -> tuple[Tensor, Tensor]:
        """Queries and keys [T, heads, dim] as they are attended, from what the product made."""
        if self.qk_norm is not None:
            rotation = layer_pass.rotations[self.rotation]
            if isinstance(rotation, FusedRotation):
                done = rotation.apply_normed(query_key, self.qk_norm)
                if done is not None:
                    return done[:, : self.head_count], done[:, self.head_count :]
            query_key = self.qk_norm(query_key)
        return self.turn(query_key, layer_pass)

    def turn(self, query_key: Tensor, layer_pass: LayerPass) -> tuple[Tensor, Tensor]:
        """Queries and keys, with positions applied, from both of them [T, heads, dim]."""
        return apply_cut(layer_pass.rotations[self.rotation], query_key, self.head_count)

    def attend(self, attention: AttentionPass, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `AttentionPass.attend`, in this layer and by its rule."""
        if self.rule is None:
            return attention.attend(self.layer, query, key, value)
        assert isinstance(attention, SdpaPass), "scores with a rule are SDPA's"
        return attention.attend(self.layer, query, key, value, self.rule)

    def weights(self) -> Iterator[Weight]:
        yield from self.qkv.weights()
        yield from self.output.weights()
        if self.qk_norm is not None:
            yield from self.qk_norm.weights()
