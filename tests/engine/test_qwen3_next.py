"""Models that recur by the gated delta rule: spellings of a checkpoint, and what is refused."""

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
from common.engine.models.gated_delta_net import delta_config
from common.engine.models.registry import cache_components, read_model_config
from common.errors import ConfigError, LayoutError
from common.layout.cache_layout import ServerLayout
from tests.engine.paged_decoding import Sequence, forward, make_pool, shuffled_pages
from tests.engine.tiny_checkpoints import Reference, edit_config, random_prompt

Checkpoints = Callable[[str], Path]

PROMPT = random_prompt(70, 3)
TOWERS: dict[str, object] = {"model_type": "any", "hidden_size": 8}


def logits_of(path: Path) -> Tensor:
    model = load_model(path)
    sequence = Sequence(PROMPT, shuffled_pages(8, 1))
    pool = make_pool(model, 8)
    parts = [sequence.chunk(size, all_logits=True) for size in (66, 3, 1)]
    return torch.cat([forward(model, pool, [part]) for part in parts])


def respell(directory: Path) -> dict[str, object]:
    """config.json as it is published: an interval instead of a list, and loose rotation."""
    path = directory / "config.json"
    config: dict[str, object] = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    assert isinstance(rope, dict)
    config["rope_theta"] = rope["rope_theta"]
    config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    config["rope_scaling"] = None
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))
    return config


@pytest.fixture
def copy(tiny_checkpoint: Checkpoints, tmp_path: Path) -> Callable[[str], Path]:
    def get(name: str) -> Path:
        shutil.copytree(tiny_checkpoint(name), tmp_path / name)
        return tmp_path / name

    return get


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_published_spelling_gives_the_same_logits(
    name: str, tiny_checkpoint: Checkpoints, copy: Checkpoints
) -> None:
    published = copy(name)
    respell(published)
    tensors = load_file(published / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.ones(2, 2)
    tensors["mtp.layers.0.input_layernorm.weight"] = torch.ones(2)
    save_file(tensors, published / "model.safetensors")
    assert torch.equal(logits_of(published), logits_of(tiny_checkpoint(name)))


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    ],
)
def test_a_composite_gives_the_logits_of_its_language_model(
    name: str, architecture: str, tiny_checkpoint: Checkpoints, copy: Checkpoints
) -> None:
    directory = copy(name)
    text = json.loads((directory / "config.json").read_text())
    # Text has one position, so that the sections of a rotation in three dimensions are equal.
    text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    document = {"architectures": [architecture], "text_config": text, "vision_config": TOWERS}
    (directory / "config.json").write_text(json.dumps(document))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(2, 2)
    tensors["mtp.norm.weight"] = torch.ones(2)
    save_file(tensors, directory / "model.safetensors")
    assert torch.equal(logits_of(directory), logits_of(tiny_checkpoint(name)))


def test_one_layer_in_n_attends_where_no_list_says_which(copy: Checkpoints) -> None:
    directory = copy("qwen3_next")
    edit_config(directory, layer_types=None)
    config = read_model_config(directory)
    assert delta_config(config).linear_layers == (0, 1, 2)
    edit_config(directory, full_attention_interval=2)
    config = read_model_config(directory)
    assert delta_config(config).linear_layers == (0, 2)
    layers = {component.name: component.layers for component in cache_components(config, "auto")}
    assert layers == {"k": (1, 3), "v": (1, 3), "conv": (0, 2), "state": (0, 2)}


