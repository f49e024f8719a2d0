"""gpt-oss: attention whose scores meet a sink per head, every other layer of it over a window, and
experts with biases whose gates are cut off.

Which layers see a window only is the cache's business.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.attention.scores import ScoreRule
from common.engine.checkpoint.weights import TensorSlice, Weight
from common.engine.config.model import ModelConfig, MoeConfig
from common.engine.layers.expert_groups import ExpertGroups
from common.engine.layers.expert_matrix import ExpertMatrix
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.mlp import Activation
from common.engine.layers.moe import MoeMlp
from common.engine.layers.norm import WideNorm
from common.engine.models.causal_lm import CausalLm
from common.engine.models.family import Family, gqa_cache
from common.engine.models.gpt_oss_config import GptOssConfig, read_gpt_oss
from common.engine.models.gqa import GqaAttention
from common.engine.models.pre_norm_layer import PreNormLayer


class SinkAttention(GqaAttention):
    """`GqaAttention` with a sink per query head."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        self.heads = context.cut(config.head_count)
        self.head_count_total = config.head_count
        self.sinks = context.empty(len(self.heads))
        super().__init__(context, config, layer, rule=ScoreRule(sinks=self.sinks))

    def weights(self) -> Iterator[Weight]:
        yield from super().weights()
        name = f"model.layers.{self.layer}.self_attn.sinks"
        yield Weight.cut(name, self.head_count_total, self.heads, self.sinks)


class BiasedMoeMlp(MoeMlp):
    """Experts with biases. The router chooses by its logits and shares by those that it chose.

    Gates and ups stay side by side, as checkpoints have them: row 2i of an expert's `gate_up` is
    the gate of inner feature i, row 2i + 1 the up.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        *,
        hidden_size: int,
        moe: MoeConfig,
        activation: Activation,
    ) -> None:
        super().__init__(context, name, hidden_size=hidden_size, moe=moe, activation=activation)
        self.router_bias = context.empty(moe.expert_count)
        self.gate_up_bias = context.empty(moe.expert_count, 2 * len(self.inner))
        self.down_bias = context.empty(moe.expert_count, hidden_size)

    def __call__(self, hidden: Tensor) -> Tensor:
        shares, experts = self.route(hidden)
        mixed = self.mix_experts(hidden, shares, experts)
        # Each rank has summed a part of every expert; the biases behind them count once.
        spread = hidden.new_zeros(len(hidden), self.expert_count).scatter_(1, experts, shares)
        return mixed + spread @ self.down_bias

    def expand(self, hidden: Tensor, groups: ExpertGroups) -> Tensor:
        return super().expand(hidden, groups) + self.gate_up_bias[groups.experts]

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(shares [T, k] in the model's dtype, expert ids int64[T, k]) of every token."""
        logits = F.linear(hidden, self.router, self.router_bias)
        chosen, experts = logits.topk(self.experts_per_token, dim=-1)
        return chosen.softmax(dim=-1), experts

    def weights(self) -> Iterator[Weight]:
        yield Weight.whole(f"{self.name}.router.weight", self.router)
        yield Weight.whole(f"{self.name}.router.bias", self.router_bias)
        count, size, inner = self.expert_count, self.hidden_size, self.intermediate_size
        everything = slice(None)
        rows = slice(2 * self.inner.start, 2 * self.inner.stop)
        columns = slice(self.inner.start, self.inner.stop)
        experts = f"{self.name}.experts"
        yield _expert_weight(
            f"{experts}.gate_up_proj", (count, 2 * inner, size), (rows, everything), self.gate_up
        )
        yield _expert_weight(
            f"{experts}.down_proj", (count, size, inner), (everything, columns), self.down
        )
        shape = (count, 2 * inner)
        bias = TensorSlice(
            f"{experts}.gate_up_proj_bias", shape, (everything, rows), self.gate_up_bias
        )
        yield Weight(((bias,),))
        yield Weight.whole(f"{experts}.down_proj_bias", self.down_bias)


def _expert_weight(
    name: str, shape: tuple[int, int, int], take: tuple[slice, slice], matrix: ExpertMatrix
) -> Weight:
    """shape: [expert, output, input], as `matrix` is and as a checkpoint holds packed values; plain
    ones it holds as [expert, input, output]. take: of the last two.

    Packed values come expert by expert, as they take eight times their room while they are made
    wide.
    """
    count, rows, columns = shape
    plain = TensorSlice(
        name,
        (count, columns, rows),
        (slice(None), take[1], take[0]),
        matrix.rows.transpose(1, 2),
        keeper=matrix.stack,
    )
    packed = tuple(
        TensorSlice(
            f"{name}_blocks",
            shape,
            (slice(e, e + 1), *take),
            matrix.rows[e : e + 1],
            keeper=matrix.experts[e],
        )
        for e in range(count)
    )
    return Weight(((plain,), packed))


def clamped_gate(config: GptOssConfig) -> Activation:
    """Gates and ups side by side [.., 2 n] to [.., n]."""

    def activate(gate_up: Tensor) -> Tensor:
        gate = gate_up[..., 0::2].clamp(max=config.gate_limit)
        up = gate_up[..., 1::2].clamp(-config.gate_limit, config.gate_limit)
        return (up + 1) * (gate * torch.sigmoid(gate * config.gate_gain))

    return activate


def build_gpt_oss_layer(context: LayerContext, config: ModelConfig, layer: int) -> PreNormLayer:
    """The layer of a global id."""
    assert config.moe is not None and isinstance(config.family, GptOssConfig)
    mlp = BiasedMoeMlp(
        context,
        f"model.layers.{layer}.mlp",
        hidden_size=config.hidden_size,
        moe=config.moe,
        activation=clamped_gate(config.family),
    )
    attention = SinkAttention(context, config, layer)
    return PreNormLayer(context, config, layer, attention, mlp, WideNorm)


class GptOssLm(CausalLm):
    """Its last norm is scaled in fp32, as all others are."""

    norm_type = WideNorm


FAMILIES = {
    "GptOssForCausalLM": Family(read_gpt_oss, build_gpt_oss_layer, gqa_cache, model=GptOssLm)
}
