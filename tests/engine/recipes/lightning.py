"""Models of linear attention with a fixed decay and of latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.engine.recipes.ling_reference import BailingMoeV2_5ForCausalLM, LingConfig
from tests.engine.recipes.recipe import Classes, Recipe

CLASSES: Classes = {"BailingMoeV2_5ForCausalLM": (LingConfig, BailingMoeV2_5ForCausalLM)}

# The rotated parts of both kinds of heads differ in size, and 4 ranks share 2 groups of a norm.
LIGHTNING: dict[str, object] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "linear_silu": False,
    "rope_theta": 10000.0,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}


def draws_lightning(name: str, tensor: Tensor, generator: torch.Generator) -> bool:
    """Names that no other family has, and mixers that are heard beside the MLPs."""
    deviations = {
        "word_embeddings.weight": 1.0,
        "attention.dense.weight": 6.0 * tensor.shape[-1] ** -0.5,
        "expert_bias": 0.15,
    }
    for suffix, deviation in deviations.items():
        if name.endswith(suffix):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * deviation)
            return True
    return False


RECIPES: dict[str, Recipe] = {
    "ling_2_5": Recipe("BailingMoeV2_5ForCausalLM", LIGHTNING, seed=3, draws_own=draws_lightning),
}
