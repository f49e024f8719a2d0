"""Kimi-Linear and Ling 3.0: spellings of a checkpoint, what is cached, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.engine.config.mla import MlaConfig, RouterConfig
from common.engine.config.model import ModelConfig, check_parallel
from common.engine.loader import load_model
from common.engine.models.kda_config import KdaConfig, kda_config
from common.engine.models.registry import cache_components, read_model_config
from common.errors import ConfigError
from common.layout.cache_layout import ServerLayout
from tests.engine.paged_decoding import Sequence, forward, make_pool, shuffled_pages
from tests.engine.tiny_checkpoints import (
    RECIPES,
    Reference,
    build_checkpoint,
    edit_config,
    random_prompt,
)

Checkpoints = Callable[[str], Path]

PROMPT = random_prompt(40, 3)
FULL_LAYERS = [4, 8, 12, 16, 20, 24, 27]
LINEAR_CONFIG: dict[str, object] = {
    "full_attn_layers": FULL_LAYERS,
    "head_dim": 128,
    "kda_layers": [number for number in range(1, 28) if number not in FULL_LAYERS],
    "num_heads": 32,
    "short_conv_kernel_size": 4,
}
PUBLISHED_KIMI: dict[str, object] = {
    "architectures": ["KimiLinearForCausalLM"],
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": LINEAR_CONFIG,
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
PUBLISHED_LING: dict[str, object] = {
    "architectures": ["BailingHybridForCausalLM"],
    "dtype": "bfloat16",
    "first_k_dense_replace": 2,
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 6144,
    "kda_lower_bound": -5.0,
    "kda_safe_gate": True,
    "kv_lora_rank": 512,
    "layer_group_size": 6,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 768,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 42,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 6000000.0,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "short_conv_kernel_size": 4,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 157184,
}


def read(directory: Path, published: dict[str, object], **changes: object) -> ModelConfig:
    values = {k: v for k, v in (published | changes).items() if v is not None}
    (directory / "config.json").write_text(json.dumps(values))
    return read_model_config(directory)


def logits_of(path: Path, *, dtype: str = "auto") -> Tensor:
    model = load_model(path, dtype=dtype)
    sequence, pool = Sequence(PROMPT, shuffled_pages(4, 1)), make_pool(model, 4)
    parts = [sequence.chunk(size, all_logits=True) for size in (30, 9, 1)]
    return torch.cat([forward(model, pool, [part]) for part in parts])


def cache_nbytes(config: ModelConfig) -> dict[str, int]:
    """Of a token or a sequence, all layers of a component."""
    return {
        component.name: len(component.layers)
        * sum(segment.unit_count * segment.unit_nbytes for segment in component.segments)
        for component in cache_components(config, "auto")
    }


def test_published_configs_are_understood(tmp_path: Path) -> None:
    kimi = read(tmp_path, PUBLISHED_KIMI)
    linear = tuple(layer for layer in range(27) if layer + 1 not in FULL_LAYERS)
    assert kimi.family == KdaConfig(linear, 32, 128, 4, 128, None, False, False)
    assert kimi.mla == MlaConfig(None, 512, 64, 128, 128)
    assert kimi.moe is not None and kimi.moe.router == RouterConfig(True, 1, 1, 2.446)
    assert (kimi.moe.layers, kimi.moe.shared_size) == (tuple(range(1, 27)), 1024)
    assert (kimi.context_length, kimi.rms_norm_eps) == (1048576, 1e-5)
    # Three inputs of q, k and v, and a state of fp32, in 20 of 27 layers.
    assert cache_nbytes(kimi) == {
        "latent": 7 * 576 * 2,
        "conv": 20 * 3 * 32 * 128 * 3 * 2,
        "state": 20 * 32 * 128 * 128 * 4,
    }

    ling = read(tmp_path, PUBLISHED_LING)
    linear = tuple(layer for layer in range(42) if layer % 6 != 5)
    assert ling.family == KdaConfig(linear, 32, 128, 4, None, -5.0, True, True)
    assert ling.mla == kimi.mla
    assert ling.moe is not None and ling.moe.router == RouterConfig(True, 8, 4, 2.5)
    assert (ling.moe.layers, ling.extra_layer_count) == (tuple(range(2, 42)), 1)
    assert (ling.rope.theta, ling.rope.is_interleaved) == (6e6, True)
    # The same rotation, as a share of the heads that recur.
    assert read(tmp_path, PUBLISHED_LING, partial_rotary_factor=0.5) == ling
    assert kda_config(read(tmp_path, PUBLISHED_LING, kda_safe_gate=False)).decay_floor is None


def test_caches_of_rotated_and_unrotated_rows_do_not_mix(tmp_path: Path) -> None:
    orders = [
        next(c.order for c in cache_components(config, "auto") if c.name == "latent")
        for config in (read(tmp_path, PUBLISHED_KIMI), read(tmp_path, PUBLISHED_LING))
    ]
    assert orders == ["rope-none", "rope-pairs"]


def test_stages_without_latent_layers_and_without_states_have_a_layout(tmp_path: Path) -> None:
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    config = read(tmp_path, PUBLISHED_LING, num_hidden_layers=3, layer_types=kinds)
    layout = ServerLayout(cache_components(config, "auto"), 8, ((0, 2), (2, 3)), 64)
    layout.check()
    held = [
        [sorted({cell.component for cell in group.cells}) for group in layout.rank(stage, 7).groups]
        for stage in range(2)
    ]
    assert held == [[[], ["conv", "state"]], [["latent"], []]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope = false: must be true"),
        ({"moe_router_activation_func": "softmax"}, '= "softmax": must be "sigmoid"'),
        ({"num_local_experts": 128}, "num_local_experts = 128: must be the same as"),
        ({"use_grouped_topk": False, "num_expert_group": 8}, "use_grouped_topk = false: must be"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2: must be 1"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu": must be "silu"'),
        ({"linear_attn_config": None}, "linear_head_dim is missing"),
        (
            {"linear_attn_config": LINEAR_CONFIG | {"kda_layers": [1, 2, 3]}},
            r"kda_layers = \[1, 2, 3\]: must be all of 1..27 that full_attn_layers",
        ),
        (
            {"linear_attn_config": LINEAR_CONFIG | {"full_attn_layers": [0, 4]}},
            "full_attn_layers .* at least 1",
        ),
        (
            {"linear_attn_config": LINEAR_CONFIG | {"short_conv_kernel_size": 1}},
            "short_conv_kernel_size = 1: must be an integer of at least 2",
        ),
        ({"layer_types": ["linear_attention"] * 27}, "27 layers are of both kinds"),
        ({"layer_types": ["mamba"] * 27}, "layer_types .* for each of 27 layers"),
    ],
)
def test_what_kimi_linear_does_not_do_is_named(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, PUBLISHED_KIMI, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_interleave": False}, "rope_interleave = false: must be true"),
        ({"kda_lower_bound": 0.5}, "kda_lower_bound = 0.5: must be below 0"),
        ({"q_lora_rank": 1536}, "q_lora_rank = 1536: must be absent"),
        ({"partial_rotary_factor": 0.25}, "qk_rope_head_dim = 64 is rotated"),
        ({"layer_group_size": 1}, "layer_group_size = 1: must be such that 42 layers are of both"),
        ({"layer_group_size": 64}, "layer_group_size = 64: must be such that"),
        ({"score_function": "softmax"}, '= "softmax": must be "sigmoid"'),
        ({"scoring_func": "softmax"}, '= "sigmoid": must be the same as scoring_func'),
        ({"mlp_layer_types": ["dense"]}, "one of dense, sparse for each of 42 layers"),
    ],
)
def test_what_ling_3_does_not_do_is_named(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, PUBLISHED_LING, **changes)


def test_a_parallel_size_that_tears_a_head_is_refused(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED_KIMI, linear_attn_config=LINEAR_CONFIG | {"num_heads": 12})
    check_parallel(config, 4, 2)
    with pytest.raises(ConfigError, match=r"tp_size=8: must divide 12, .* linear attention heads"):
        check_parallel(config, 8, 1)


@pytest.mark.slow
def test_kimi_as_published_gives_the_same_logits(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Its plain MLP is called one, its layers are counted from 1."""
    published = Path(shutil.copytree(tiny_checkpoint("kimi_linear"), tmp_path / "published"))
    edit_config(
        published,
        layer_types=None,
        mlp_layer_types=None,
        linear_num_heads=None,
        linear_head_dim=None,
        linear_conv_kernel_dim=None,
        linear_attn_config={
            "kda_layers": [1, 3],
            "full_attn_layers": [2],
            "head_dim": 12,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
        },
        first_k_dense_replace=1,
        rope_theta=10000.0,
        mla_use_nope=True,
        moe_router_activation_func="sigmoid",
    )
    tensors = {
        name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): tensor
        for name, tensor in load_file(published / "model.safetensors").items()
    }
    assert "model.layers.0.mlp.up_proj.weight" in tensors
    assert "model.layers.1.block_sparse_moe.experts.0.w1.weight" in tensors
    save_file(tensors, published / "model.safetensors")
    assert torch.equal(logits_of(published), logits_of(tiny_checkpoint("kimi_linear")))


