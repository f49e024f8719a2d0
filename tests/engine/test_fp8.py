"""Checkpoints of float8 blocks: loaded, they are their dequantised twin; and every refusal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.engine.checkpoint.codes import Codes
from common.engine.checkpoint.files import TensorEntry
from common.engine.checkpoint.scaled_tensors import Role, read_stored
from common.engine.config.weight_format import Float8Blocks
from common.engine.distributed import ParallelContext
from common.engine.layers import expert_matrix
from common.engine.layers.narrow import NarrowWeights
from common.engine.loader import load_model
from common.engine.models.causal_lm import CausalLm
from common.errors import ConfigError
from tests.engine.paged_decoding import Sequence, forward, make_pool
from tests.engine.tiny_checkpoints import (
    Change,
    Recipe,
    build_checkpoint,
    edit_config,
    edit_tensors,
)

# Sizes that 128 does not divide, so that blocks at the edges are cut short, and that are cut by
# ranks inside a block.
SIZES: dict[str, object] = {
    "hidden_size": 160,
    "intermediate_size": 272,
    "moe_intermediate_size": 144,
    "kv_lora_rank": 136,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
}
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
BLOCK = 128
FLOAT8_MAX = 448.0
NAME = "model.layers.1.self_attn.kv_b_proj.weight"


def quantise(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(float8, fp32 factors, what they stand for), block by block as published models do it."""
    rows, columns = (-(-size // BLOCK) for size in values.shape)
    stored, meant = torch.empty_like(values, dtype=torch.float8_e4m3fn), torch.empty_like(values)
    factors = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            place = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            factors[i, j] = values[place].abs().max() / FLOAT8_MAX
            stored[place] = (values[place] / factors[i, j]).to(torch.float8_e4m3fn)
            meant[place] = stored[place].float() * factors[i, j]
    return stored, factors, meant


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(float8 checkpoint, the same values in fp32)."""
    plain = tmp_path_factory.mktemp("plain")
    build_checkpoint(Recipe("DeepseekV3ForCausalLM", SIZES), plain)
    tensors = load_file(plain / "model.safetensors")
    quantised: dict[str, Tensor] = {}
    for name, values in tensors.items():
        quantised[name] = values
        is_linear = name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight"))
        if is_linear and values.dim() == 2:
            stored, factors, meant = quantise(values)
            quantised |= {name: stored, f"{name}_scale_inv": factors}
            tensors[name] = meant
    assert sum(name.endswith("_scale_inv") for name in quantised) >= 2 * 5 + 3 + 3 + 3 * 4
    save_file(tensors, plain / "model.safetensors")
    float8 = Path(shutil.copytree(plain, tmp_path_factory.mktemp("float8") / "model"))
    save_file(quantised, float8 / "model.safetensors")
    edit_config(float8, quantization_config=QUANTIZATION)
    return float8, plain


def targets(model: CausalLm) -> list[Tensor]:
    return [p.target for weight in model.weights() for p in weight.ways[0]]


@pytest.mark.parametrize("rank", [(0, 1, 0, 1), (0, 2, 0, 1), (1, 2, 0, 1), (3, 8, 1, 2)])
def test_a_float8_checkpoint_loads_as_its_dequantised_twin(
    rank: tuple[int, int, int, int], twins: tuple[Path, Path]
) -> None:
    float8, plain = (load_model(path, parallel=ParallelContext(*rank)) for path in twins)
    found, expected = targets(float8), targets(plain)
    assert len(found) == len(expected) > 10
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_half_precision_gets_the_product_rounded_once(twins: tuple[Path, Path]) -> None:
    float8, plain = (load_model(path, dtype="bfloat16") for path in twins)
    pairs = zip(targets(float8), targets(plain), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("rank", [(0, 1), (1, 2)])
@torch.inference_mode()
def test_experts_that_stay_narrow_give_the_same_logits(
    rank: tuple[int, int], asks: bool, twins: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others are made wide by a CPU. A rank of two has 72 of 144 columns."""
    monkeypatch.setattr(expert_matrix, "HOST_ASKS", ("cpu",) if asks else ())
    wide, narrow = (
        load_model(
            twins[0], dtype="bfloat16", packs=True, narrow=narrow, parallel=ParallelContext(*rank)
        )
        for narrow in (NarrowWeights.WIDE, NarrowWeights.NARROW)
    )
    said = narrow.describe()["weights"].split("; ")
    sizes = ["128"] if rank == (0, 1) else ["128", "some columns"]
    for size in sizes:
        form = f"experts of float8_e4m3fn by groups of {size}, made wide for each product"
        assert any(line.startswith(f"{form}: {2 // len(sizes)} weights, ") for line in said), said
    for name in ("all_reduce", "gather_last_dim"):
        monkeypatch.setattr(ParallelContext, name, lambda self, part: part)
    expected, found = (logits_of(model) for model in (wide, narrow))
    torch.testing.assert_close(found, expected)


def logits_of(model: CausalLm) -> Tensor:
    sequence = Sequence(list(range(3, 23)), [2, 4, 1])
    pool = make_pool(model, 4)
    return torch.cat([forward(model, pool, [sequence.chunk(size)]) for size in (12, 7, 1)])


def widened(
    values: Tensor, scales: Tensor, take: tuple[slice, ...], block: tuple[int, int]
) -> Tensor:
    """`take` of values and scales as files hold them."""
    stored = {"values": values, "scales": scales}
    parts = {
        role: TensorEntry(role, Path(), "F32", tuple(stored[role].shape), 0, 0)
        for role in (Role.VALUES, Role.SCALES)
    }

    def read(entry: TensorEntry, part: tuple[slice, ...]) -> Tensor:
        return stored[entry.name][part]

    shape = tuple(values.shape)
    device = torch.device("cpu")
    codes = read_stored(read, parts, shape, take, Float8Blocks(*block), device)
    assert isinstance(codes, Codes)
    return codes.widen()


@pytest.mark.parametrize(
    "take",
    [
        (slice(None), slice(None)),
        (slice(3, 7), slice(None)),
        (slice(6, 10), slice(5, 11)),
        (slice(9, 10), slice(0, 1)),
    ],
)
def test_every_element_finds_the_factor_of_its_block(take: tuple[slice, slice]) -> None:
    generator = torch.Generator().manual_seed(1)
    values, scales = (torch.randn(*s, generator=generator) for s in ((10, 11), (3, 4)))
    expected = torch.stack(
        [torch.stack([values[i, j] * scales[i // 4, j // 3] for j in range(11)]) for i in range(10)]
    )
    assert torch.equal(widened(values, scales, take, (4, 3)), expected[take])


def test_stacked_experts_have_factors_each() -> None:
    values, scales = torch.ones(3, 4, 4), torch.arange(12.0).view(3, 2, 2)
    take = (slice(1, 3), slice(None), slice(2, 4))
    actual = widened(values, scales, take, (2, 2))
    expected = scales.repeat_interleave(2, 1).repeat_interleave(2, 2)[take]
    assert torch.equal(actual, expected)


def remove_scale(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{NAME}_scale_inv"]


def shorten_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}_scale_inv"] = tensors[f"{NAME}_scale_inv"][:-1].contiguous()


def round_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}_scale_inv"] = tensors[f"{NAME}_scale_inv"].to(torch.int32)


def add_scale(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.input_layernorm.weight_scale_inv"] = torch.ones(1, 1)


def shrink_norm(tensors: dict[str, Tensor]) -> None:
    name = "model.norm.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_scale, rf"lacks 1 tensors: {NAME}_scale_inv"),
        (shorten_scale, rf"{NAME}_scale_inv is F32 \[3, 2\]: must be \[4, 2\] of F32"),
        (round_scale, rf"{NAME}_scale_inv is I32 \[4, 2\]: must be"),
        (add_scale, r"unexpected 1 tensors: model\.layers\.1\.input_layernorm\.weight_scale_inv"),
        (shrink_norm, r"model\.norm\.weight of float8 must have two dimensions"),
    ],
)
def test_wrong_factors_are_named(
    change: Change,
    message: str,
    twins: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    broken = Path(shutil.copytree(twins[0], tmp_path / "model"))
    edit_tensors(broken, change)
    with pytest.raises(ConfigError, match=message):
        load_model(broken)


def test_float8_weights_that_config_json_does_not_announce_are_refused(
    twins: tuple[Path, Path], tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(twins[0], tmp_path / "model"))
    edit_config(broken, quantization_config=None)
    assert "quantization_config" not in json.loads((broken / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"has dtype F8_E4M3: must be one of F32"):
        load_model(broken)


def test_other_block_sizes_are_followed(twins: tuple[Path, Path], tmp_path: Path) -> None:
    smaller = Path(shutil.copytree(twins[0], tmp_path / "model"))
    edit_config(smaller, quantization_config=QUANTIZATION | {"weight_block_size": [64, 128]})
    with pytest.raises(ConfigError, match=r"one for each 64 x 128"):
        load_model(smaller)
