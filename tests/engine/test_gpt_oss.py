"""gpt-oss: what its config.json says, packed experts, and what of its cache decides logits."""

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
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from common.engine.config.model import ModelConfig, ScoreConfig
from common.engine.config.weight_format import Float4Groups
from common.engine.distributed import ParallelContext
from common.engine.layers import expert_matrix
from common.engine.layers.narrow import NarrowWeights
from common.engine.layers.rotary import rotary_frequencies
from common.engine.loader import load_model
from common.engine.models.causal_lm import CausalLm
from common.engine.models.gpt_oss_config import GptOssConfig
from common.engine.models.registry import cache_components, read_model_config
from common.errors import ConfigError
from common.layout.component import FULL, Live, LiveKind
from tests.engine.paged_decoding import Sequence, forward, make_pool, shuffled_pages
from tests.engine.tiny_checkpoints import (
    Change,
    Reference,
    edit_config,
    edit_tensors,
    random_prompt,
    respell_as_published,
)

Checkpoints = Callable[[str], Path]

PUBLISHED: dict[str, object] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def read(directory: Path, **changes: object) -> ModelConfig:
    values = PUBLISHED | changes
    (directory / "config.json").write_text(
        json.dumps({key: value for key, value in values.items() if value is not None})
    )
    return read_model_config(directory)


def test_the_published_config_is_understood(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.windows == (128, 0) * 12
    assert config.dtype == "bfloat16" and config.context_length == 131072
    assert config.has_qkv_bias and config.has_output_bias
    assert config.scores == ScoreConfig(has_sinks=True)
    assert config.weight_format == Float4Groups(32)
    assert config.family == GptOssConfig(gate_gain=1.702, gate_limit=7.0)
    assert config.moe is not None
    assert (config.moe.expert_count, config.moe.experts_per_token) == (32, 4)
    assert (config.moe.intermediate_size, config.moe.layers) == (2880, tuple(range(24)))
    assert (config.rope.theta, config.rope.truncates) == (150000.0, False)
    _, concentration = rotary_frequencies(config.rope, 64)
    assert concentration == pytest.approx(0.1 * math.log(32.0) + 1.0)
    full, _, window, _ = cache_components(config, "auto")
    assert (full.live, full.layers) == (FULL, tuple(range(1, 24, 2)))
    assert (window.live, window.layers) == (Live(LiveKind.WINDOW, 128), tuple(range(0, 24, 2)))
    # 12 layers of 8 heads of 64, keys and values of two bytes: 24 KiB a token.
    assert 2 * len(full.layers) * full.segments[0].unit_count * full.segments[0].unit_nbytes == (
        24 * 1024
    )


def test_absent_values_are_those_of_the_published_code(tmp_path: Path) -> None:
    expected = read(tmp_path)
    absent = ("layer_types", "head_dim", "attention_bias", "sliding_window", "swiglu_limit")
    assert read(tmp_path, **dict.fromkeys((*absent, "rope_theta"))) == expected
    renamed = read(tmp_path, num_local_experts=None, num_experts=32)
    assert renamed == expected
    assert read(tmp_path, torch_dtype="float16").dtype == "float16"
    assert read(tmp_path, quantization_config=None).weight_format is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": None}, "rope_parameters is missing: must be an object"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu": must be "silu"'),
        ({"swiglu_limit": 0}, "swiglu_limit = 0: must be a number above 0"),
        ({"swiglu_alpha": "1"}, 'swiglu_alpha = "1": must be a number above 0'),
        ({"num_local_experts": None}, "num_experts is missing: must be an integer"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok = 33: must be at most num_local"),
        ({"layer_types": ["full_attention"]}, "layer_types .*: must be one for each of 24 layers"),
        ({"sliding_window": -1}, "sliding_window = -1: must be an integer of at least 1"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            'quant_method = "fp8": must be "mxfp4": other quantised weights are not supported',
        ),
    ],
)
def test_impossible_values_are_named(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **changes)


