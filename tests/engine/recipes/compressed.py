"""Models that compress their past to blocks."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from tests.engine.recipes.recipe import YARN_ROPE, Classes, Recipe

SLIDING, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
# The window is no multiple of a page or block, heavy blocks are longer than it, and more blocks are
# closed than the indexer chooses. With fewer index heads, scores of exactly 0 are no rarity, and
# transformers breaks such ties by how many blocks there are.
V4: dict[str, object] = {
    "num_hidden_layers": 4,
    "layer_types": [HEAVY, SPARSE, SLIDING, SPARSE],
    "compress_rates": {SPARSE: 4, HEAVY: 16},
    "sliding_window": 12,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 48,
    "o_groups": 4,
    "o_lora_rank": 16,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 12,
    "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
    "hc_sinkhorn_iters": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "rope_parameters": {key: value for key, value in YARN_ROPE.items() if key != "rope_theta"},
}


def draw_v4(name: str, tensor: Tensor, generator: torch.Generator) -> bool:
    """Streams that are mixed near to what their init does, and a random table of experts."""
    if name.endswith("tid2eid"):
        scores = torch.rand((len(tensor), V4_EXPERTS), generator=generator)
        tensor.copy_(scores.argsort(dim=-1)[:, : tensor.shape[1]])
    elif name.endswith(("hc.scale", "hc_scale")):
        tensor.copy_(1.0 + 0.15 * torch.randn(tensor.shape, generator=generator))
    elif "o_b_proj" in name:
        fan_in = tensor.shape[-1] ** -0.5
        tensor.copy_(3.0 * fan_in * torch.randn(tensor.shape, generator=generator))
    elif "position_bias" in name:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    else:
        return False
    return True


V4_EXPERTS = 8

CLASSES: Classes = {"DeepseekV4ForCausalLM": (DeepseekV4Config, DeepseekV4ForCausalLM)}

RECIPES: dict[str, Recipe] = {
    "deepseek_v4": Recipe("DeepseekV4ForCausalLM", V4, seed=5, draws_own=draw_v4),
}
