"""gpt-oss: sinks, windows in every other layer, biased experts with gates that are cut off."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from tests.engine.recipes.recipe import YARN_ROPE, Classes, Recipe


def draw_own(name: str, tensor: Tensor, generator: torch.Generator) -> bool:
    """Sinks that take some of the weight; experts by the rows they have, which are their inputs."""
    noise = torch.randn(tensor.shape, generator=generator)
    if name.endswith("sinks"):
        tensor.copy_(noise + 1.0)
    elif "experts" in name and tensor.dim() == 3:
        tensor.copy_(noise * tensor.shape[1] ** -0.5 * (1.5 if "down" in name else 1.0))
    else:
        return False
    return True


# Small limits, so that many gates and ups are cut off.
GPT_OSS: dict[str, object] = {
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.0,
    "rope_parameters": YARN_ROPE | {"truncate": False, "beta_fast": 8.0},
}

CLASSES: Classes = {"GptOssForCausalLM": (GptOssConfig, GptOssForCausalLM)}

RECIPES: dict[str, Recipe] = {
    # A window much smaller than a page.
    "gpt_oss": Recipe(
        "GptOssForCausalLM", GPT_OSS | {"sliding_window": 8}, seed=33, draws_own=draw_own
    ),
    # A window of more than a page and no multiple of it, on layers in another order; no biases on
    # attention, more experts at a time, another activation.
    "gpt_oss_wide": Recipe(
        "GptOssForCausalLM",
        GPT_OSS
        | {
            "sliding_window": 37,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_bias": False,
            "num_experts_per_tok": 4,
            "swiglu_limit": 0.7,
            "swiglu_alpha": 1.1,
        },
        seed=3,
        draws_own=draw_own,
    ),
}