def logits_of(model: CausalLm, prompt: list[int]) -> Tensor:
    sequence = Sequence(prompt, shuffled_pages(4, 1))
    return forward(model, make_pool(model, 4), [sequence.chunk(len(prompt), all_logits=True)])


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_wide"])
def test_published_spelling_gives_the_same_logits(
    name: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    shutil.copytree(tiny_checkpoint(name), tmp_path / "published")
    respell_as_published(tmp_path / "published")
    prompt = random_prompt(40, 3)
    expected = logits_of(load_model(tiny_checkpoint(name)), prompt)
    assert torch.equal(logits_of(load_model(tmp_path / "published"), prompt), expected)


# ---- what decides logits -------------------------------------------------------------------------


@pytest.mark.parametrize("component", ["k", "v"])
@pytest.mark.parametrize("layer", range(3))
def test_every_position_that_a_layer_sees_decides_logits_and_no_other(
    component: str, layer: int, tiny_checkpoint: Checkpoints
) -> None:
    """Layers 0 and 2 see 8 tokens, which is half a page; the new token is one of them."""
    model = load_model(tiny_checkpoint("gpt_oss"))
    cached = 45
    pool = make_pool(model, 8)
    sequence = Sequence(random_prompt(cached + 1, 5), shuffled_pages(8, 1))
    forward(model, pool, [sequence.chunk(cached)])

    def decode() -> Tensor:
        sequence.computed = cached
        return forward(model, pool, [sequence.chunk(1)])

    plain = decode()
    for position in (0, 15, 31, 32, 37, 38, 39, 44):
        page = sequence.page_ids[position // 16]
        rows = pool.view(component, layer)[page, :, position % 16]
        kept = rows.clone()
        is_seen = layer == 1 or cached - position < 8
        rows.fill_(0.0 if is_seen else float("nan"))
        difference = (decode() - plain).abs().max()
        assert difference > 1e-3 if is_seen else difference == 0.0, position
        rows.copy_(kept)
    assert torch.equal(decode(), plain)


def test_a_sink_is_a_key_without_a_value(tiny_checkpoint: Checkpoints) -> None:
    """Without sinks' weight nothing is left out; with all of it attention adds nothing."""
    prompt = random_prompt(20, 2)
    model = load_model(tiny_checkpoint("gpt_oss"))
    sinks = [
        piece.target
        for weight in model.weights()
        for piece in weight.ways[0]
        if piece.name.endswith("sinks")
    ]
    assert len(sinks) == 3 and all(len(sink.unique()) == 8 for sink in sinks)
    reference = Reference.load(tiny_checkpoint("gpt_oss"))
    for value in (-40.0, 40.0):
        for sink in sinks:
            sink.fill_(value)
        with torch.no_grad():
            for name, parameter in reference.model.named_parameters():
                if name.endswith("sinks"):
                    parameter.fill_(value)
        found = logits_of(model, prompt)
        torch.testing.assert_close(found, reference.logits(prompt), atol=1e-4, rtol=0.0)


# ---- packed experts ------------------------------------------------------------------------------

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def pack(values: Tensor) -> tuple[Tensor, Tensor]:
    """(uint8[.., groups, 16], uint8[.., groups]) nearest to values[.., groups * 32]."""
    groups = values.unflatten(-1, (-1, 32))
    # Such that the largest of a group becomes one of 3, 4 and 6, or less.
    powers = groups.abs().amax(-1).clamp(min=1e-30).log2().ceil() - 2
    scaled = groups / torch.exp2(powers)[..., None]
    codes = (scaled.abs()[..., None] - MAGNITUDES).abs().argmin(-1)
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (powers + 127).to(torch.uint8)


def is_expert(name: str) -> bool:
    return name.endswith(("gate_up_proj", "down_proj"))


@pytest.fixture(scope="module")
def twins(
    tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """(checkpoint of packed experts, what transformers makes of the same experts)."""
    tensors = load_file(tiny_checkpoint("gpt_oss") / "model.safetensors")
    packed = {name: values for name, values in tensors.items() if not is_expert(name)}
    plain = dict(packed)
    for name, values in tensors.items():
        if is_expert(name):
            blocks, scales = pack(values.transpose(1, 2))
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert (plain[name] - values).abs().max() < 0.3 * values.abs().max()
    assert len(packed) == len(plain) + 3 * 2
    directories = []
    for kind, content in (("packed", packed), ("plain", plain)):
        directory = tmp_path_factory.mktemp(kind) / "model"
        shutil.copytree(tiny_checkpoint("gpt_oss"), directory)
        save_file(content, directory / "model.safetensors")
        directories.append(directory)
    edit_config(directories[0], quantization_config={"quant_method": "mxfp4"})
    return directories[0], directories[1]


def targets(model: CausalLm) -> list[Tensor]:
    return [piece.target for weight in model.weights() for piece in weight.ways[0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [(0, 1, 0, 1), (0, 2, 0, 1), (1, 2, 0, 1), (5, 8, 1, 2)])
def test_packed_experts_load_as_transformers_unpacks_them(
    rank: tuple[int, int, int, int], dtype: str, twins: tuple[Path, Path]
) -> None:
    """Ranks of two cut their 48 columns inside a group of 32, those of eight have 12."""
    packed, plain = (
        load_model(path, parallel=ParallelContext(*rank), dtype=dtype) for path in twins
    )
    found, expected = targets(packed), targets(plain)
    assert len(found) == len(expected) > 10
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_packed_experts_give_the_logits_of_transformers(twins: tuple[Path, Path]) -> None:
    prompt = random_prompt(20, 1)
    expected = Reference.load(twins[1]).logits(prompt)
    found = logits_of(load_model(twins[0]), prompt)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0.0)


NARROW = (NarrowWeights.WIDE, NarrowWeights.NARROW)


@pytest.mark.parametrize("asks", [True, False])
@torch.inference_mode()
def test_packed_experts_may_stay_as_they_are_stored(
    asks: bool, twins: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_matrix, "HOST_ASKS", ("cpu",) if asks else ())
    wide, narrow = (load_model(twins[0], packs=True, narrow=narrow) for narrow in NARROW)
    assert "experts of float4 by groups of 32" in narrow.describe()["weights"]
    prompt = random_prompt(20, 1)
    expected, found = (logits_of(model, prompt) for model in (wide, narrow))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


NAME = "model.layers.1.mlp.experts.down_proj"


def remove_scales(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{NAME}_scales"]


def remove_blocks(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{NAME}_blocks"]


def shorten_scales(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}_scales"] = tensors[f"{NAME}_scales"][..., :-1].contiguous()


def widen_scales(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}_scales"] = tensors[f"{NAME}_scales"].to(torch.int32)


def transpose_blocks(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}_blocks"] = tensors[f"{NAME}_blocks"].transpose(1, 2).contiguous()


def widen_blocks(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}_blocks"] = tensors[f"{NAME}_blocks"].float()


def add_plain(tensors: dict[str, Tensor]) -> None:
    tensors[NAME] = torch.zeros(8, 96, 64)


def remove_sinks(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.2.self_attn.sinks"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_scales, rf"lacks 1 tensors: {NAME}_scales"),
        (remove_blocks, rf"lacks 1 tensors: {NAME}; and has unexpected 1 tensors: {NAME}_scales"),
        (shorten_scales, rf"{NAME}_scales is U8 \[8, 64, 2\]: must be \[8, 64, 3\] of U8"),
        (widen_scales, rf"{NAME}_scales is I32 \[8, 64, 3\]: must be \[8, 64, 3\] of U8"),
        (transpose_blocks, rf"{NAME}_blocks is U8 \[8, 3, 64, 16\]: must be \[8, 64, 3, 16\]"),
        (widen_blocks, rf"{NAME}_blocks is F32 \[8, 64, 3, 16\]: must be .* of U8"),
        (add_plain, rf"unexpected 2 tensors: {NAME}_blocks, {NAME}_scales"),
        (remove_sinks, r"lacks 1 tensors: model\.layers\.2\.self_attn\.sinks"),
    ],
)
def test_wrong_tensors_are_named(
    change: Change,
    message: str,
    twins: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    broken = Path(shutil.copytree(twins[0], tmp_path / "model"))
    edit_tensors(broken, change)
    with pytest.raises(ConfigError, match=message):
        load_model(broken)


def test_packed_experts_that_config_json_does_not_announce_are_refused(
    twins: tuple[Path, Path], tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(twins[0], tmp_path / "model"))
    edit_config(broken, quantization_config=None)
    with pytest.raises(ConfigError, match=r"_blocks has dtype U8: must be one of F32"):
        load_model(broken)
