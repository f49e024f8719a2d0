"""Checkpoints of latent attention as they are: spellings of a config, layers to skip, refusals."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.engine.config.mla import MlaConfig, RouterConfig
from common.engine.config.weight_format import Float8Blocks
from common.engine.layers.rotary import score_scale
from common.engine.loader import load_model
from common.engine.models.registry import cache_components, read_model_config
from common.errors import ConfigError
from tests.engine.paged_decoding import Sequence, forward, make_pool, shuffled_pages
from tests.engine.recipes.latent import RECIPES as LATENT_RECIPES
from tests.engine.tiny_checkpoints import (
    LATENT,
    Recipe,
    build_checkpoint,
    edit_config,
    random_prompt,
    respell_as_published,
)

Checkpoints = Callable[[str], Path]

NAMES = list(LATENT_RECIPES)


@pytest.mark.parametrize("name", NAMES)
def test_published_spelling_gives_the_same_logits(
    name: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    shutil.copytree(tiny_checkpoint(name), tmp_path / "published")
    respell_as_published(tmp_path / "published")
    logits = []
    for path in (tiny_checkpoint(name), tmp_path / "published"):
        model = load_model(path)
        sequence = Sequence(random_prompt(40, 3), shuffled_pages(4, 1))
        logits.append(forward(model, make_pool(model, 4), [sequence.chunk(40)]))
    assert torch.equal(logits[0], logits[1])


PUBLISHED_V3: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


PUBLISHED_V2_LITE = PUBLISHED_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_nextn_predict_layers": None,
    "q_lora_rank": None,
    "quantization_config": None,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
}


def test_published_configs_are_understood(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_V3))
    v3 = read_model_config(tmp_path)
    assert v3.mla == MlaConfig(1536, 512, 64, 128, 128)
    assert v3.moe is not None and v3.moe.router == RouterConfig(True, 8, 4, 2.5)
    assert (v3.moe.layers, v3.moe.shared_size) == (tuple(range(3, 61)), 2048)
    assert (v3.weight_format, v3.extra_layer_count, v3.context_length) == (
        Float8Blocks(128, 128),
        1,
        163840,
    )
    magnitude = 0.1 * math.log(40.0) + 1.0
    assert score_scale(v3.rope, v3.mla.query_dim) == pytest.approx(192**-0.5 * magnitude**2)
    assert cache_components(v3, "auto")[0].segments[0].unit_nbytes == 576 * 2

    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_V2_LITE))
    lite = read_model_config(tmp_path)
    assert lite.mla == MlaConfig(None, 512, 64, 128, 128)
    assert lite.moe is not None and lite.moe.router == RouterConfig(False, 1, 1, 1.0)
    assert (lite.moe.layers, lite.moe.shared_size) == (tuple(range(1, 27)), 2816)
    assert (lite.weight_format, lite.extra_layer_count) == (None, 0)


def test_what_decides_experts_stays_in_fp32(tiny_checkpoint: Checkpoints) -> None:
    model = load_model(tiny_checkpoint("deepseek_v3"), dtype="bfloat16")
    stored = {p.name: p.target.dtype for w in model.weights() for p in w.ways[0]}
    assert stored["model.layers.1.mlp.gate.e_score_correction_bias"] == torch.float32
    assert stored["model.layers.1.mlp.gate.weight"] == torch.float32
    assert stored["model.layers.1.self_attn.kv_b_proj.weight"] == torch.bfloat16


def test_layers_that_predict_further_tokens_are_skipped(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    shutil.copytree(tiny_checkpoint("deepseek_v3"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("eh_proj.weight", "embed_tokens.weight", "shared_head.head.weight"):
        tensors[f"model.layers.3.{name}"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    for key in ("num_mtp_layers", "num_nextn_predict_layers"):
        edit_config(tmp_path, num_mtp_layers=None, num_nextn_predict_layers=None)
        with pytest.raises(ConfigError, match=r"unexpected 3 tensors: model\.layers\.3\.eh_proj"):
            load_model(tmp_path)
        edit_config(tmp_path, **{key: 1})
        assert load_model(tmp_path).layer_ids == range(3)


def remove_latent_norm(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.self_attn.kv_a_layernorm.weight"]


def remove_bias(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.2.mlp.gate.e_score_correction_bias"]


def add_plain_query(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(384, 64)


def shorten_row(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    tensors[name] = tensors[name][:-16].contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_latent_norm, r"lacks 1 tensors: model\.layers\.1\.self_attn\.kv_a_layernorm"),
        (remove_bias, r"lacks 1 tensors: model\.layers\.2\.mlp\.gate\.e_score_correction_bias"),
        (add_plain_query, r"unexpected 1 tensors: model\.layers\.0\.self_attn\.q_proj"),
        (shorten_row, r"kv_a_proj_with_mqa\.weight has shape \[32, 64\]: .* asks for \[48, 64\]"),
    ],
)
def test_wrong_tensors_are_named(
    change: Callable[[dict[str, Tensor]], None],
    message: str,
    tiny_checkpoint: Checkpoints,
    tmp_path: Path,
) -> None:
    shutil.copytree(tiny_checkpoint("deepseek_v3"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"q_lora_rank": None}, "q_lora_rank is missing: must be an integer, or null"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim = 15: must be even"),
        ({"v_head_dim": 0}, "v_head_dim = 0: must be an integer of at least 1"),
        ({"n_routed_experts": "16"}, 'n_routed_experts = "16"'),
        ({"n_group": 3}, "n_group = 3: must be a divisor of n_routed_experts = 16"),
        ({"n_group": 16}, "n_group = 16: must be at most 8"),
        ({"topk_group": 5}, "topk_group = 5: must be at most n_group = 4"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9: must be at most 8"),
        ({"scoring_func": "softmax"}, 'scoring_func = "softmax": must be "sigmoid"'),
        ({"topk_method": "greedy"}, 'topk_method = "greedy": must be one of noaux_tc'),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2: must be 1"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            'quant_method = "hqq": must be "fp8" or "compressed-tensors" or "awq" or "gptq"',
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            r"weight_block_size = \[128\]: must be two integers",
        ),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, 'fmt = "e5m2"'),
    ],
)
def test_impossible_configs_are_named(
    changes: dict[str, object], message: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    shutil.copytree(tiny_checkpoint("deepseek_v3"), tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_groups_are_read_only_where_they_are_used(tmp_path: Path) -> None:
    recipe = Recipe("DeepseekV2ForCausalLM", LATENT | {"topk_method": "greedy"})
    build_checkpoint(recipe, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["n_group"] == 4
    moe = load_model(tmp_path).config.moe
    assert moe is not None and moe.router == RouterConfig(False, 1, 1, 2.5)
