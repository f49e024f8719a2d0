"""Whether a rank draws by one kernel, and the proof at start that it draws the same tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from common.engine.kernel_trial import give_memory_back, try_or_torch
from common.engine.sampling.noise import gumbel, row_keys

log = logging.getLogger(__name__)

# Of scores, relative where they are above one: logarithms of two libraries differ in their last
# bits. A wrong key, index or temperature is off by the order of one.
TOLERANCE = 1e-4
_TEMPERATURES = (0.0, 0.05, 0.7, 1.0, 2.0, 1.0, 0.7, 0.0, 1.0)
_SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 20240229, 7, 8, 9)
_POSITIONS = (0, 1, 17, 4095, 131071, 2**31, 3, 4, 5)

_TURN_COUNT = 4
"""Of these rows, with other logits and at other positions."""

Steering = tuple[Tensor, Tensor, Tensor]
"""int64[R] seeds, int64[R] positions, float32[R] temperatures."""


class DrawKernel:
    """See `triton_draw.draw_rows`. Raises ImportError if Triton is not installed."""

    name = "triton"

    def __init__(self) -> None:
        from common.engine.sampling.triton_draw import draw_rows

        self._draw_rows = draw_rows

    def __call__(self, logits: Tensor, steering: Steering | None) -> Tensor:
        return self._draw_rows(logits, steering)


DrawRows = Callable[[Tensor, Steering | None], Tensor]
"""See `triton_draw.draw_rows`."""


@dataclass(frozen=True, slots=True)
class DrawChoice:
    """The kernel, None for the plain spelling, and why."""

    kernel: DrawRows | None
    reason: str


@cache
def choose_draw(vocab_size: int, device: torch.device) -> DrawChoice:
    """Triton's on CUDA if it is there and draws what torch draws."""
    if device.type != "cuda":
        return DrawChoice(None, f"the path of {device.type}")

    def build_and_check() -> tuple[DrawKernel, float]:
        kernel = DrawKernel()
        return kernel, check_draw(kernel, vocab_size, device)

    kernel, reason = try_or_torch("triton", build_and_check, TOLERANCE)
    give_memory_back(device)
    if kernel is None:
        log.warning("sampling: %s; it takes many kernels", reason)
    return DrawChoice(kernel, reason)


@torch.inference_mode()
def check_draw(kernel: DrawRows, vocab_size: int, device: torch.device) -> float:
    """By how much the best score is above that of a token drawn, at most; NaN for a token out of
    place, and infinite for a row that is taken for one that can, or can't, be drawn from."""
    logits = _trial_logits(vocab_size).to(device)
    turns = torch.arange(len(logits), device=device) // len(_SEEDS)
    seeds, positions, temperatures = (
        torch.tensor(part * _TURN_COUNT, device=device)
        for part in (_SEEDS, _POSITIONS, _TEMPERATURES)
    )
    positions += turns
    vocab_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
    finite = torch.isfinite(logits).all(dim=1)
    is_known = ~torch.isnan(logits).any(dim=1)
    is_open = (logits > -math.inf).any(dim=1)
    rows = torch.arange(len(logits), device=device)[is_known & is_open]
    worst = 0.0
    for steering in (None, (seeds, positions, temperatures)):
        tokens, is_usable, is_found_open = kernel(logits, steering)
        if not torch.equal(is_usable.bool(), finite):
            return math.inf
        if not torch.equal(is_found_open.bool()[is_known], is_open[is_known]):
            return math.inf
        if ((tokens < 0) | (tokens >= vocab_size)).any():
            return math.nan
        scores = logits.clone()
        if steering is not None:
            drawn = temperatures > 0
            noise = gumbel(row_keys(seeds, positions), vocab_ids)
            scores[drawn] = logits[drawn] / temperatures[drawn, None] + noise[drawn]
        best, found = scores[rows].amax(dim=1), scores[rows, tokens[rows]]
        # The first one of equal ones, where no logarithm is in between.
        if steering is None and not torch.equal(tokens[rows], scores[rows].argmax(dim=1)):
            return math.nan
        worst = max(worst, float(((best - found) / best.abs().clamp(min=1.0)).max()))
    return worst


def _trial_logits(vocab_size: int) -> Tensor:
    """float32[R, vocab], the same every time: the last rows have equal largest ones, some that are
    impossible, nothing else, and one that is no number."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_TURN_COUNT * len(_SEEDS), vocab_size, generator=generator) * 1.5
    logits[-4, [vocab_size // 3, vocab_size - 1]] = 40.0
    logits[-3, : vocab_size // 2] = -math.inf
    logits[-2] = -math.inf
    logits[-1, vocab_size // 2] = math.nan
    return logits
