"""DeepSeek V2, V3 and R1, and Kimi K2: latent attention, plain MLPs first, grouped experts after.

What they differ in (the queries' rank, the router, the rotation) are values of `ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from common.engine.attention.latent import LatentPass, LatentProjection, Selection
from common.engine.checkpoint.weights import Weight
from common.engine.config.model import ModelConfig
from common.engine.layers.fused_rotation import apply_in_place
from common.engine.layers.grouped_moe import GroupedMoeMlp
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.linear import ColumnLinear, OutputBlock, RowLinear
from common.engine.layers.mlp import GatedMlp
from common.engine.layers.norm import RmsNorm
from common.engine.layers.rotary import score_scale
from common.engine.models.deepseek_config import read_deepseek
from common.engine.models.draft import NextnFamily, NextnNames, with_layer
from common.engine.models.family import Family, mla_cache
from common.engine.models.layer_pass import LayerPass
from common.engine.models.pre_norm_layer import LayerMlp, PreNormLayer

# Of the norms inside the projections. The published code fixes it, and ignores rms_norm_eps.
INNER_NORM_EPSILON = 1e-6


class MlaAttention:
    """Projections, norms and rotation around the attention of latent rows.

    Heads are cut over the ranks; what makes a row of the cache is not, so every rank has all rows.
    """

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        assert config.mla is not None
        name = f"model.layers.{layer}.self_attn"
        mla = config.mla
        has_bias = config.has_output_bias
        self.layer = layer
        self.mla = mla
        self.head_count = len(context.cut(config.head_count))
        self.scale = score_scale(config.rope, mla.query_dim)
        self.row_norm = RmsNorm(
            context, f"{name}.kv_a_layernorm", mla.latent_dim, INNER_NORM_EPSILON
        )
        self.expand = _head_linear(
            context,
            f"{name}.kv_b_proj",
            mla.latent_dim,
            config.head_count,
            mla.nope_dim + mla.value_dim,
            is_read=True,
        )
        self.query_norm: RmsNorm | None = None
        query_name, query_input = f"{name}.q_proj", config.hidden_size
        downs = [OutputBlock.whole(f"{name}.kv_a_proj_with_mqa", mla.row_dim, has_bias)]
        if mla.query_rank is not None:
            query_name, query_input = f"{name}.q_b_proj", mla.query_rank
            downs.insert(0, OutputBlock.whole(f"{name}.q_a_proj", mla.query_rank, has_bias))
            self.query_norm = RmsNorm(
                context, f"{name}.q_a_layernorm", mla.query_rank, INNER_NORM_EPSILON
            )
        # Of queries, if they have a rank, and of rows.
        self.down = ColumnLinear(context, config.hidden_size, downs)
        self.query = _head_linear(
            context, query_name, query_input, config.head_count, mla.query_dim
        )
        self.output = RowLinear(
            context,
            f"{name}.o_proj",
            input_size=config.head_count * mla.value_dim,
            output_size=config.hidden_size,
            has_bias=has_bias,
        )

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor:
        attention = layer_pass.attention
        assert isinstance(attention, LatentPass), "a latent model runs over a latent backend"
        token_count = hidden.shape[0]
        mla = self.mla
        down = self.down(hidden)
        query_input, row = hidden, down[:, -mla.row_dim :]
        if self.query_norm is not None:
            query_input = self.query_norm(down[:, : -mla.row_dim])
        query = self.query(query_input).view(token_count, self.head_count, mla.query_dim)
        # What the products made becomes queries and rows where it lies.
        self.turn(query[..., mla.nope_dim :], row[:, None, mla.latent_dim :], layer_pass)
        self.row_norm.in_place(row[:, : mla.latent_dim])
        per_head = self.expand.rows.view(self.head_count, -1, mla.latent_dim)
        projection = LatentProjection(
            key=per_head[:, : mla.nope_dim], value=per_head[:, mla.nope_dim :], scale=self.scale
        )
        selection = self.select(hidden, query_input, layer_pass)
        attended = attention.attend_latent(self.layer, query, row, projection, selection)
        return self.output(self.gate(attended, hidden).reshape(token_count, -1))

    def turn(self, query: Tensor, key: Tensor, layer_pass: LayerPass) -> None:
        """Rotates the positional part of queries and of rows, both [T, heads, rope dim]."""
        apply_in_place(layer_pass.rotation, query, key)

    def gate(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """Transform the heads' outputs [T, heads, value dim] before they are projected."""
        return attended

    def select(
        self, hidden: Tensor, query_input: Tensor, layer_pass: LayerPass
    ) -> Selection | None:
        """The cached tokens that queries made of `query_input` see; None for all of them."""
        return None

    def weights(self) -> Iterator[Weight]:
        yield from self.down.weights()
        if self.query_norm is not None:
            yield from self.query_norm.weights()
        yield from self.query.weights()
        yield from self.row_norm.weights()
        yield from self.expand.weights()
        yield from self.output.weights()


def build_deepseek_layer(context: LayerContext, config: ModelConfig, layer: int) -> PreNormLayer:
    """The layer of a global id, with experts or a plain MLP."""
    attention = MlaAttention(context, config, layer)
    return PreNormLayer(context, config, layer, attention, build_mlp(context, config, layer))


def build_mlp(context: LayerContext, config: ModelConfig, layer: int) -> LayerMlp:
    """The feed-forward part of a global layer."""
    assert config.moe is not None
    name, size = f"model.layers.{layer}.mlp", config.hidden_size
    if layer in config.moe.layers:
        return GroupedMoeMlp(context, name, hidden_size=size, moe=config.moe)
    return GatedMlp(context, name, hidden_size=size, intermediate_size=config.intermediate_size)


def _head_linear(
    context: LayerContext,
    name: str,
    input_size: int,
    head_count: int,
    head_dim: int,
    *,
    is_read: bool = False,
) -> ColumnLinear:
    """A projection to `head_dim` features per head, of which this rank computes its heads."""
    heads = context.cut(head_count)
    block = OutputBlock.of_units(name, head_count, heads, head_dim)
    return ColumnLinear(context, input_size, [block], is_read=is_read)


def nextn_names(layer: int) -> NextnNames:
    """Of the layer that predicts one token more: they lie among its own tensors."""
    name = f"model.layers.{layer}"
    return NextnNames(
        state_norm=f"{name}.hnorm",
        token_norm=f"{name}.enorm",
        join=f"{name}.eh_proj",
        norm=f"{name}.shared_head.norm",
    )


_DEEPSEEK = Family(
    read_deepseek, build_deepseek_layer, mla_cache, nextn=NextnFamily(with_layer, nextn_names)
)
FAMILIES = {"DeepseekV2ForCausalLM": _DEEPSEEK, "DeepseekV3ForCausalLM": _DEEPSEEK}
