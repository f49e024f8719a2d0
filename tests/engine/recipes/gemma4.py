"""Models whose layers differ in their heads, with experts beside an MLP or an input per layer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from transformers import (
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
)

from tests.engine.recipes.recipe import DEFAULT_ROPE, PROPORTIONAL_ROPE, Classes, Recipe

CLASSES: Classes = {
    "Gemma4ForCausalLM": (Gemma4TextConfig, Gemma4ForCausalLM),
    "Gemma4ForConditionalGeneration": (Gemma4Config, Gemma4ForConditionalGeneration),
}


# Of factors that have to lie elsewhere than all others: a layer's and an expert's around one, a
# router's so that its scores differ clearly. Scores of attention are not scaled by the size of a
# head, so norms of queries and keys do that. What a layer adds has the size of its outer norms.
MEANS = {
    "layer_scalar": 0.9,
    "per_expert_scale": 1.0,
    "router.scale": 4.0,
    "q_norm.weight": 0.6,
    "k_norm.weight": 0.6,
    "post_attention_layernorm.weight": 2.0,
    "post_feedforward_layernorm.weight": 2.0,
    "post_feedforward_layernorm_1.weight": 2.0,
    "post_feedforward_layernorm_2.weight": 2.0,
    "post_per_layer_input_norm.weight": 2.0,
}


def draw_factors(
    name: str, tensor: Tensor, generator: torch.Generator, last_norm: float = 4.0
) -> bool:
    """last_norm: what the size of logits comes from; the more layers, the more roundings it
    multiplies."""
    for ending, mean in (MEANS | {"model.norm.weight": last_norm}).items():
        if name.endswith(ending):
            tensor.copy_(mean * (1.0 + 0.2 * torch.randn(tensor.shape, generator=generator)))
            return True
    return False


SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4: dict[str, object] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "tie_word_embeddings": True,
    "sliding_window": 24,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        FULL: PROPORTIONAL_ROPE | {"rope_theta": 1e6},
        SLIDING: DEFAULT_ROPE,
    },
}

RECIPES: dict[str, Recipe] = {
    "gemma4": Recipe(
        "Gemma4ForCausalLM",
        GEMMA4
        | {
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
        seed=3,
        draws_own=draw_factors,
    ),
    "gemma4_moe": Recipe(
        "Gemma4ForCausalLM",
        GEMMA4
        | {
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, SLIDING, FULL],
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
            "attention_bias": True,
        },
        seed=3,
        draws_own=draw_factors,
    ),
    # Every layer has an input of its own, and the last two read what layers 4 and 5 cache.
    "gemma4_e": Recipe(
        "Gemma4ForCausalLM",
        GEMMA4
        | {
            "num_hidden_layers": 8,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL, SLIDING, FULL],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 512,
        },
        seed=8,
        draws_own=partial(draw_factors, last_norm=2.0),
    ),
}
