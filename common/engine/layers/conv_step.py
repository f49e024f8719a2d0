"""One token of every sequence through a short convolution, and its features in parts of their own.

`step_plain` spells it out; on CUDA one kernel does it (`triton_conv.py`), if it agrees at start.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.cache.cast import raw
from common.engine.cache.slots import SlotPlaces
from common.engine.kernel_trial import give_memory_back, largest_difference, try_or_torch
from common.engine.layers.linear import ColumnLinear

log = logging.getLogger(__name__)

# Both round what the activation is given, and what it makes.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SEGMENTS_MAX = 3
_TOKEN_COUNTS = (1, 5)


class ConvParts:
    """Which features of a row come out where: the first `mixed` parts go through the convolution.

    parts: columns of a row, for each part that comes out.
    """

    def __init__(self, parts: Sequence[Sequence[int]], mixed: int, device: torch.device) -> None:
        sizes = [len(part) for part in parts]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.sizes, self.mixed = sizes, mixed

        def table(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32).to(device)

        self.columns = table([column for part in parts for column in part])
        self.firsts = table([s for s, n in zip(starts, sizes, strict=True) for _ in range(n)])
        self.widths = table([n for n in sizes for _ in range(n)])

    def cut(self, flat: Tensor) -> list[Tensor]:
        """[T, size] of each part, of [all of them]."""
        count = len(flat) // sum(self.sizes)
        cuts = torch.split(flat, [count * size for size in self.sizes])
        return [cut.view(count, size) for cut, size in zip(cuts, self.sizes, strict=True)]


def columns_of(linear: ColumnLinear) -> list[list[int]]:
    """Where the features of each block of a projection lie in a row."""
    ends = list(accumulate(len(block.rows) for block in linear.blocks))
    return [list(range(*bounds)) for bounds in pairwise([0, *ends])]


@dataclass(frozen=True, slots=True)
class ConvStep:
    """What a step computes with. weight: [C, 1, K], of the parts that are mixed, one segment each;
    bias: [C]. units: channels of a unit of each segment."""

    parts: ConvParts
    weight: Tensor
    bias: Tensor | None
    units: tuple[int, ...]


Step = Callable[[ConvStep, Tensor, SlotPlaces], list[Tensor]]


def step_plain(step: ConvStep, projected: Tensor, places: SlotPlaces) -> list[Tensor]:
    """Parts [T, size] of `projected` [T, width]. What a channel keeps is changed in place."""
    parts, width = step.parts, step.weight.shape[-1] - 1
    flat = projected[:, parts.columns.long()]
    columns = list(torch.split(flat, parts.sizes, dim=1))
    sizes = parts.sizes[: parts.mixed]
    for index, (states, taps) in enumerate(
        zip(places.states, torch.split(step.weight[:, 0], sizes), strict=True)
    ):
        inputs = columns[index]
        kept = raw(states)[places.read].view(states.dtype).reshape(len(flat), -1, width)
        window = torch.cat((kept.to(inputs.dtype), inputs[:, :, None]), dim=2)
        total = (window.float() * taps.float()).sum(dim=2)
        if step.bias is not None:
            total = total + torch.split(step.bias, sizes)[index].float()
        columns[index] = F.silu(total.to(inputs.dtype))
        after = window[:, :, 1:].reshape(len(flat), *states.shape[1:]).to(states.dtype)
        raw(states).index_copy_(0, places.write, raw(after))
    return [part.contiguous() for part in columns]


def step_fused(step: ConvStep, projected: Tensor, places: SlotPlaces) -> list[Tensor]:
    """See `step_plain`."""
    from common.engine.layers.triton_conv import conv_step

    parts = step.parts
    return parts.cut(
        conv_step(
            projected,
            parts.columns,
            parts.firsts,
            parts.widths,
            step.weight,
            step.bias,
            places.states,
            step.units,
            places.read,
            places.write,
        )
    )


@dataclass(frozen=True, slots=True)
class ConvShape:
    kernel_size: int
    has_bias: bool
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class ConvChoice:
    """The step in one kernel, None to do without, and why."""

    step: Step | None
    reason: str


@cache
def choose_conv(shape: ConvShape) -> ConvChoice:
    """Ours by Triton on CUDA, if it agrees with the plain spelling."""
    if shape.device.type != "cuda":
        return ConvChoice(None, f"the path of {shape.device.type}")

    def build_and_check() -> tuple[Step, float]:
        return step_fused, check_conv(step_fused, shape)

    step, reason = try_or_torch("triton", build_and_check, TOLERANCE[shape.dtype])
    give_memory_back(shape.device)
    if step is None:
        log.warning("short convolutions: %s; they take several kernels each", reason)
    return ConvChoice(step, reason)


@torch.inference_mode()
def check_conv(candidate: Step, shape: ConvShape) -> float:
    """The largest difference to the plain spelling, in what comes out and in what is kept; NaN if
    anything is not finite. Segments of other units, and features that pass by."""
    units, kept = (8, 16, 4), shape.kernel_size - 1
    sizes, passing = (32, 32, 300), (7, 24)
    width, worst = sum(sizes) + sum(passing), 0.0
    generator = torch.Generator().manual_seed(1)
    columns = torch.randperm(width, generator=generator).tolist()
    bounds = [sum((*sizes, *passing)[:i]) for i in range(len(sizes) + len(passing) + 1)]
    parts = [columns[a:b] for a, b in pairwise(bounds)]

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(shape.dtype).to(shape.device)

    step = ConvStep(
        ConvParts(parts, len(sizes), shape.device),
        draw(sum(sizes), 1, shape.kernel_size),
        draw(sum(sizes)) if shape.has_bias else None,
        units,
    )
    for count in _TOKEN_COUNTS:
        pages = 2 * count + 1
        memory = [draw(pages, sum(sizes) * kept + 16)]
        memory.append(memory[0].clone())
        read = torch.arange(count, device=shape.device) * 2
        # Each sequence its own page, or one that no sequence reads.
        write = read + torch.arange(count, device=shape.device) % 2
        found = []
        for content, compute in zip(memory, (step_plain, candidate), strict=True):
            states, first = [], 8
            for size, unit in zip(sizes, units, strict=True):
                run = content[:, first : first + size * kept]
                states.append(run.unflatten(1, (size // unit, unit * kept)))  # type: ignore[no-untyped-call]
                first += size * kept
            projected = torch.randn(
                count, width + 8, generator=torch.Generator().manual_seed(count)
            )
            places = SlotPlaces(tuple(states), read, write)
            given = projected.to(shape.dtype).to(shape.device)[:, :width]
            found.append([*compute(step, given, places), content])
        for expected, actual in zip(*found, strict=True):
            difference = largest_difference(expected, actual)
            if not math.isfinite(difference):
                return math.nan
            worst = max(worst, difference)
    return worst
