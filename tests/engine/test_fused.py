"""The small functions of layers as single kernels: by their definition here, on a GPU by
FlashInfer's own (`tests/gpu`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine import loader
from common.engine.config.rope import RopeConfig, RopeKind
from common.engine.distributed import ParallelContext
from common.engine.layers import choose_fused as choose_fused_module
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
from common.engine.layers.fused import FusedKernels, NormedRotation, RotationShape
from common.engine.layers.fused_rotation import FusedRotation
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.mlp import fastest, gated_silu
from common.engine.layers.rotary import RotaryEmbedding
from common.engine.loader import load_model
from tests.engine.flashinfer_by_definition import (
    apply_rope_with_cos_sin_cache,
    gemma_rmsnorm,
    install,
    rmsnorm,
    silu_and_mul,
)
from tests.engine.paged_decoding import Sequence, forward, make_pool

BF16 = torch.bfloat16
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_are_two_roundings_from_the_plain_spelling(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    install(monkeypatch)
    shape = FusedShape(128, 96, dtype, CPU)
    assert 0.0 < check_fused(FusedKernels(), shape) <= TOLERANCE[dtype]


def halves_swapped(gate_up: Tensor) -> Tensor:
    up, gate = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def unscaled(hidden: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> Tensor:
    return rmsnorm(hidden, torch.ones_like(weight), epsilon, out)


def offset(hidden: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> Tensor:
    return rmsnorm(hidden, weight + 1, epsilon, out)


def not_in_place(hidden: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> Tensor:
    is_own = out.data_ptr() == hidden.data_ptr()
    return rmsnorm(hidden, weight, epsilon, None if is_own else out)


def not_added(hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    hidden.copy_(rmsnorm(residual, weight, epsilon))


def not_finite(gate_up: Tensor) -> Tensor:
    return silu_and_mul(gate_up) / 0.0


@pytest.mark.parametrize(
    ("part", "name", "mistake"),
    [
        ("norm", "rmsnorm", unscaled),
        ("norm", "rmsnorm", offset),
        ("norm", "rmsnorm", not_in_place),
        ("norm", "fused_add_rmsnorm", not_added),
        ("activation", "silu_and_mul", halves_swapped),
        ("activation", "gelu_tanh_and_mul", silu_and_mul),
        ("activation", "silu_and_mul", not_finite),
    ],
)
def test_a_wrong_kernel_is_found_out_at_start(
    monkeypatch: pytest.MonkeyPatch, part: str, name: str, mistake: Callable[..., Tensor]
) -> None:
    install(monkeypatch)
    monkeypatch.setattr(sys.modules[f"flashinfer.{part}"], name, mistake)
    difference = check_fused(FusedKernels(), FusedShape(128, 96, torch.bfloat16, CPU))
    assert not difference <= TOLERANCE[torch.bfloat16]


def not_offset(hidden: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> Tensor:
    return rmsnorm(hidden, weight, epsilon, out)


def not_added_by_offset(hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    hidden.copy_(gemma_rmsnorm(residual, weight, epsilon))


@pytest.mark.parametrize(
    ("name", "mistake"),
    [("gemma_rmsnorm", not_offset), ("gemma_fused_add_rmsnorm", not_added_by_offset)],
)
def test_a_wrong_norm_by_offsets_costs_such_norms_only(
    monkeypatch: pytest.MonkeyPatch, name: str, mistake: Callable[..., Tensor]
) -> None:
    install(monkeypatch)
    shape = FusedShape(128, 96, BF16, CPU)
    assert check_offset_norms(FusedKernels(), shape) <= TOLERANCE[BF16]
    monkeypatch.setattr(sys.modules["flashinfer.norm"], name, mistake)
    assert not check_offset_norms(FusedKernels(), shape) <= TOLERANCE[BF16]
    kernels = FusedKernels()
    (said,) = choose_fused_module._try_parts(kernels, shape)
    assert said.startswith("norms by offsets: flashinfer differs") and not kernels.has_offset_norms


ROPE = RopeConfig(RopeKind.DEFAULT, 10000.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotated_dim"), [(64, 64), (128, 32)])
def test_heads_are_turned_as_in_fp32_and_rounded_once(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    is_interleaved: bool,
    head_dim: int,
    rotated_dim: int,
) -> None:
    install(monkeypatch)
    rope = replace(ROPE, is_interleaved=is_interleaved)
    rotation = RotationShape(head_dim, rotated_dim, is_interleaved)
    kernels, shape = FusedKernels(), FusedShape(128, 96, dtype, CPU, rope)
    assert 0.0 < check_rotation(kernels, rotation, shape) <= 2 ** (-8 if dtype == BF16 else -11)
    assert kernels.rotations == {rotation}


def turned_back(*args: object, is_neox: bool) -> tuple[Tensor, Tensor]:
    positions, query, key, size, table = args
    assert isinstance(table, Tensor)
    cos, sin = table.chunk(2, -1)
    return apply_rope_with_cos_sin_cache(
        positions,
        query,
        key,
        size,
        torch.cat((cos, -sin), -1),
        is_neox,  # type: ignore[arg-type]
    )


def in_other_pairs(*args: object, is_neox: bool) -> tuple[Tensor, Tensor]:
    return apply_rope_with_cos_sin_cache(*args, is_neox=not is_neox)  # type: ignore[arg-type]


def not_turned(
    positions: Tensor, query: Tensor, key: Tensor, *args: object, is_neox: bool
) -> tuple[Tensor, Tensor]:
    return query, key


@pytest.mark.parametrize("mistake", [turned_back, in_other_pairs, not_turned])
@pytest.mark.parametrize("kind", ["", "_inplace"])
def test_heads_that_are_turned_wrongly_are_found_out_at_start(
    monkeypatch: pytest.MonkeyPatch, kind: str, mistake: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    def in_place(
        positions: Tensor, query: Tensor, key: Tensor, *args: object, is_neox: bool
    ) -> None:
        found = mistake(positions, query, key, *args, is_neox=is_neox)
        for heads, turned in zip((query, key), found, strict=True):
            heads.copy_(turned.clone().view(heads.shape))

    install(monkeypatch)
    name = f"apply_rope_with_cos_sin_cache{kind}"
    monkeypatch.setattr(sys.modules["flashinfer.rope"], name, in_place if kind else mistake)
    rotation = RotationShape(64, 64, False)
    difference = check_rotation(FusedKernels(), rotation, FusedShape(128, 96, BF16, CPU, ROPE))
    assert not difference <= TOLERANCE[BF16]


def test_heads_of_other_shapes_are_turned_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(sys.modules["flashinfer.rope"], "apply_rope_with_cos_sin_cache", not_turned)
    rotary = RotaryEmbedding(ROPE, 64, device=CPU, dtype=BF16)
    positions, heads = torch.arange(3), torch.randn(3, 5, 64).to(BF16)
    turned = FusedRotation(rotary, positions, FusedKernels()).apply(heads)
    assert torch.equal(turned, rotary.rotate(positions).apply(heads))


def norm_and_rotate(
    heads: Tensor,
    weight: Tensor,
    epsilon: float,
    angles: Tensor,
    *,
    is_interleaved: bool,
    is_offset: bool,
) -> Tensor:
    """As `triton_rotation` documents it."""
    wide = heads.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    wide = (wide * (weight.float() + (1.0 if is_offset else 0.0))).contiguous()
    turned, _ = apply_rope_with_cos_sin_cache(
        torch.arange(len(heads)), wide, wide, heads.shape[-1], angles, not is_interleaved
    )
    return turned.view(heads.shape).to(heads.dtype)


def install_norm_and_rotate(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor] = norm_and_rotate
) -> None:
    module = ModuleType("common.engine.layers.triton_rotation")
    vars(module)["norm_and_rotate"] = kernel
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("is_offset", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_heads_are_normed_and_turned_as_in_fp32_and_rounded_once(
    monkeypatch: pytest.MonkeyPatch, is_offset: bool, is_interleaved: bool
) -> None:
    install(monkeypatch)
    install_norm_and_rotate(monkeypatch)
    shape = FusedShape(128, 96, BF16, CPU, replace(ROPE, is_interleaved=is_interleaved))
    normed = NormedRotation(RotationShape(128, 64, is_interleaved), is_offset)
    assert 0.0 < check_normed_rotation(FusedKernels(), normed, shape) <= 2**-8


def by_one_weight(heads: Tensor, weight: Tensor, *args: object, **options: bool) -> Tensor:
    return norm_and_rotate(heads, weight[:1].expand_as(weight), *args, **options)  # type: ignore[arg-type]


def never_by_offsets(*args: object, is_interleaved: bool, is_offset: bool) -> Tensor:
    return norm_and_rotate(*args, is_interleaved=is_interleaved, is_offset=not is_offset)  # type: ignore[arg-type]


@pytest.mark.parametrize("mistake", [by_one_weight, never_by_offsets])
def test_heads_that_are_normed_wrongly_are_found_out_at_start(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., Tensor]
) -> None:
    install(monkeypatch)
    install_norm_and_rotate(monkeypatch, mistake)
    normed = NormedRotation(RotationShape(64, 64, False), is_offset=False)
    shape = FusedShape(128, 96, BF16, CPU, ROPE)
    assert not check_normed_rotation(FusedKernels(), normed, shape) <= TOLERANCE[BF16]


def test_gates_that_kernels_can_not_read_at_once_are_spelled_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)
    context = LayerContext(ParallelContext(), CPU, torch.bfloat16, FusedKernels())
    assert fastest(gated_silu, context, 12) is gated_silu
    assert fastest(gated_silu, context, 16) is not gated_silu
    assert fastest(torch.sigmoid, context, 16) is torch.sigmoid


def test_without_the_library_functions_are_spelled_out_and_the_reason_is_said() -> None:
    assert choose_fused(FusedShape(64, 64, torch.float16, CPU)) == FusedChoice(
        None, "native has no kernels for torch.float16"
    )
    assert "float32" in choose_fused(FusedShape(64, 64, torch.float32, CUDA)).reason
    choice = choose_fused(FusedShape(64, 64, torch.bfloat16, CUDA))
    assert choice.kernels is None and "baton[cuda" in choice.reason


@pytest.mark.parametrize(
    "recipe",
    ["qwen3", "qwen3_moe", "qwen3_next", "gemma3", "gemma2", "deepseek_v3", "gpt_oss", "falcon_h1"],
)
def test_models_compute_the_same_by_kernels(
    tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    install(monkeypatch)
    monkeypatch.setattr(loader, "choose_fused", lambda _: FusedChoice(None, "spelled out"))
    plain = load_model(tiny_checkpoint(recipe))
    kernels = FusedKernels()
    kernels.has_offset_norms = True
    rope = plain.config.rope
    kernels.rotations |= {
        RotationShape(head_dim, plain.config.rotary_dim, rope.is_interleaved)
        for head_dim in (plain.config.head_dim, plain.config.rotary_dim)
    }
    install_norm_and_rotate(monkeypatch)
    kernels.normed_rotations |= {
        NormedRotation(rotation, is_offset)
        for rotation in kernels.rotations
        for is_offset in (False, True)
    }
    monkeypatch.setattr(loader, "choose_fused", lambda _: FusedChoice(kernels, "by definition"))
    fused = load_model(tiny_checkpoint(recipe))
    assert fused.context.fused is kernels and plain.context.fused is None
    logits: list[list[Tensor]] = []
    for model in (plain, fused):
        pool, sequence = make_pool(model, 4), Sequence(list(range(3, 23)), [2, 4, 1])
        logits.append([forward(model, pool, [sequence.chunk(size)]) for size in (12, 7, 1)])
    for expected, found in zip(*logits, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0.0)
