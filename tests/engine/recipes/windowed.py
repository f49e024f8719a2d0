"""Models of which some layers see a window only."""

from __future__ import annotations

from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
)

from tests.engine.recipes.recipe import DEFAULT_ROPE, LINEAR_ROPE, Classes, Recipe

GEMMA: dict[str, object] = {"head_dim": 16, "tie_word_embeddings": True}

CLASSES: Classes = {
    "Gemma2ForCausalLM": (Gemma2Config, Gemma2ForCausalLM),
    "Gemma3ForCausalLM": (Gemma3TextConfig, Gemma3ForCausalLM),
    "Gemma3ForConditionalGeneration": (Gemma3Config, Gemma3ForConditionalGeneration),
}

RECIPES: dict[str, Recipe] = {
    # Windows smaller than a page and no multiple of it, and wider than one.
    "mistral_window": Recipe(
        "MistralForCausalLM", {"rope_parameters": DEFAULT_ROPE, "sliding_window": 11}, seed=2
    ),
    "qwen2_window": Recipe(
        "Qwen2ForCausalLM",
        {
            "rope_parameters": DEFAULT_ROPE,
            "use_sliding_window": True,
            "sliding_window": 21,
            "max_window_layers": 1,
        },
        seed=1,
    ),
    "gemma2": Recipe(
        "Gemma2ForCausalLM",
        GEMMA | {"rope_parameters": DEFAULT_ROPE, "sliding_window": 9, "query_pre_attn_scalar": 24},
        norm_mean=0.0,
    ),
    "gemma3": Recipe(
        "Gemma3ForCausalLM",
        GEMMA
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "rope_parameters": {
                "full_attention": LINEAR_ROPE | {"rope_theta": 1e6},
                "sliding_attention": DEFAULT_ROPE,
            },
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
        },
        seed=7,
        norm_mean=0.0,
    ),
}
