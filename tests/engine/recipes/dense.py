"""Models of keys and values that see everything."""

from __future__ import annotations

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.engine.recipes.recipe import (
    DEFAULT_ROPE,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    YARN_ROPE,
    Classes,
    Recipe,
)

CLASSES: Classes = {
    "LlamaForCausalLM": (LlamaConfig, LlamaForCausalLM),
    "MistralForCausalLM": (MistralConfig, MistralForCausalLM),
    "Qwen2ForCausalLM": (Qwen2Config, Qwen2ForCausalLM),
    "Qwen3ForCausalLM": (Qwen3Config, Qwen3ForCausalLM),
    "Qwen3MoeForCausalLM": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}

RECIPES: dict[str, Recipe] = {
    "llama": Recipe("LlamaForCausalLM", {"rope_parameters": DEFAULT_ROPE}, seed=2),
    "llama_bias": Recipe(
        "LlamaForCausalLM",
        {"rope_parameters": DEFAULT_ROPE, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3": Recipe("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}, seed=11),
    "llama_linear": Recipe("LlamaForCausalLM", {"rope_parameters": LINEAR_ROPE}, seed=5),
    "mistral": Recipe(
        "MistralForCausalLM", {"rope_parameters": DEFAULT_ROPE, "sliding_window": None}, seed=2
    ),
    "qwen2_tied": Recipe(
        "Qwen2ForCausalLM",
        {"rope_parameters": DEFAULT_ROPE, "tie_word_embeddings": True},
        seed=1,
    ),
    "qwen2_yarn": Recipe("Qwen2ForCausalLM", {"rope_parameters": YARN_ROPE}, seed=1),
    "qwen3": Recipe("Qwen3ForCausalLM", {"rope_parameters": DEFAULT_ROPE, "head_dim": 32}, seed=6),
    "qwen3_moe": Recipe(
        "Qwen3MoeForCausalLM",
        {
            "rope_parameters": DEFAULT_ROPE,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        seed=8,
    ),
}
