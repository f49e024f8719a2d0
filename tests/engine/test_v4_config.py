"""What DeepSeek-V4's config.json says, in both spellings, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.engine.config.model import ModelConfig
from common.engine.config.rope import RopeKind
from common.engine.config.weight_format import Float4Groups, Float8Blocks
from common.engine.models.deepseek_v4_config import CompressionKind, v4_config
from common.engine.models.registry import cache_components, read_model_config
from common.errors import ConfigError
from common.layout.component import Live, LiveKind

# The published config with fewer layers and a smaller hidden size.
PUBLISHED: dict[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 48,
    "o_groups": 4,
    "o_lora_rank": 16,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 512,
    "compress_ratios": [0, 0, 4, 128, 4, 0],
    "sliding_window": 128,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "num_hash_layers": 2,
    "num_nextn_predict_layers": 1,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "torch_dtype": "bfloat16",
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    },
}
KINDS = (
    CompressionKind.SLIDING,
    CompressionKind.SLIDING,
    CompressionKind.SPARSE,
    CompressionKind.HEAVY,
    CompressionKind.SPARSE,
)
SAVED = {key: value for key, value in PUBLISHED.items() if key not in (
    "compress_ratios", "num_hash_layers", "rope_scaling", "torch_dtype",
)} | {
    "dtype": "bfloat16",
    "layer_types": list(KINDS),
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"],
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25},
        "compress": {
            "rope_type": "yarn",
            "rope_theta": 160000,
            "partial_rotary_factor": 0.25,
            "attention_factor": 1.0,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
}  # fmt: skip


def read(directory: Path, base: dict[str, object], **changes: object) -> ModelConfig:
    values = {key: value for key, value in {**base, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(values))
    return read_model_config(directory)


def test_both_spellings_are_one_config(tmp_path: Path) -> None:
    assert read(tmp_path, PUBLISHED) == read(tmp_path, SAVED)


def test_what_the_published_config_says(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED)
    v4 = v4_config(config)
    assert v4.kinds == KINDS
    assert (v4.sparse_ratio, v4.heavy_ratio, v4.window) == (4, 128, 128)
    assert v4.hash_layers == (0, 1)
    assert config.is_compressed and config.extra_layer_count == 1
    assert config.rotary_dim == 16 and config.context_length == 1048576
    assert (config.rope.kind, config.rope.theta) == (RopeKind.DEFAULT, 10000.0)
    assert (v4.block_rope.kind, v4.block_rope.theta) == (RopeKind.YARN, 160000.0)
    # Its positions are scaled, never its cos and sin.
    assert v4.block_rope.attention_factor == 1.0
    assert config.rope.is_interleaved and v4.block_rope.is_interleaved
    assert config.weight_format == Float8Blocks(128, 128, Float4Groups(32))


def test_ratios_of_other_sizes(tmp_path: Path) -> None:
    rates = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 16}
    assert v4_config(read(tmp_path, SAVED, compress_rates=rates)).heavy_ratio == 16
    assert v4_config(read(tmp_path, PUBLISHED, compress_rate_hca=32)).heavy_ratio == 32


def test_layers_own_what_their_kind_asks_for(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED)
    found = {c.name: (c.layers, c.live, c.dtype) for c in cache_components(config, "auto")}
    block, long_block = Live(LiveKind.BLOCK, 4), Live(LiveKind.BLOCK, 128)
    tail, long_tail = Live(LiveKind.TAIL, 4, 4), Live(LiveKind.TAIL, 128, 0)
    assert found == {
        "window": ((0, 1, 2, 3, 4), Live(LiveKind.WINDOW, 128), "bfloat16"),
        "csa_block": ((2, 4), block, "bfloat16"),
        "csa_index": ((2, 4), block, "bfloat16"),
        "csa_tail": ((2, 4), tail, "float32"),
        "csa_index_tail": ((2, 4), tail, "float32"),
        "hca_block": ((3,), long_block, "bfloat16"),
        "hca_tail": ((3,), long_tail, "float32"),
    }
    plain = read(tmp_path, PUBLISHED, compress_ratios=[0] * 5)
    assert [c.name for c in cache_components(plain, "auto")] == ["window"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"compress_ratios": [0, 1, 4, 128, 4]},
            "compress_ratios = .*must be a list of at least 5",
        ),
        ({"compress_ratios": [0, 4]}, "at least 5 of 0, 4, 128"),
        ({"compress_ratios": None}, "compress_ratios is missing: must be a list"),
        ({"compress_rate_csa": 0}, "compress_rate_csa = 0: must be an integer of at least 1"),
        ({"scoring_func": "sigmoid"}, 'scoring_func = "sigmoid": must be "sqrtsoftplus"'),
        ({"topk_method": "greedy"}, 'must be "noaux_tc"'),
        ({"norm_topk_prob": False}, "norm_topk_prob = false: must be true"),
        ({"n_shared_experts": 2}, "n_shared_experts = 2: must be 1"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2: must be 1"),
        ({"attention_bias": True}, "attention_bias = true: must be false"),
        ({"mlp_bias": True}, "mlp_bias = true: must be false"),
        ({"hidden_act": "gelu"}, 'must be "silu"'),
        ({"o_groups": 3}, "o_groups = 3: must be a divisor of num_attention_heads = 8"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim = 15: must be one even size in 2..64"),
        ({"qk_rope_head_dim": 66}, "comes out as 66"),
        ({"partial_rotary_factor": 0.5}, "comes out as 16, 32"),
        ({"index_head_dim": 8}, "index_head_dim = 8: must be at least 16"),
        ({"num_experts_per_tok": 9}, "at most n_routed_experts = 8"),
        ({"expert_dtype": "int4"}, 'expert_dtype = "int4": must be one of fp8, fp4, bf16'),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, 'type = "dynamic": must be one of'),
        ({"swiglu_limit": -1.0}, "swiglu_limit = -1.0: must be a number above 0"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
    ],
)
def test_what_changes_numbers_and_is_not_there_is_refused(
    changes: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, PUBLISHED, **changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layer_types": ["full_attention"] * 5}, "layer_types = .*must be 5 of sliding_attention"),
        ({"layer_types": list(KINDS[:4])}, "must be 5 of"),
        ({"mlp_layer_types": ["dense"] * 5}, "mlp_layer_types = .*must be 5 of hash_moe, moe"),
        ({"rope_parameters": {"main": {"rope_type": "default"}}}, "compress is missing"),
    ],
)
def test_what_is_saved_wrongly_is_refused(
    changes: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, SAVED, **changes)
