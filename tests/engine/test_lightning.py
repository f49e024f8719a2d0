"""Ling 2.5: its decays, spellings of a checkpoint, what is cached, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.engine.config.mla import MlaConfig, RouterConfig
from common.engine.config.model import ModelConfig, check_parallel
from common.engine.config.rope import RopeKind
from common.engine.loader import load_model
from common.engine.models.lightning import decay_rates, head_slopes
from common.engine.models.lightning_config import LightningConfig
from common.engine.models.registry import read_model_config
from common.errors import ConfigError
from tests.engine.recipes import ling_reference
from tests.engine.test_kda import PROMPT, cache_nbytes, logits_of
from tests.engine.tiny_checkpoints import RECIPES, Reference, build_checkpoint, edit_config

Checkpoints = Callable[[str], Path]

PUBLISHED: dict[str, object] = {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "eos_token_id": 156895,
    "first_k_dense_replace": 1,
    "group_norm_size": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "layer_group_size": 8,
    "linear_silu": False,
    "max_position_embeddings": 131072,
    "model_type": "bailing_hybrid",
    "moe_intermediate_size": 1024,
    "moe_router_enable_expert_bias": True,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_scaling": None,
    "rope_theta": 6000000,
    "rotary_dim": 64,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "v_head_dim": 128,
    "vocab_size": 157184,
}


def read(directory: Path, **changes: object) -> ModelConfig:
    values = {k: v for k, v in (PUBLISHED | changes).items() if v is not None}
    (directory / "config.json").write_text(json.dumps(values))
    return read_model_config(directory)


def test_the_published_config_is_understood(tmp_path: Path) -> None:
    config = read(tmp_path)
    linear = tuple(layer for layer in range(32) if layer % 8 != 7)
    assert config.family == LightningConfig(linear, 128, 64, 8, False)
    assert config.mla == MlaConfig(1536, 512, 64, 128, 128)
    assert config.moe is not None and config.moe.router == RouterConfig(True, 8, 4, 2.5)
    assert (config.moe.layers, config.extra_layer_count) == (tuple(range(1, 32)), 1)
    assert (config.rope.kind, config.rope.theta) == (RopeKind.DEFAULT, 6e6)
    # Rows of 4 layers, and fp32 states of 28.
    assert cache_nbytes(config) == {"latent": 4 * 576 * 2, "state": 28 * 32 * 128 * 128 * 4}
    # What the published code takes where nothing is said.
    assert read(tmp_path, partial_rotary_factor=None, rotary_dim=None) == config
    assert read(tmp_path, use_linear_silu=True, linear_silu=None).family == LightningConfig(
        linear, 128, 64, 8, True
    )


def test_the_same_model_type_with_another_architecture_is_another_model(tmp_path: Path) -> None:
    changes = {"architectures": ["BailingHybridForCausalLM"], "q_lora_rank": None}
    assert not isinstance(read(tmp_path, **changes).family, LightningConfig)


def test_heads_forget_at_rates_of_their_own() -> None:
    assert head_slopes(4) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    # What twice the next smaller power has, every other one.
    assert head_slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    for count in (1, 2, 12, 32, 40, 64):
        assert head_slopes(count) == pytest.approx(ling_reference.slopes(count), rel=1e-6)


def test_deep_layers_forget_less_and_the_first_one_counts_as_zero() -> None:
    assert decay_rates(4, 0, 9)[0] == pytest.approx(0.25 * (1 + 1e-5))
    assert decay_rates(4, 2, 9)[0] == pytest.approx(0.25 * (0.75 + 1e-5))
    assert decay_rates(4, 8, 9)[3] == pytest.approx(2.0**-8 * 1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_qkv_bias": True}, "use_qkv_bias = true: must be false"),
        ({"use_bias": True}, "use_bias = true: must be false"),
        ({"use_qk_norm": False}, "use_qk_norm = false: must be true"),
        ({"norm_head": True}, "norm_head = true: must be false"),
        ({"linear_rope": False}, "linear_rope = false: must be true"),
        ({"moe_router_enable_expert_bias": False}, "expert_bias = false: must be true"),
        ({"norm_topk_prob": False}, "norm_topk_prob = false: must be true"),
        ({"router_dtype": "bf16"}, 'router_dtype = "bf16": must be "fp32"'),
        ({"score_function": "softmax"}, 'score_function = "softmax": must be the same'),
        ({"rope_interleave": False}, "rope_interleave = false: must be true"),
        ({"rotary_dim": 128}, "rotary_dim = 128: must be 64"),
        ({"partial_rotary_factor": 0.01, "rotary_dim": None}, "= 0.01: must be such that"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok = 1: must be at least 2"),
        ({"num_hidden_layers": 33}, "layer_group_size = 8: must be a divisor of 33"),
        ({"layer_group_size": None}, "layer_group_size is missing"),
        ({"group_norm_size": 48}, "group_norm_size = 48: must be a divisor of 4096"),
        ({"group_norm_size": None}, "group_norm_size is missing"),
    ],
)
def test_what_is_not_implemented_is_named(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **changes)


def test_a_parallel_size_that_tears_groups_unevenly_is_refused(tmp_path: Path) -> None:
    config = read(tmp_path, num_attention_heads=48, intermediate_size=9216, group_norm_size=6)
    for tp_size in (1, 2):
        check_parallel(config, tp_size, 4)
    with pytest.raises(ConfigError, match=r"tp_size=4: .* multiple of 6, .* group_norm_size"):
        check_parallel(config, 4, 1)


@pytest.mark.slow
def test_layers_behind_the_last_one_are_left_out(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    published = Path(shutil.copytree(tiny_checkpoint("ling_2_5"), tmp_path / "published"))
    edit_config(published, num_nextn_predict_layers=1)
    tensors = load_file(published / "model.safetensors")
    assert "model.layers.0.attention.query_key_value.weight" in tensors
    tensors["model.layers.4.eh_proj.weight"] = torch.ones(2, 2)
    tensors["model.layers.4.attention.dense.weight"] = torch.ones(2, 2)
    save_file(tensors, published / "model.safetensors")
    assert torch.equal(logits_of(published), logits_of(tiny_checkpoint("ling_2_5")))
    edit_config(published, num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=r"unexpected 2 tensors: model\.layers\.4\."):
        load_model(published)


@pytest.mark.slow
def test_queries_keys_and_values_may_go_through_silu(tmp_path: Path) -> None:
    recipe = RECIPES["ling_2_5"]
    build_checkpoint(replace(recipe, changes={**recipe.changes, "linear_silu": True}), tmp_path)
    expected = Reference.load(tmp_path).logits(PROMPT)
    torch.testing.assert_close(logits_of(tmp_path), expected, atol=1e-4, rtol=0.0)


def test_half_precision_stays_near_float32(tiny_checkpoint: Checkpoints) -> None:
    path = tiny_checkpoint("ling_2_5")
    # A router near a tie may send a token to another expert; the typical difference is looked at.
    difference = (logits_of(path, dtype="bfloat16") - logits_of(path)).abs()
    assert 0.0 < difference.median() < 0.1