def test_a_quarter_of_a_head_turns_where_nothing_says_how_much(copy: Checkpoints) -> None:
    directory = copy("qwen3_5")
    edit_config(directory, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    config = read_model_config(directory)
    assert (config.rotary_dim, config.head_dim, config.rope.theta) == (4, 16, 1e6)


@pytest.mark.parametrize(
    ("kv_dtype", "changes", "expected"),
    [
        ("auto", {}, ("bfloat16", "bfloat16", "float32")),
        ("float8_e4m3fn", {}, ("float8_e4m3fn", "bfloat16", "float32")),
        ("auto", {"mamba_ssm_dtype": "bfloat16"}, ("bfloat16", "bfloat16", "bfloat16")),
    ],
)
def test_states_have_dtypes_of_their_own(
    kv_dtype: str, changes: dict[str, object], expected: tuple[str, str, str], copy: Checkpoints
) -> None:
    directory = copy("qwen3_5")
    edit_config(directory, dtype="bfloat16", **changes)
    components = cache_components(read_model_config(directory), kv_dtype)
    dtypes = {component.name: component.dtype for component in components}
    assert (dtypes["k"], dtypes["conv"], dtypes["state"]) == expected


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_next", {"hidden_act": "gelu"}, 'hidden_act = "gelu": must be "silu"'),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 3}, "one for each of 4 layers"),
        ("qwen3_next", {"layer_types": ["mamba"] * 4}, "layer_types .* must be"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 4}, "4 layers are of both kinds"),
        (
            "qwen3_next",
            {"layer_types": None, "full_attention_interval": 9},
            "full_attention_interval = 9: must be such that 4 layers are of both kinds",
        ),
        (
            "qwen3_next",
            {"linear_num_value_heads": 3},
            "linear_num_value_heads = 3: must be a multiple of linear_num_key_heads = 2",
        ),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1: must be"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate = false: must be true"),
        ("qwen3_5", {"output_gate_type": "sigmoid"}, 'output_gate_type .* must be "swish"'),
        ("qwen3_5", {"mamba_ssm_dtype": "float8"}, "mamba_ssm_dtype .* must be one of float32"),
        (
            "qwen3_5",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}},
            "partial_rotary_factor = 1.5: must be at most 1",
        ),
        (
            "qwen3_5",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.19}},
            "an even part of 16",
        ),
        ("qwen3_5_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]: must be absent"),
        ("qwen3_5_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2: must be absent"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob = false: must be true"),
    ],
)
def test_what_is_not_implemented_is_named(
    name: str, changes: dict[str, object], message: str, copy: Checkpoints
) -> None:
    directory = copy(name)
    edit_config(directory, **changes)
    with pytest.raises(ConfigError, match=message):
        read_model_config(directory)


def test_a_parallel_size_that_tears_a_head_is_refused(copy: Checkpoints) -> None:
    directory = copy("qwen3_next")
    config = read_model_config(directory)
    for tp_size in (1, 2, 4):
        check_parallel(config, tp_size, 1)
    with pytest.raises(ConfigError, match=r"tp_size=8: must divide 4, .* linear_num_value_heads"):
        check_parallel(config, 8, 1)
    edit_config(
        directory,
        linear_num_key_heads=3,
        linear_num_value_heads=12,
        num_attention_heads=12,
        num_key_value_heads=4,
    )
    config = read_model_config(directory)
    with pytest.raises(ConfigError, match=r"tp_size=4: .* multiple of 3, .* linear_num_key_heads"):
        check_parallel(config, 4, 1)
    layout = ServerLayout(cache_components(config, "auto"), 4, ((0, 4),), 16)
    with pytest.raises(LayoutError, match="tp_size=4: 3 units of 'q'"):
        layout.check()


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_half_precision_stays_near_float32(name: str, tiny_checkpoint: Checkpoints) -> None:
    model = load_model(tiny_checkpoint(name), dtype="bfloat16")
    sequence = Sequence(PROMPT, shuffled_pages(8, 2))
    pool = make_pool(model, 8)
    chunks = [sequence.chunk(size, all_logits=True) for size in (30, 39, 1)]
    logits = torch.cat([forward(model, pool, [chunk]) for chunk in chunks])
    expected = Reference.load(tiny_checkpoint(name)).logits(PROMPT)
    assert pool.view("conv", 0, "q").dtype == torch.bfloat16
    assert pool.view("state", 0).dtype == torch.float32
    # A router near a tie may send a token to another expert; the typical difference is looked at.
    assert (logits - expected).abs().median() < 0.1


def test_a_long_prompt_in_any_chunks_gives_the_same_tokens_logits(
    tiny_checkpoint: Checkpoints,
) -> None:
    path = tiny_checkpoint("qwen3_next")
    model, prompt = load_model(path), random_prompt(150, 4)
    expected = Reference.load(path).logits(prompt)[-1]
    for sizes in ([150], [1, 2, 3, 144], [64, 64, 22], [65, 63, 21, 1]):
        sequence, pool = Sequence(prompt, shuffled_pages(16, 1)), make_pool(model, 16)
        for size in sizes:
            logits = forward(model, pool, [sequence.chunk(size)])
        torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=0.0)
