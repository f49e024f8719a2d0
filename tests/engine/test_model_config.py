"""Reading config.json: both spellings, every difference between architectures, every refusal."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from common.engine.config.model import FamilyConfig, ModelConfig, check_parallel
from common.engine.config.rope import RopeKind
from common.engine.models.registry import (
    SUPPORTED_ARCHITECTURES,
    cache_components,
    read_model_config,
)
from common.errors import ConfigError
from tests.engine.tiny_checkpoints import respell_as_published

Checkpoints = Callable[[str], Path]

PUBLISHED: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
}
LLAMA3: dict[str, object] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MOE: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def read(directory: Path, **changes: object) -> ModelConfig:
    """The config of PUBLISHED with changes; a value of `...` leaves the key out."""
    values = {key: value for key, value in (PUBLISHED | changes).items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(values))
    return read_model_config(directory)


@pytest.mark.parametrize("name", ["llama3", "qwen2_yarn", "qwen3", "qwen3_moe", "mistral"])
def test_both_spellings_read_alike(name: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    for file_name in ("config.json", "generation_config.json"):
        source = tiny_checkpoint(name) / file_name
        (tmp_path / file_name).write_text(source.read_text())
    respell_as_published(tmp_path)
    assert "rope_parameters" not in json.loads((tmp_path / "config.json").read_text())
    assert read_model_config(tmp_path) == read_model_config(tiny_checkpoint(name))


def test_values_arrive_where_they_belong(tmp_path: Path) -> None:
    config = read(tmp_path, tie_word_embeddings=True, head_dim=10)
    assert (config.architecture, config.dtype) == ("LlamaForCausalLM", "bfloat16")
    assert (config.hidden_size, config.intermediate_size, config.layer_count) == (64, 96, 3)
    assert (config.head_count, config.kv_head_count, config.head_dim) == (8, 2, 10)
    assert (config.vocab_size, config.rms_norm_eps, config.context_length) == (512, 1e-5, 1024)
    assert config.is_head_tied and config.moe is None


def test_absent_values_get_the_defaults_of_the_model_code(tmp_path: Path) -> None:
    config = read(
        tmp_path, num_key_value_heads=..., rms_norm_eps=..., rope_theta=..., torch_dtype=...
    )
    assert (config.kv_head_count, config.head_dim, config.rms_norm_eps) == (8, 8, 1e-6)
    assert (config.rope.kind, config.rope.theta) == (RopeKind.DEFAULT, 10000.0)
    assert config.dtype == "float32" and not config.is_head_tied
    qwen3 = read(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert qwen3.head_dim == 128


@pytest.mark.parametrize(
    ("architecture", "changes", "qkv", "output", "norm"),
    [
        ("LlamaForCausalLM", {}, False, False, False),
        ("LlamaForCausalLM", {"attention_bias": True}, True, True, False),
        ("MistralForCausalLM", {"sliding_window": None}, False, False, False),
        ("Qwen2ForCausalLM", {}, True, False, False),
        ("Qwen3ForCausalLM", {}, False, False, True),
        ("Qwen3ForCausalLM", {"attention_bias": True}, True, True, True),
        ("Qwen3MoeForCausalLM", MOE, False, False, True),
    ],
)
def test_biases_and_norms_per_architecture(
    architecture: str,
    changes: dict[str, object],
    qkv: bool,
    output: bool,
    norm: bool,
    tmp_path: Path,
) -> None:
    config = read(tmp_path, **{**changes, "architectures": [architecture]})
    found = (config.has_qkv_bias, config.has_output_bias, config.has_qk_norm)
    assert found == (qkv, output, norm)


def test_ends_of_sentence_of_both_files_are_joined(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert read(tmp_path, eos_token_id=7).eos_token_ids == (7, 5)
    assert read(tmp_path).eos_token_ids == (5, 7)
    (tmp_path / "generation_config.json").unlink()
    assert read(tmp_path, eos_token_id=[1, 2, 1]).eos_token_ids == (1, 2)
    assert read(tmp_path).eos_token_ids == ()


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"type": "linear", "factor": 4.0}, 4096),
        (LLAMA3, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "default"}, 1024),
    ],
)
def test_context_length_after_extension(
    rope: dict[str, object], length: int, tmp_path: Path
) -> None:
    assert read(tmp_path, rope_scaling=rope).context_length == length


def test_experts_stand_on_the_layers_the_config_says(tmp_path: Path) -> None:
    config = read(tmp_path, **MOE, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert config.moe is not None
    assert config.moe.layers == (1, 5)
    stacked = read(tmp_path, **{**MOE, "num_experts": ..., "num_local_experts": 16})
    assert stacked.moe is not None and stacked.moe.expert_count == 16


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("MistralForCausalLM", {"sliding_window": 1024}),
        ("MistralForCausalLM", {"sliding_window": None}),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 64}),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
        ),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "max_window_layers": 0,
                "layer_types": ["full_attention"] * 3,
            },
        ),
    ],
)
def test_windows_that_hide_nothing_are_served(
    architecture: str, changes: dict[str, object], tmp_path: Path
) -> None:
    assert not read(tmp_path, **{**changes, "architectures": [architecture]}).has_windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, r"architectures .*GemmaForCausalLM.*LlamaFor"),
        ({"architectures": ...}, "architectures is missing"),
        ({"architectures": "LlamaForCausalLM"}, "architectures .*list of strings"),
        ({"num_hidden_layers": ...}, "num_hidden_layers is missing: must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: .*at least 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers = true"),
        ({"hidden_size": "64"}, 'hidden_size = "64"'),
        ({"hidden_size": 63}, "hidden_size = 63: must be a multiple of num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: must be a divisor"),
        ({"head_dim": 7}, "head_dim = 7: must be even"),
        ({"hidden_size": 72}, "head_dim is missing: must be even.*comes out as 9"),
        ({"vocab_size": -1}, "vocab_size = -1"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0: must be a number above 0"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu": must be "silu"'),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings .*true or false"),
        ({"torch_dtype": "int8"}, 'torch_dtype = "int8": must be one of float32, bfloat16'),
        ({"quantization_config": {"bits": 4}}, "quant_method is missing.*not supported"),
        ({"eos_token_id": 512}, "eos_token_id = 512: must be below vocab_size = 512"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, 'type = "longrope": .*yarn'),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 'type = "dynamic"'),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor = -1"),
        ({"rope_theta": 1.0}, "rope_theta = 1.0: must be a number above 1"),
        ({"rope_scaling": "linear"}, "rope_scaling .*an object"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor = 1.0: .*above"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: must be 1"),
        ({"rope_parameters": {"full_attention": {}}}, "one set of parameters for all layers"),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": ...}, "num_key_value"),
        ({"architectures": ["Qwen2ForCausalLM"], "attention_bias": True}, "attention_bias = true"),
        ({**MOE, "num_experts": ...}, "num_local_experts is missing"),
        ({**MOE, "num_experts_per_tok": 9}, "num_experts_per_tok = 9: must be at most"),
        ({**MOE, "moe_intermediate_size": ...}, "moe_intermediate_size is missing"),
        ({**MOE, "decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ({**MOE, "mlp_only_layers": "0"}, "mlp_only_layers"),
    ],
)
def test_impossible_values_are_named(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, **changes)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_supported_architectures_are_listed_in_the_refusal(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, architectures=["MambaForCausalLM"])
    assert all(name in str(caught.value) for name in SUPPORTED_ARCHITECTURES)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("{", "not valid JSON"), ("[1]", "JSON object, not list")],
)
def test_unreadable_config_files_are_named(
    content: str | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_model_config(tmp_path)


def test_model_path_that_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: must be a directory"):
        read_model_config(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "message"),
    [
        (3, 1, "tp_size=3: must divide 8, the model's attention heads"),
        (0, 1, "tp_size=0"),
        (1, 4, "pp_size=4: must be in 1..3"),
        (1, 0, "pp_size=0"),
    ],
)
def test_impossible_cuts_are_named(
    tp_size: int, pp_size: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_parallel(read(tmp_path), tp_size, pp_size)


def test_kv_heads_that_neither_divide_nor_replicate(tmp_path: Path) -> None:
    config = read(tmp_path, num_attention_heads=12, num_key_value_heads=6, hidden_size=96)
    with pytest.raises(ConfigError, match=r"tp_size=4: .*multiple of 6, the model's KV heads"):
        check_parallel(config, 4, 1)
    check_parallel(config, 3, 3)
    check_parallel(config, 12, 1)


@dataclass(frozen=True, slots=True)
class JoinedConfig(FamilyConfig):
    def joined_layers(self) -> Collection[int]:
        return (1, 4)


def test_stages_begin_only_with_layers_that_need_nothing_of_the_one_before(tmp_path: Path) -> None:
    config = replace(read(tmp_path), layer_count=8, family=JoinedConfig())
    check_parallel(config, 1, 3)
    with pytest.raises(ConfigError, match=r"pp_size=2: must be one of 1, 3; .* with layer 4,"):
        check_parallel(config, 1, 2)


def test_cache_components_follow_the_config(tmp_path: Path) -> None:
    key, value = cache_components(read(tmp_path), "auto")
    assert (key.name, value.name, key.dtype) == ("k", "v", "bfloat16")
    assert key.layers == (0, 1, 2)
    assert (key.segments[0].unit_count, key.segments[0].unit_nbytes) == (2, 8 * 2)
    assert cache_components(read(tmp_path), "float32")[0].segments[0].unit_nbytes == 8 * 4
    with pytest.raises(ConfigError, match="kv_cache_dtype=int4: must be auto or one of"):
        cache_components(read(tmp_path), "int4")