@pytest.mark.slow
def test_ling_as_published_gives_the_same_logits(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """A group size instead of a list, and unused layers behind the last one."""
    published = Path(shutil.copytree(tiny_checkpoint("ling_3"), tmp_path / "published"))
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    assert json.loads((published / "config.json").read_text())["layer_types"] == kinds
    edit_config(
        published,
        layer_types=None,
        mlp_layer_types=None,
        linear_head_dim=None,
        linear_num_heads=None,
        linear_conv_kernel_dim=None,
        rope_parameters=None,
        layer_group_size=2,
        head_dim=8,
        num_nextn_predict_layers=1,
    )
    tensors = load_file(published / "model.safetensors")
    assert "model.layers.1.attention.dense.weight" in tensors
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(2, 2)
    tensors["model.layers.3.attention.dense.weight"] = torch.ones(2, 2)
    tensors["model.mtp_layers.0.eh_proj.weight"] = torch.ones(2, 2)
    save_file(tensors, published / "model.safetensors")
    assert torch.equal(logits_of(published), logits_of(tiny_checkpoint("ling_3")))


@pytest.mark.slow
def test_decays_without_a_bound_equal_transformers(tmp_path: Path) -> None:
    recipe = RECIPES["ling_3"]
    recipe = replace(recipe, changes={**recipe.changes, "kda_safe_gate": False})
    build_checkpoint(recipe, tmp_path)
    expected = Reference.load(tmp_path).logits(PROMPT)
    torch.testing.assert_close(logits_of(tmp_path), expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("name", ["kimi_linear", "ling_3"])
def test_half_precision_stays_near_float32(name: str, tiny_checkpoint: Checkpoints) -> None:
    path = tiny_checkpoint(name)
    # A router near a tie may send a token to another expert; the typical difference is looked at.
    difference = (logits_of(path, dtype="bfloat16") - logits_of(path)).abs()
    assert 0.0 < difference.median() < 0.1


def test_the_kernels_of_the_recurrence_are_named(tiny_checkpoint: Checkpoints) -> None:
    described = load_model(tiny_checkpoint("kimi_linear")).describe()
    assert described["delta rule"] == "torch: the path of cpu"
    assert described["attention"].startswith("latent torch")
