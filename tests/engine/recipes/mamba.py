"""Models of Mamba-2 mixers and attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
)

from tests.engine.recipes.recipe import DEFAULT_ROPE, Classes, Recipe

CLASSES: Classes = {
    "FalconH1ForCausalLM": (FalconH1Config, FalconH1ForCausalLM),
    "NemotronHForCausalLM": (NemotronHConfig, NemotronHForCausalLM),
}


def draw_mamba(name: str, tensor: Tensor, generator: torch.Generator) -> bool:
    """Decays with which tokens far back still matter."""

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(tensor.shape, generator=generator) * (high - low) + low

    part = name.rsplit(".", 1)[-1]
    if part == "A_log":
        tensor.copy_(uniform(math.log(0.1), 0.0))
    elif part == "dt_bias":
        tensor.copy_(uniform(-3.5, -2.0))
    elif part == "D":
        tensor.copy_(uniform(0.1, 0.5))
    elif name.endswith("conv1d.weight"):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.7)
    elif name.endswith("embeddings.weight"):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    elif name.endswith("out_proj.weight"):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5 * 3)
    else:
        return False
    return True


NEMOTRON: dict[str, object] = {
    "num_hidden_layers": None,
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 16,
    # transformers bounds steps of prompts from below by it, and those of decodes by nothing.
    "time_step_min": 1e-9,
}
EXPERTS: dict[str, object] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
    "n_group": 2,
    "topk_group": 1,
}
FALCON: dict[str, object] = {
    "rope_parameters": DEFAULT_ROPE,
    "num_hidden_layers": 2,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "mamba_rms_norm": False,
    "embedding_multiplier": 1.3,
    "lm_head_multiplier": 0.8,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.85,
    "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 0.7],
    "mlp_multipliers": [0.9, 1.2],
}

RECIPES: dict[str, Recipe] = {
    # Of two stages, one has no attention and one no mixer.
    "nemotron_h": Recipe(
        "NemotronHForCausalLM",
        NEMOTRON | EXPERTS | {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "moe"]},
        seed=5,
        draws_own=draw_mamba,
    ),
    "falcon_h1": Recipe(
        "FalconH1ForCausalLM",
        FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
        seed=11,
        draws_own=draw_mamba,
    ),
}
# What else a config can say; only logits are compared.
VARIANTS: dict[str, Recipe] = {
    "latent experts": Recipe(
        "NemotronHForCausalLM",
        NEMOTRON
        | EXPERTS
        | {"layers_block_type": ["mamba", "moe", "attention"], "moe_latent_size": 24},
        draws_own=draw_mamba,
    ),
    "no norm behind the recurrence": Recipe("FalconH1ForCausalLM", FALCON, draws_own=draw_mamba),
    "norm before the gate": Recipe(
        "FalconH1ForCausalLM",
        FALCON | {"mamba_n_groups": 2, "mamba_rms_norm": True, "mamba_norm_before_gate": True},
        draws_own=draw_mamba,
    ),
    "biases": Recipe(
        "FalconH1ForCausalLM",
        FALCON
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
        },
        draws_own=draw_mamba,
    ),
    "no bias of the convolution": Recipe(
        "FalconH1ForCausalLM", FALCON | {"mamba_conv_bias": False}, draws_own=draw_mamba
    ),
}
