"""Which layers see a window, in every spelling, and what else Gemma's config.json says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.engine.config.model import ModelConfig, ScoreConfig
from common.engine.models.gemma import gemma_config
from common.engine.models.registry import cache_components, read_model_config
from common.errors import ConfigError
from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, LiveKind

PLAIN: dict[str, object] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
UPPER: dict[str, object] = {"use_sliding_window": True, "sliding_window": 64}
MOE: dict[str, object] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
}
MARKS = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
GLOBAL_ROPE = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
NESTED = {
    "full_attention": GLOBAL_ROPE,
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}


def read(directory: Path, architecture: str, **changes: object) -> ModelConfig:
    values = {**PLAIN, "architectures": [architecture], **changes}
    (directory / "config.json").write_text(json.dumps(values))
    return read_model_config(directory)


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": 1023}, (1023,) * 4),
        ("MistralForCausalLM", {"sliding_window": 1024}, (0,) * 4),
        ("MistralForCausalLM", {"max_position_embeddings": 8192}, (4096,) * 4),
        ("MistralForCausalLM", {"sliding_window": None}, (0,) * 4),
        ("Qwen2ForCausalLM", UPPER | {"max_window_layers": 2}, (0, 0, 64, 64)),
        ("Qwen2ForCausalLM", UPPER | {"max_window_layers": 4}, (0,) * 4),
        ("Qwen3ForCausalLM", UPPER | {"layer_types": MARKS}, (0, 64, 0, 64)),
        ("Qwen3MoeForCausalLM", MOE | UPPER, (64,) * 4),
        ("Gemma2ForCausalLM", {"sliding_window": 100}, (100, 0, 100, 0)),
        ("Gemma2ForCausalLM", {"sliding_window": 100, "layer_types": MARKS}, (0, 100, 0, 100)),
        ("Gemma3ForCausalLM", {"sliding_window": 100}, (100,) * 4),
        (
            "Gemma3ForCausalLM",
            {"sliding_window": 100, "sliding_window_pattern": 3},
            (100, 100, 0, 100),
        ),
        ("Gemma3ForCausalLM", {"sliding_window": 2048}, (0,) * 4),
    ],
)
def test_windows_of_every_layer(
    architecture: str, changes: dict[str, object], windows: tuple[int, ...], tmp_path: Path
) -> None:
    config = read(tmp_path, architecture, **changes)
    assert config.windows == windows and config.has_windows == any(windows)
    layout = ServerLayout(cache_components(config, "auto"), 1, ((0, 4),), 16)
    layout.check()
    for component in layout.components:
        width = component.live.size
        assert component.live == FULL or component.live.kind is LiveKind.WINDOW
        assert component.layers == tuple(i for i, window in enumerate(windows) if window == width)
    # Group 0 grows with the tokens wherever there is such a group: the pool is counted by it.
    assert layout.groups[0].live == FULL or 0 not in windows


def test_gemma_constants_and_their_defaults(tmp_path: Path) -> None:
    gemma2 = read(tmp_path, "Gemma2ForCausalLM")
    assert gemma2.scores == ScoreConfig(scale=1 / 16, softcap=50.0)
    assert gemma_config(gemma2).logit_softcap == 30.0
    assert gemma_config(gemma2).local_rope is None
    config = read(tmp_path, "Gemma2ForCausalLM", attn_logit_softcapping=None)
    assert config.scores.softcap == 0.0
    assert config.is_head_tied and config.head_dim == 256 and not config.has_qk_norm
    gemma3 = read(tmp_path, "Gemma3ForCausalLM", query_pre_attn_scalar=4)
    assert gemma3.has_qk_norm
    assert gemma3.scores == ScoreConfig(scale=0.5)


def test_rotations_by_layer_type_in_both_spellings(tmp_path: Path) -> None:
    published = read(
        tmp_path,
        "Gemma3ForCausalLM",
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    nested = read(tmp_path, "Gemma3ForCausalLM", rope_parameters=NESTED)
    assert published == nested
    local_rope = gemma_config(nested).local_rope
    assert local_rope is not None
    assert (nested.rope.theta, nested.rope.factor) == (5e5, 8.0)
    assert (local_rope.theta, local_rope.factor) == (2e4, 1.0)
    assert nested.context_length == 1024, "the published length is that after the extension"
    plain = read(tmp_path, "Gemma3ForCausalLM")
    local_rope = gemma_config(plain).local_rope
    assert local_rope is not None
    assert (plain.rope.theta, local_rope.theta) == (1e6, 1e4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "sliding_window = 0: must be an integer of at least 1"),
        ({"sliding_window": "8"}, 'sliding_window = "8": must be an integer'),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern = 0: must be an integer"),
        ({"layer_types": MARKS[:3]}, "layer_types .*: must be one for each of 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, 'layer_types .*: must be "sliding_attention'),
        ({"hidden_activation": "silu"}, 'hidden_activation = "silu": must be "gelu_pytorch_tanh"'),
        (
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention = true: must be false",
        ),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0: must be a number above 0"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping = -1: must be a number above 0"),
        (
            {"rope_parameters": {"full_attention": GLOBAL_ROPE}},
            "rope_parameters .*sliding_attention",
        ),
        ({"rope_parameters": GLOBAL_ROPE}, "rope_parameters .*: must be parameters by layer type"),
        ({"rope_local_base_freq": 0}, "rope_local_base_freq = 0: must be a number above 1"),
    ],
)
def test_impossible_values_are_named(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, "Gemma3ForCausalLM", **changes)
