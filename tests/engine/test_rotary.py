"""Rotary embeddings of every kind, against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from common.engine.config.json_fields import JsonFields
from common.engine.config.rope import read_rope
from common.engine.layers.rotary import RotaryEmbedding, rotary_frequencies
from tests.engine.recipes.recipe import (
    COMMON,
    DEFAULT_ROPE,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    PROPORTIONAL_ROPE,
    YARN_ROPE,
)

HEAD_DIM = 32
MAX_POSITION = 1024
VARIANTS: dict[str, dict[str, object]] = {
    "default": DEFAULT_ROPE,
    "large theta": DEFAULT_ROPE | {"rope_theta": 1_000_000.0},
    "linear": LINEAR_ROPE,
    "llama3": LLAMA3_ROPE,
    "llama3 of 3.1": LLAMA3_ROPE
    | {"rope_theta": 500_000.0, "original_max_position_embeddings": 8192},
    "yarn": YARN_ROPE,
    "yarn betas": YARN_ROPE | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn mscale": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn attention factor": YARN_ROPE | {"attention_factor": 1.2},
    "yarn not truncated": YARN_ROPE | {"truncate": False},
    "yarn narrow band": YARN_ROPE | {"beta_fast": 1.0, "beta_slow": 1.0},
    "proportional": PROPORTIONAL_ROPE,
    "proportional with a factor": PROPORTIONAL_ROPE | {"factor": 4.0},
    "yarn long": YARN_ROPE | {"rope_theta": 1e6, "original_max_position_embeddings": 32768},
}
POSITIONS = [0, 1, 15, 16, 17, 127, 128, 1000, 4095, 100_000]


def llama_config(parameters: dict[str, object]) -> LlamaConfig:
    values = COMMON | {"head_dim": HEAD_DIM, "rope_parameters": dict(parameters)}
    config = LlamaConfig.from_dict(values)
    assert isinstance(config, LlamaConfig)
    return config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rotation_equals_transformers(variant: str, dtype: torch.dtype) -> None:
    parameters = VARIANTS[variant]
    config = llama_config(parameters)
    positions = torch.tensor(POSITIONS)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(len(POSITIONS), 3, HEAD_DIM, generator=generator).to(dtype)
    cos, sin = LlamaRotaryEmbedding(config)(query, positions[None])
    expected, _ = apply_rotary_pos_emb(
        query.transpose(0, 1)[None], query.transpose(0, 1)[None], cos, sin
    )

    fields = JsonFields({"rope_parameters": dict(parameters)}, "config.json")
    rope = read_rope(fields, max_position=MAX_POSITION)
    rotary = RotaryEmbedding(rope, HEAD_DIM, device=torch.device("cpu"), dtype=dtype)
    actual = rotary.rotate(positions).apply(query)

    # In bf16, transformers rounds each product and this one only their sum.
    tolerance = 1e-6 if dtype == torch.float32 else 2.0**-6
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected[0].transpose(0, 1), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_frequencies_equal_transformers_bit_for_bit(variant: str) -> None:
    expected = LlamaRotaryEmbedding(llama_config(VARIANTS[variant]))
    fields = JsonFields({"rope_parameters": dict(VARIANTS[variant])}, "config.json")
    frequencies, scale = rotary_frequencies(read_rope(fields, max_position=MAX_POSITION), HEAD_DIM)
    assert torch.equal(frequencies, expected.inv_freq)
    assert scale == expected.attention_scaling


def test_variants_differ_from_each_other() -> None:
    positions = torch.tensor([700])
    query = torch.ones(1, 1, HEAD_DIM)
    rotated = []
    for parameters in VARIANTS.values():
        fields = JsonFields({"rope_parameters": dict(parameters)}, "config.json")
        rope = read_rope(fields, max_position=MAX_POSITION)
        rotary = RotaryEmbedding(rope, HEAD_DIM, device=torch.device("cpu"), dtype=torch.float32)
        rotated.append(tuple(rotary.rotate(positions).apply(query).flatten().tolist()))
    assert len(set(rotated)) == len(VARIANTS)
