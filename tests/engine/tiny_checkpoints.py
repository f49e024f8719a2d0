"""Tiny random checkpoints of every supported architecture, and what transformers makes of them.

The weights are redrawn after initialisation: with the library's own small init a model repeats one
token, and nothing would show a wrong page. Importable by any test; costs some 50 ms per checkpoint.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 512
CLASSES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "Gemma2ForCausalLM": (Gemma2Config, Gemma2ForCausalLM),
    "Gemma3ForCausalLM": (Gemma3TextConfig, Gemma3ForCausalLM),
    "LlamaForCausalLM": (LlamaConfig, LlamaForCausalLM),
    "MistralForCausalLM": (MistralConfig, MistralForCausalLM),
    "Qwen2ForCausalLM": (Qwen2Config, Qwen2ForCausalLM),
    "Qwen3ForCausalLM": (Qwen3Config, Qwen3ForCausalLM),
    "Qwen3MoeForCausalLM": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "DeepseekV2ForCausalLM": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "DeepseekV3ForCausalLM": (DeepseekV3Config, DeepseekV3ForCausalLM),
}
# 8 query heads on 2 KV heads, so that tensor parallel size 4 has to replicate.
COMMON: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE: dict[str, object] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR_ROPE: dict[str, object] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
# The two mscales differ, so that the factor on cos and sin is not 1.
MSCALE_ROPE = YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3}
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
DEFAULT_ROPE: dict[str, object] = {"rope_type": "default", "rope_theta": 10000.0}


GEMMA: dict[str, object] = {"head_dim": 16, "tie_word_embeddings": True}


@dataclass(frozen=True)
class Recipe:
    """A tiny checkpoint: an architecture, and what its config changes from COMMON."""

    architecture: str
    changes: Mapping[str, object] = field(default_factory=dict)
    seed: int = 0

    @property
    def is_tied(self) -> bool:
        return self.changes.get("tie_word_embeddings") is True

    @property
    def is_gemma(self) -> bool:
        return self.architecture.startswith("Gemma")


# Seeds are picked: with the prompts of the tests, no output has fewer than 8 distinct tokens among
# 64, and the two best logits are never closer than 2e-3, hundreds of times the difference in fp32.
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
    ),
}


def build_checkpoint(
    recipe: Recipe, directory: Path, *, file_nbytes_max: int | None = None
) -> Path:
    """Write a checkpoint as transformers saves it. file_nbytes_max: cut into several files."""
    config_class, model_class = CLASSES[recipe.architecture]
    config = config_class.from_dict({**COMMON, **recipe.changes})
    torch.manual_seed(recipe.seed)
    model = model_class(config)
    redraw(model, recipe.seed, is_tied=recipe.is_tied, norm_mean=0.0 if recipe.is_gemma else 1.0)
    model.save_pretrained(directory, max_shard_size=file_nbytes_max or "1GB")
    return directory


def redraw(model: torch.nn.Module, seed: int, *, is_tied: bool, norm_mean: float = 1.0) -> None:
    """Weights with which every cached page decides tokens and few tokens repeat."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: Tensor, mean: float, deviation: float) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * deviation + mean)

    with torch.no_grad():
        for name, tensor in model.named_parameters():
            fan_in = tensor.shape[-1] ** -0.5
            if "embed_tokens" in name:
                draw(tensor, 0.0, 0.1 if is_tied else 1.0)
            elif tensor.dim() == 1:
                # What a Gemma layer adds has the size of its outer norms, not of its projections.
                is_outer = norm_mean == 0.0 and "post_" in name
                draw(tensor, 2.0 if is_outer else norm_mean if "norm" in name else 0.0, 0.15)
            elif "o_proj" in name:
                draw(tensor, 0.0, fan_in * (2.0 if is_tied else 3.0))
            elif "down_proj" in name:
                draw(tensor, 0.0, fan_in * (4.0 if is_tied else 1.5))
            elif "lm_head" in name:
                draw(tensor, 0.0, fan_in * 2.0)
            else:
                draw(tensor, 0.0, fan_in)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                draw(buffer, 0.0, 0.15)


def respell_as_published(directory: Path) -> None:
    """Rewrite config.json as models on the hub have it: rope_theta, rope_scaling, torch_dtype."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype")
    config["rope_scaling"] = None
    if rope["rope_type"] != "default":
        rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = rope
    path.write_text(json.dumps(config))


def edit_config(directory: Path, **changes: object) -> None:
    """Change members of config.json; None removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def random_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


@dataclass(frozen=True)
class Reference:
    """transformers' answers for a checkpoint, in float32 on the CPU."""

    model: torch.nn.Module

    @staticmethod
    def load(directory: Path) -> Reference:
        architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: torch.nn.Module = CLASSES[architecture][1].from_pretrained(
                directory, dtype=torch.float32
            )
        return Reference(model.eval())

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """float32[tokens, vocabulary]."""
        logits: Tensor = self.model(torch.tensor([token_ids])).logits[0]
        return logits

    @torch.inference_mode()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The `count` most likely next tokens, ends of sentence included."""
        cache = None
        step = prompt
        output: list[int] = []
        for _ in range(count):
            result = self.model(torch.tensor([step]), past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            step = [int(result.logits[0, -1].argmax())]
            output += step
        return output
