"""Experts of float8 blocks in one call: the plain spelling against wide experts, and what is given
to the kernel; the real package's call is in `tests/kernel_packages`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.engine.checkpoint.codes import Codes
from common.engine.config.model import MoeConfig
from common.engine.distributed import ParallelContext
from common.engine.layers import block_moe, expert_matrix
from common.engine.layers.block_moe import (
    TOLERANCE,
    BlockExperts,
    Mix,
    check_block_moe,
    choose_block_moe,
    mix_plain,
)
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.matrix import describe_matrices
from common.engine.layers.mlp import gated_gelu
from common.engine.layers.moe import MoeMlp
from common.engine.layers.narrow import NarrowWeights

CPU = torch.device("cpu")
COUNT, SIZE, INNER = 6, 256, 256
MOE = MoeConfig(COUNT, 2, INNER, True, (0,))


def blocks(rows: int, columns: int, seed: int) -> Codes:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(rows // 128, columns // 128, generator=generator) * 0.05
    return Codes(values, scales.repeat_interleave(128, 0), None, 8, 128)


def moe(narrow: NarrowWeights) -> MoeMlp:
    context = LayerContext(ParallelContext(), CPU, torch.bfloat16, narrow=narrow)
    layer = MoeMlp(context, "mlp", hidden_size=SIZE, moe=MOE)
    layer.router.copy_(torch.randn(COUNT, SIZE, generator=torch.Generator().manual_seed(9)))
    for expert in range(COUNT):
        gate_up = [blocks(INNER, SIZE, 10 * expert + part) for part in range(2)]
        down = [blocks(SIZE, INNER, 10 * expert + 5)]
        for matrix, parts in ((layer.gate_up, gate_up), (layer.down, down)):
            if not matrix.experts[expert].keep(parts):
                wide = torch.cat([part.widen() for part in parts])
                matrix.experts[expert].room(matrix.rows[expert]).copy_(wide)
    for packed in context.matrices:
        packed.pack()
    assert narrow == NarrowWeights.WIDE or layer.gate_up.stored is not None
    layer.said = describe_matrices(context.matrices)  # type: ignore[attr-defined]
    return layer


@torch.inference_mode()
def test_a_layer_gives_its_experts_to_a_kernel_that_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It rounds what it multiplies to float8; gates and ups come in its own order."""
    monkeypatch.setattr(expert_matrix, "HOST_ASKS", ())
    monkeypatch.setattr(block_moe, "choose_block_moe", lambda device: (mix_plain, ""))
    wide, whole = moe(NarrowWeights.WIDE), moe(NarrowWeights.AUTO)
    assert whole.whole is not None and whole.whole.is_taken
    assert wide.whole is not None and not wide.whole.is_taken
    said: str = whole.said  # type: ignore[attr-defined]
    assert said.startswith(
        "experts of float8_e4m3fn by blocks of 128 x 128, flashinfer cutlass_fused_moe: 2 weights"
    )
    hidden = torch.randn(33, SIZE, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected, found = wide(hidden).float(), whole(hidden).float()
    assert (found - expected).norm() / expected.norm() < 0.06
    with pytest.raises(AssertionError, match="reserved"):
        whole.gate_up._scratch.view(1)


def test_other_layers_are_not_given_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    context = LayerContext(ParallelContext(), CPU, torch.bfloat16)
    gelu = MoeMlp(context, "mlp", hidden_size=SIZE, moe=MOE, activation=gated_gelu)
    other = MoeMlp(replace(context, dtype=torch.float32), "mlp", hidden_size=SIZE, moe=MOE)
    assert gelu.whole is None and other.whole is None
    assert choose_block_moe(CPU) == (None, "the path of cpu")
    mix, reason = choose_block_moe(torch.device("cuda"))
    assert mix is None and reason
    monkeypatch.setattr(expert_matrix, "HOST_ASKS", ())
    unsupported = moe(NarrowWeights.AUTO)
    assert unsupported.whole is not None and not unsupported.whole.is_taken
    assert "made wide for each product" in unsupported.said  # type: ignore[attr-defined]


def gates_first(hidden: Tensor, shares: Tensor, experts: Tensor, weights: BlockExperts) -> Tensor:
    parts = (weights.up_gate, weights.up_gate_scales)
    turned = [
        torch.cat(part.view(torch.uint8).chunk(2, 1)[::-1], 1).view(part.dtype) for part in parts
    ]
    return mix_plain(
        hidden, shares, experts, replace(weights, up_gate=turned[0], up_gate_scales=turned[1])
    )


def scales_turned(hidden: Tensor, shares: Tensor, experts: Tensor, weights: BlockExperts) -> Tensor:
    turned = weights.down_scales.transpose(1, 2).reshape(weights.down_scales.shape)
    return mix_plain(hidden, shares, experts, replace(weights, down_scales=turned))


def without_shares(
    hidden: Tensor, shares: Tensor, experts: Tensor, weights: BlockExperts
) -> Tensor:
    return mix_plain(hidden, torch.full_like(shares, 0.5), experts, weights)


@pytest.mark.parametrize("mistake", [gates_first, scales_turned, without_shares])
def test_a_wrong_kernel_is_found_out_at_start(mistake: Mix) -> None:
    assert check_block_moe(mix_plain, CPU) == 0.0
    assert not check_block_moe(mistake, CPU) <= TOLERANCE
