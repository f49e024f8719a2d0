"""DeepSeek-V4's experts: shares from the root of a softplus, experts by score or by token id."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.checkpoint.weights import Weight
from common.engine.config.model import ModelConfig
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.mlp import GatedMlp
from common.engine.layers.moe import MoeMlp
from common.engine.layers.routing import SUM_EPSILON
from common.engine.models.deepseek_v4_config import v4_config


class HashMoeMlp:
    """Routed experts, and one beside them that every token takes.

    Scores and shares are computed in fp32 with fp32 weights. A layer that hashes takes experts from
    a table by token id; the others take those of the best scores, a learned bias included.
    """

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        v4, moe = v4_config(config), config.moe
        assert moe is not None
        name = f"model.layers.{layer}.mlp"
        activation = partial(clamped_silu, limit=v4.clamp)
        self.name = name
        self.scaling = v4.share_scaling
        self.experts = MoeMlp(
            context,
            name,
            hidden_size=config.hidden_size,
            moe=moe,
            activation=activation,
        )
        self.experts.router = context.empty_fp32(moe.expert_count, config.hidden_size)
        self.shared = GatedMlp(
            context,
            f"{name}.shared_experts",
            hidden_size=config.hidden_size,
            intermediate_size=moe.shared_size,
            activation=activation,
        )
        self.table: Tensor | None = None
        self.bias: Tensor | None = None
        if layer in v4.hash_layers:
            self.table = torch.empty(
                (config.vocab_size, moe.experts_per_token),
                dtype=torch.int64,
                device=context.device,
            )
        else:
            self.bias = context.empty_fp32(moe.expert_count)

    def __call__(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """hidden: [T, hidden]. token_ids: int64[T]."""
        scores = F.softplus(F.linear(hidden.float(), self.experts.router)).sqrt()
        if self.table is not None:
            experts = self.table[token_ids]
        else:
            assert self.bias is not None
            experts = (scores + self.bias).topk(self.experts.experts_per_token, dim=-1).indices
        shares = scores.gather(1, experts)
        shares = shares / (shares.sum(dim=-1, keepdim=True) + SUM_EPSILON) * self.scaling
        # A checkpoint's table may name an expert twice.
        is_distinct = self.table is None
        mixed = self.experts.mix_experts(hidden, shares, experts, is_distinct=is_distinct)
        return mixed + self.shared(hidden)

    def weights(self) -> Iterator[Weight]:
        yield from self.experts.weights()
        yield from self.shared.weights()
        if self.bias is not None:
            yield Weight.whole(f"{self.name}.gate.e_score_correction_bias", self.bias)
        if self.table is not None:
            yield Weight.indexes(f"{self.name}.gate.tid2eid", self.table, self.experts.expert_count)


def clamped_silu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * up of [.., 2 n], the gate in the first half and up within limits."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
