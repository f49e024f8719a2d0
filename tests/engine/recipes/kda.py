"""Models of which most layers recur with a decay per channel, and the others are latent."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import (
    BailingHybridConfig,
    BailingHybridForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
)

from tests.engine.recipes.recipe import Classes, Recipe

# A layer of each kind behind one of the other, and the last stage ends with one that recurs.
LAYER_TYPES = ["linear_attention", "full_attention", "linear_attention"]
HYBRID: dict[str, object] = {
    "layer_types": LAYER_TYPES,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}

Draw = Callable[[str, Tensor, torch.Generator], bool]

CLASSES: Classes = {
    "KimiLinearForCausalLM": (KimiLinearConfig, KimiLinearForCausalLM),
    "BailingHybridForCausalLM": (BailingHybridConfig, BailingHybridForCausalLM),
}


def drawing(rates: tuple[float, float], biases: tuple[float, float]) -> Draw:
    """Decays with which tokens of long ago still matter, and mixers that are heard beside MLPs."""

    def draw(name: str, tensor: Tensor, generator: torch.Generator) -> bool:
        def uniform(low: float, high: float) -> Tensor:
            return torch.rand(tensor.shape, generator=generator) * (high - low) + low

        if name.endswith("A_log"):
            tensor.copy_(uniform(*rates).log())
        elif name.endswith("dt_bias"):
            tensor.copy_(uniform(*biases))
        elif name.endswith("o_proj.weight"):
            deviation = 6.0 * tensor.shape[-1] ** -0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * deviation)
        else:
            return False
        return True

    return draw


RECIPES: dict[str, Recipe] = {
    "kimi_linear": Recipe(
        "KimiLinearForCausalLM",
        HYBRID
        | {
            "linear_num_heads": 2,
            "linear_head_dim": 12,
            "num_nextn_predict_layers": 0,
        },
        draws_own=drawing(rates=(0.1, 1.0), biases=(-3.5, -2.0)),
    ),
    # Groups of experts, and heads of the recurrence that are as many as those of attention.
    "ling_3": Recipe(
        "BailingHybridForCausalLM",
        HYBRID | {"head_dim": 8, "n_group": 4, "topk_group": 2},
        draws_own=drawing(rates=(0.6, 1.0), biases=(-7.0, -4.0)),
    ),
}
