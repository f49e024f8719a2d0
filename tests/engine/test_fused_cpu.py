"""The small functions of layers on a CPU, by their native module, against torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.engine import loader, native_modules
from common.engine.config.rope import RopeConfig, RopeKind
from common.engine.layers.choose_fused import (
    TOLERANCE,
    FusedChoice,
    FusedShape,
    check_fused,
    check_normed_rotation,
    check_offset_norms,
    check_rotation,
    choose_fused,
)
from common.engine.layers.fused import NormedRotation, RotationShape
from common.engine.layers.fused_cpu import CpuKernels
from common.engine.loader import load_model
from tests.engine.paged_decoding import Sequence, forward, make_pool

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
# Whole vectors, with a rest, and less than one.
SIZES = [8, 72, 128, 1000]


@pytest.fixture(params=native_modules.VECTORS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    monkeypatch.setattr(native_modules, "VECTORS", (request.param,))
    try:
        return CpuKernels()
    except RuntimeError as exc:
        pytest.skip(str(exc))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_norms_and_activations_are_torch_s(
    kernels: CpuKernels, dtype: torch.dtype, size: int
) -> None:
    shape = FusedShape(size, size, dtype, CPU)
    # Those that are rounded where torch rounds are the same but for the order of a sum.
    assert check_fused(kernels, shape) <= (1e-5 if dtype == torch.float32 else 2**-7)
    assert check_offset_norms(kernels, shape) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "rotated_dim"), [(8, 8), (32, 32), (64, 32), (80, 20), (128, 128), (512, 64)]
)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_heads_are_normed_and_turned_as_by_torch(
    kernels: CpuKernels, dtype: torch.dtype, head_dim: int, rotated_dim: int, is_interleaved: bool
) -> None:
    rope = RopeConfig(RopeKind.DEFAULT, 10000.0, is_interleaved=is_interleaved)
    rotation = RotationShape(head_dim, rotated_dim, is_interleaved)
    shape = FusedShape(128, 96, dtype, CPU, rope)
    tolerance = 1e-5 if dtype == torch.float32 else TOLERANCE[dtype]
    assert check_rotation(kernels, rotation, shape) <= tolerance
    for is_offset in (False, True):
        normed = NormedRotation(rotation, is_offset)
        assert check_normed_rotation(kernels, normed, shape) <= tolerance


def test_what_is_not_finite_stays_so(kernels: CpuKernels) -> None:
    rows = torch.randn(3, 64)
    rows[1, 7], rows[2, 9] = torch.nan, torch.inf
    weight = torch.ones(64)
    normed = kernels.rms_norm(rows, weight, 1e-5)
    assert normed.isfinite().all(-1).tolist() == [True, False, False]
    gated = kernels.gated_silu(torch.cat((rows, rows), dim=-1))
    assert gated.isfinite().all(-1).tolist() == [True, False, False]


def test_gates_far_from_zero_are_shut_or_open(kernels: CpuKernels) -> None:
    gates = torch.tensor([-1000.0, -90.0, -20.0, 20.0, 90.0, 1000.0])
    rows = torch.cat((gates, torch.ones(6)))[None]
    for found in (kernels.gated_silu(rows), kernels.gated_gelu(rows)):
        torch.testing.assert_close(found[0], gates.clamp(min=0.0), rtol=1e-6, atol=1e-6)


def test_a_row_does_not_depend_on_how_many_there_are(kernels: CpuKernels) -> None:
    """So that verified proposals are the tokens of single steps, bit for bit."""
    rows, weight = torch.randn(700, 96), torch.randn(96)
    together = kernels.rms_norm(rows, weight, 1e-5)
    assert torch.equal(together[3:4], kernels.rms_norm(rows[3:4], weight, 1e-5))
    gated = kernels.gated_silu(rows)
    assert torch.equal(gated[699:], kernels.gated_silu(rows[699:]))


@pytest.mark.parametrize(
    "recipe",
    ["qwen3", "qwen3_moe", "qwen3_next", "gemma3", "gemma2", "deepseek_v3", "gpt_oss", "falcon_h1"],
)
def test_models_compute_the_same_without_them(
    tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    fused = load_model(tiny_checkpoint(recipe), dtype="float32")
    assert isinstance(fused.context.fused, CpuKernels)
    monkeypatch.setattr(loader, "choose_fused", lambda _: FusedChoice(None, "spelled out"))
    plain = load_model(tiny_checkpoint(recipe), dtype="float32")
    logits: list[list[Tensor]] = []
    for model in (plain, fused):
        pool, sequence = make_pool(model, 4), Sequence(list(range(3, 23)), [2, 4, 1])
        logits.append([forward(model, pool, [sequence.chunk(size)]) for size in (12, 7, 1)])
    for expected, found in zip(*logits, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_processor_without_the_vectors_spells_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for vectors in native_modules.VECTORS:
        module = import_module(f"baton_native._layers_{vectors}")
        monkeypatch.setattr(module, "why_unusable", lambda: "this CPU lacks vectors")
    choose_fused.cache_clear()
    try:
        choice = choose_fused(FusedShape(64, 64, torch.float32, CPU))
    finally:
        choose_fused.cache_clear()
    assert choice.kernels is None and "this CPU lacks vectors" in choice.reason
