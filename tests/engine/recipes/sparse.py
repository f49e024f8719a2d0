"""Models of latent attention that see the tokens which an indexer chooses.

With few index heads, relu leaves no score at all for some keys, and ties are chosen by their place.
"""

from __future__ import annotations

from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

from tests.engine.recipes.latent import LATENT
from tests.engine.recipes.recipe import DEFAULT_ROPE, MSCALE_ROPE, Classes, Recipe

TOKEN_COUNT = 24
INDEXER: dict[str, object] = {
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": TOKEN_COUNT,
}

CLASSES: Classes = {
    "DeepseekV32ForCausalLM": (DeepseekV32Config, DeepseekV32ForCausalLM),
    "GlmMoeDsaForCausalLM": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
}

RECIPES: dict[str, Recipe] = {
    "deepseek_v32": Recipe(
        "DeepseekV32ForCausalLM",
        LATENT | INDEXER | {"rope_parameters": MSCALE_ROPE, "n_shared_experts": 1},
        seed=12,
    ),
    # Two layers share the choice of the one before each; no groups of experts, values wider than
    # keys.
    "glm_dsa": Recipe(
        "GlmMoeDsaForCausalLM",
        LATENT
        | INDEXER
        | {
            "rope_parameters": DEFAULT_ROPE,
            "num_hidden_layers": 4,
            "indexer_types": ["full", "shared", "full", "shared"],
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "qk_nope_head_dim": 16,
            "v_head_dim": 40,
        },
        seed=6,
    ),
}
