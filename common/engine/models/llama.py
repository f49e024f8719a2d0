"""Llama, Mistral, Qwen2 and Qwen3: pre-norm layers of grouped-query attention and a gated MLP.

Their differences (biases, q/k norms, head sizes) are values of `ModelConfig`. The MLP is a
parameter, so that a family of routed experts shares everything else.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from common.engine.attention.attention import AttentionPass
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.linear import ColumnLinear, OutputBlock, RowLinear
from common.engine.layers.mlp import GatedMlp
from common.engine.layers.norm import QkNorm
from common.engine.model_config import ModelConfig
from common.engine.models.layer_pass import LayerPass
from common.engine.models.pre_norm_layer import PreNormLayer
from common.engine.weights import Weight
from common.layout.component import Shard
from common.layout.parallel import units_of_rank


class GqaAttention:
    """Projections, q/k norms and rotation around the attention of the cache."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        name = f"model.layers.{layer}.self_attn"
        parallel = context.parallel
        dim = config.head_dim
        heads = context.cut(config.head_count)
        # The same rule as the cache's: consecutive ranks share a head if heads are fewer.
        kv_heads = units_of_rank(
            config.kv_head_count, Shard.SPLIT, parallel.tp_size, parallel.tp_rank
        )
        self.layer = layer
        self.head_dim = dim
        self.head_count = len(heads)
        self.kv_head_count = len(kv_heads)
        self.qkv = ColumnLinear(
            context,
            config.hidden_size,
            [
                OutputBlock(
                    f"{name}.{part}",
                    count * dim,
                    range(owned.start * dim, owned.stop * dim),
                    config.has_qkv_bias,
                )
                for part, count, owned in (
                    ("q_proj", config.head_count, heads),
                    ("k_proj", config.kv_head_count, kv_heads),
                    ("v_proj", config.kv_head_count, kv_heads),
                )
            ],
        )
        self.output = RowLinear(
            context,
            f"{name}.o_proj",
            input_size=config.head_count * dim,
            columns=range(heads.start * dim, heads.stop * dim),
            output_size=config.hidden_size,
            has_bias=config.has_output_bias,
        )
        self.qk_norm: QkNorm | None = None
        if config.has_qk_norm:
            self.qk_norm = QkNorm(
                context,
                name,
                head_count=self.head_count,
                kv_head_count=self.kv_head_count,
                head_dim=dim,
                epsilon=config.rms_norm_eps,
            )

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor:
        token_count = hidden.shape[0]
        heads = self.qkv(hidden).view(token_count, -1, self.head_dim)
        rotated_count = self.head_count + self.kv_head_count
        query_key = heads[:, :rotated_count]
        if self.qk_norm is not None:
            query_key = self.qk_norm(query_key)
        query_key = layer_pass.rotation.apply(query_key)
        attended = self.attend(
            layer_pass.attention,
            query_key[:, : self.head_count],
            query_key[:, self.head_count :],
            heads[:, rotated_count:],
        )
        return self.output(attended.reshape(token_count, -1))

    def attend(self, attention: AttentionPass, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `AttentionPass.attend`, in this layer; how scores become weights is its own choice."""
        return attention.attend(self.layer, query, key, value)

    def weights(self) -> Iterator[Weight]:
        yield from self.qkv.weights()
        yield from self.output.weights()
        if self.qk_norm is not None:
            yield from self.qk_norm.weights()


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
