"""Routed experts of float8 blocks as one call of FlashInfer, which multiplies by them as stored.

Its kernels (CUTLASS around DeepGEMM) are for compute capability 9.0 and CUDA 12.8: they round what
they multiply to float8, in runs of 128. Whether they are right on a device is tried before the
first layer is given to them, against the same spelled out; elsewhere experts are made wide for each
product. They want ups above gates. Written against the sources of FlashInfer 0.6.18.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.kernel_trial import give_memory_back, try_or_torch
from common.engine.layers.expert_matrix import ExpertMatrix
from common.engine.layers.float8 import BLOCK, FLOAT8, round_to_float8

log = logging.getLogger(__name__)

NAME = "flashinfer cutlass_fused_moe"
TOLERANCE = 2.0**-5
"""Of the norm: both round to float8 twice, by factors that may differ in their last bit."""
_TRIED = (5, 256, 384)
"""Experts, hidden size and inner size of the trial."""
_TOKEN_COUNTS = (1, 3, 130)
_PER_TOKEN = 2


@dataclass(frozen=True, slots=True)
class BlockExperts:
    """up_gate: float8[experts, 2 n, hidden], ups above gates. down: float8[experts, hidden, n].
    Scales: fp32, one for each block of 128 x 128."""

    up_gate: Tensor
    up_gate_scales: Tensor
    down: Tensor
    down_scales: Tensor


Mix = Callable[[Tensor, Tensor, Tensor, BlockExperts], Tensor]
"""bf16[T, hidden] of hidden states, shares fp32[T, k], experts int32[T, k] and their weights: what
a token's experts make, summed by its shares."""


def mix_by_flashinfer(
    hidden: Tensor, shares: Tensor, experts: Tensor, weights: BlockExperts
) -> Tensor:
    """See `Mix`. Sums in the same order every time."""
    from flashinfer.fused_moe import cutlass_fused_moe

    output = torch.empty_like(hidden)
    cutlass_fused_moe(
        hidden,
        experts,
        shares,
        weights.up_gate,
        weights.down,
        hidden.dtype,
        [weights.up_gate_scales, weights.down_scales],
        output=output,
        use_deepseek_fp8_block_scale=True,
        use_fused_finalize=False,
    )
    return output


def mix_plain(hidden: Tensor, shares: Tensor, experts: Tensor, weights: BlockExperts) -> Tensor:
    """See `Mix`."""
    up_gate = _widen(weights.up_gate, weights.up_gate_scales)
    down = _widen(weights.down, weights.down_scales)
    total = torch.zeros_like(hidden, dtype=torch.float32)
    for place in range(experts.shape[1]):
        chosen = experts[:, place].long()
        both = torch.einsum("tk,tnk->tn", _rounded(hidden), up_gate[chosen]).to(hidden.dtype)
        up, gate = both.float().chunk(2, dim=-1)
        inner = (F.silu(gate) * up).to(hidden.dtype)
        made = torch.einsum("tk,tnk->tn", _rounded(inner), down[chosen]).to(hidden.dtype)
        total += made.float() * shares[:, place, None]
    return total.to(hidden.dtype)


@cache
def choose_block_moe(device: torch.device) -> tuple[Mix | None, str]:
    """(what mixes experts of blocks, None to do without, and why)."""
    if device.type != "cuda":
        return None, f"the path of {device.type}"

    def build_and_check() -> tuple[Mix, float]:
        return mix_by_flashinfer, check_block_moe(mix_by_flashinfer, device)

    mix, reason = try_or_torch(NAME, build_and_check, TOLERANCE)
    give_memory_back(device)
    if mix is None:
        log.warning("experts of float8 blocks are made wide for each product: %s", reason)
    return mix, reason


@torch.inference_mode()
def check_block_moe(mix: Mix, device: torch.device) -> float:
    """The largest difference to the plain spelling over its norm; NaN if it is not finite."""
    count, size, inner = _TRIED
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def scales(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=generator) * 0.05 + 0.01).to(device)

    weights = BlockExperts(
        draw(count, 2 * inner, size).to(FLOAT8).to(device),
        scales(count, 2 * inner // BLOCK, size // BLOCK),
        draw(count, size, inner).to(FLOAT8).to(device),
        scales(count, size // BLOCK, inner // BLOCK),
    )
    worst = 0.0
    for token_count in _TOKEN_COUNTS:
        hidden = draw(token_count, size).bfloat16().to(device)
        best, experts = draw(token_count, count).topk(_PER_TOKEN, dim=-1)
        shares, experts = best.softmax(-1).to(device), experts.int().to(device)
        expected, found = (f(hidden, shares, experts, weights).float() for f in (mix_plain, mix))
        difference = float((found - expected).norm() / expected.norm())
        if not math.isfinite(difference):
            return math.nan
        worst = max(worst, difference)
    return worst


def _rounded(rows: Tensor) -> Tensor:
    codes, steps = round_to_float8(rows, BLOCK)
    return codes.float() * steps.repeat_interleave(BLOCK, -1)


def _widen(values: Tensor, scales: Tensor) -> Tensor:
    return values.float() * scales.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)


class WholeExperts:
    """The experts of a layer whose weights stay float8 blocks, if a kernel is right about such.

    Packed before their weights are, which then need no memory to be made wide in.
    """

    def __init__(self, gate_up: ExpertMatrix, down: ExpertMatrix) -> None:
        self._matrices = gate_up, down
        self._mix: Mix | None = None
        self._weights: BlockExperts | None = None

    @property
    def is_taken(self) -> bool:
        return self._mix is not None

    def pack(self) -> None:
        gate_up, down = (matrix.stored for matrix in self._matrices)
        if gate_up is None or down is None or gate_up.rows % (2 * BLOCK):
            return
        if gate_up.blocks is None or down.blocks is None:
            return
        self._mix, _ = choose_block_moe(self._matrices[0].device)
        if self._mix is None:
            return
        gate_up.exchange_halves()
        # Asked for again: they have moved.
        assert gate_up.blocks is not None
        self._weights = BlockExperts(*gate_up.blocks, *down.blocks)
        for matrix in self._matrices:
            matrix.take(NAME)

    @property
    def forms(self) -> list[tuple[str, int]]:
        return []

    def __call__(self, hidden: Tensor, shares: Tensor, experts: Tensor) -> Tensor:
        """[T, hidden]: what each token's experts make, summed by their shares, both [T, k]."""
        assert self._mix is not None and self._weights is not None
        return self._mix(hidden, shares.float(), experts.int(), self._weights)
