"""Models of latent attention."""

from __future__ import annotations

from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)

from tests.engine.recipes.recipe import DEFAULT_ROPE, MSCALE_ROPE, Classes, Recipe

LATENT: dict[str, object] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "num_key_value_heads": 8,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}

CLASSES: Classes = {
    "DeepseekV2ForCausalLM": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "DeepseekV3ForCausalLM": (DeepseekV3Config, DeepseekV3ForCausalLM),
}

RECIPES: dict[str, Recipe] = {
    "deepseek_v2": Recipe(
        "DeepseekV2ForCausalLM",
        LATENT | {"rope_parameters": MSCALE_ROPE, "topk_method": "group_limited_greedy"},
        seed=20,
    ),
    "deepseek_v2_lite": Recipe(
        "DeepseekV2ForCausalLM",
        LATENT
        | {
            "rope_parameters": DEFAULT_ROPE,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
        },
        seed=1,
    ),
    "deepseek_v3": Recipe(
        "DeepseekV3ForCausalLM", LATENT | {"rope_parameters": MSCALE_ROPE}, seed=5
    ),
    # One group, no plain layer, and no scaling of positions.
    "kimi_k2": Recipe(
        "DeepseekV3ForCausalLM",
        LATENT
        | {
            "rope_parameters": DEFAULT_ROPE,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "n_shared_experts": 1,
        },
        seed=2,
    ),
}
