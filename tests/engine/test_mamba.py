"""Nemotron-H and Falcon-H1: every way a config can put them, against transformers, and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.engine.config.model import check_parallel
from common.engine.loader import load_model
from common.engine.models.registry import cache_components, read_model_config
from common.errors import ConfigError
from tests.engine.paged_decoding import Sequence, forward, make_pool, shuffled_pages
from tests.engine.recipes.mamba import VARIANTS
from tests.engine.tiny_checkpoints import Reference, build_checkpoint, edit_config, random_prompt

Checkpoints = Callable[[str], Path]

PROMPT = random_prompt(40, 3)


def logits_of(path: Path, *, dtype: str = "auto", sizes: tuple[int, ...] = (40,)) -> Tensor:
    model = load_model(path, dtype=dtype)
    pool, sequence = make_pool(model, 4), Sequence(PROMPT, shuffled_pages(4, 1))
    return torch.cat(
        [forward(model, pool, [sequence.chunk(size, all_logits=True)]) for size in sizes]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_what_else_a_config_can_say_is_computed(name: str, tmp_path: Path) -> None:
    build_checkpoint(VARIANTS[name], tmp_path)
    expected = Reference.load(tmp_path).logits(PROMPT)
    logits = logits_of(tmp_path, sizes=(2, 1, 20, 17))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("name", ["nemotron_h", "falcon_h1"])
def test_half_precision_stays_near_float32(name: str, tiny_checkpoint: Checkpoints) -> None:
    expected = Reference.load(tiny_checkpoint(name)).logits(PROMPT)
    logits = logits_of(tiny_checkpoint(name), dtype="bfloat16", sizes=(20, 1, 19))
    assert (logits - expected).abs().median() < 0.1


def test_published_spelling_gives_the_same_logits(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    published = tmp_path / "published"
    shutil.copytree(tiny_checkpoint("nemotron_h"), published)
    edit_config(
        published,
        layers_block_type=None,
        hybrid_override_pattern="M-M*E",
        num_hidden_layers=5,
        head_dim=None,
        attention_head_dim=8,
        dtype=None,
        torch_dtype="float32",
        time_step_limit=[0.0, float("inf")],
        num_nextn_predict_layers=1,
    )
    tensors = load_file(published / "model.safetensors")
    # Layers that predict more tokens at a time come with the published ones.
    tensors["mtp.layers.0.norm.weight"] = torch.ones(64)
    save_file(tensors, published / "model.safetensors")
    assert torch.equal(logits_of(published), logits_of(tiny_checkpoint("nemotron_h")))


def test_tensors_may_be_named_as_transformers_does_inside(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    renamed = tmp_path / "renamed"
    shutil.copytree(tiny_checkpoint("nemotron_h"), renamed)
    tensors = {
        name.replace("backbone.", "model."): tensor
        for name, tensor in load_file(renamed / "model.safetensors").items()
    }
    experts = "model.layers.4.mixer.experts"
    for part in ("up_proj", "down_proj"):
        each = [tensors.pop(f"{experts}.{expert}.{part}.weight") for expert in range(8)]
        tensors[f"{experts}.{part}"] = torch.stack(each)
    save_file(tensors, renamed / "model.safetensors")
    assert torch.equal(logits_of(renamed), logits_of(tiny_checkpoint("nemotron_h")))


def test_values_of_a_published_config_arrive_where_they_belong(tmp_path: Path) -> None:
    """As the 34B model is published."""
    fields = {
        "architectures": ["FalconH1ForCausalLM"],
        "hidden_size": 5120, "intermediate_size": 21504, "num_hidden_layers": 72,
        "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128,
        "mamba_d_ssm": None, "mamba_expand": 2, "mamba_n_heads": 32, "mamba_d_head": "auto",
        "mamba_n_groups": 2, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_rms_norm": False,
        "rope_theta": 100000000000.0, "rope_scaling": None, "max_position_embeddings": 262144,
        "vocab_size": 261120, "torch_dtype": "bfloat16", "eos_token_id": 11,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_model_config(tmp_path)
    assert (config.head_dim, config.rope.theta, config.rms_norm_eps) == (128, 1e11, 1e-5)
    components = {c.name: c for c in cache_components(config, "float8_e4m3fn")}
    # 10240 channels of 32 heads, 3 kept inputs of each; bf16 even if keys are float8.
    assert [s.unit_nbytes for s in components["conv"].segments] == [320 * 6, 256 * 6, 256 * 6]
    assert [s.unit_count for s in components["conv"].segments] == [32, 2, 2]
    assert components["state"].segments[0].unit_nbytes == 320 * 256 * 4
    assert components["k"].dtype == "float8_e4m3fn"


NEMOTRON_REFUSALS = [
    ("layers_block_type", ["mamba", "lstm"], "a list of"),
    ("layers_block_type", ["mamba", "mlp"], "some are attention"),
    ("num_hidden_layers", 7, "5, the length"),
    ("use_bias", True, "false"),
    ("mlp_bias", True, "false"),
    ("attention_bias", True, "false"),
    ("residual_in_fp32", True, "false"),
    ("mlp_hidden_act", "silu", "relu2"),
    ("mamba_hidden_act", "gelu", "silu"),
    ("sliding_window", 64, "null"),
    ("time_step_limit", [0.001, 0.1], "Infinity"),
    ("n_groups", 3, "a divisor of mamba_num_heads = 8"),
    ("conv_kernel", 1, "at least 2"),
    ("n_shared_experts", 2, "1"),
    ("num_experts_per_tok", 9, "at most"),
    ("num_key_value_heads", 3, "a divisor"),
]
FALCON_REFUSALS = [
    ("attn_layer_indices", [1], "null"),
    ("mamba_use_mlp", False, "true"),
    ("sliding_window", 64, "null"),
    ("mamba_d_head", 10, "96 / mamba_n_heads"),
    ("mamba_n_groups", 3, "a divisor of mamba_n_heads = 8"),
    ("ssm_multipliers", [1.0, 1.0], "a list of 5 numbers"),
    ("mlp_multipliers", [1.0, 0.0], "a list of 2 numbers"),
    ("hidden_act", "gelu", "silu"),
]


@pytest.mark.parametrize(
    ("name", "key", "value", "allowed"),
    [("nemotron_h", *refusal) for refusal in NEMOTRON_REFUSALS]
    + [("falcon_h1", *refusal) for refusal in FALCON_REFUSALS],
)
def test_values_that_are_not_computed_are_refused(
    name: str,
    key: str,
    value: object,
    allowed: str,
    tiny_checkpoint: Checkpoints,
    tmp_path: Path,
) -> None:
    shutil.copy(tiny_checkpoint(name) / "config.json", tmp_path)
    edit_config(tmp_path, **{key: value})
    with pytest.raises(ConfigError) as error:
        read_model_config(tmp_path)
    assert f"{key} = " in str(error.value) and allowed in str(error.value)


def test_patterns_with_unknown_letters_are_refused(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    shutil.copy(tiny_checkpoint("nemotron_h") / "config.json", tmp_path)
    edit_config(tmp_path, layers_block_type=None, hybrid_override_pattern="M-MX")
    with pytest.raises(ConfigError, match=r'hybrid_override_pattern = "M-MX": .* letters M \* - E'):
        read_model_config(tmp_path)


def test_sizes_that_ranks_cannot_share_are_named(tmp_path: Path) -> None:
    build_checkpoint(VARIANTS["norm before the gate"], tmp_path)
    edit_config(tmp_path, mamba_n_heads=12, mamba_d_head=8, mamba_n_groups=3)
    config = read_model_config(tmp_path)
    check_parallel(config, 1, 2)
    with pytest.raises(ConfigError, match="divide or be a multiple of 3, the model's Mamba groups"):
        check_parallel(config, 4, 1)
    with pytest.raises(ConfigError, match="must divide 12, the model's Mamba heads"):
        check_parallel(config, 8, 1)
