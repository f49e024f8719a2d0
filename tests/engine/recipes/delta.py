"""Models of which most layers recur by the gated delta rule."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.engine.recipes.recipe import DEFAULT_ROPE, Classes, Recipe

# Key and value heads differ in number and size, so that nothing is right by chance.
DELTA: dict[str, object] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "head_dim": 16,
    "rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
EXPERTS: dict[str, object] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}

CLASSES: Classes = {
    "Qwen3NextForCausalLM": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "Qwen3_5ForCausalLM": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "Qwen3_5MoeForCausalLM": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
}


def draws_delta(name: str, tensor: Tensor, generator: torch.Generator) -> bool:
    """Decays with which tokens of long ago still matter, mixers that are heard beside the MLPs,
    and the one norm that has no offset."""

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(tensor.shape, generator=generator) * (high - low) + low

    if name.endswith("A_log"):
        tensor.copy_(uniform(0.1, 1.0).log())
    elif name.endswith("dt_bias"):
        tensor.copy_(uniform(-3.5, -2.0))
    elif name.endswith(("out_proj.weight", "o_proj.weight")):
        deviation = 6.0 * tensor.shape[-1] ** -0.5
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * deviation)
    elif name.endswith("linear_attn.norm.weight"):
        tensor.copy_(uniform(0.8, 1.2))
    else:
        return False
    return True


# Seeds are also picked such that no head's output is tiny before its norm, which would blow a last
# bit up: with seed 3, one ulp of noise on the embeddings of qwen3_5_moe moves transformers' own
# logits by 1e-3, with seed 1 by 3e-5.
RECIPES: dict[str, Recipe] = {
    "qwen3_next": Recipe(
        "Qwen3NextForCausalLM",
        DELTA | EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": True},
        norm_mean=0.0,
        seed=2,
        draws_own=draws_delta,
    ),
    "qwen3_5": Recipe(
        "Qwen3_5ForCausalLM",
        DELTA,
        seed=4,
        norm_mean=0.0,
        draws_own=draws_delta,
    ),
    "qwen3_5_moe": Recipe(
        "Qwen3_5MoeForCausalLM", DELTA | EXPERTS, norm_mean=0.0, seed=1, draws_own=draws_delta
    ),
}
