"""The short causal convolution in front of a recurrence: every channel over its own last inputs.

What is carried from one pass to the next are the last K - 1 inputs of each channel, before the
activation, oldest first: cache component "conv", a unit's channels side by side, [channel, K - 1].
A sequence that has seen fewer tokens has zeros before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.cache.slots import SlotPass
from common.engine.checkpoint.weights import TensorSlice, Weight
from common.engine.layers.conv_step import (
    SEGMENTS_MAX,
    ConvParts,
    ConvShape,
    ConvStep,
    Step,
    choose_conv,
)
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.sequence_rows import SequenceRows

CONV = "conv"
"""The cache component's name."""


@dataclass(frozen=True, slots=True)
class ConvSegment:
    """Channels that tensor parallelism cuts on their own (q, k or v of a mixer).

    name: of the cache segment. tensor: of the checkpoint, without ".weight"; several segments may
    lie in one. size: channels of that tensor. channels: the ones of it that this rank computes.
    unit_size: channels of a unit (a head) of the cache.
    """

    name: str
    tensor: str
    size: int
    channels: range
    unit_size: int


class ShortConv:
    """inputs [T, C], the channels of all segments side by side, to silu(convolution), [T, C].

    layer: global id.
    """

    def __init__(
        self,
        context: LayerContext,
        layer: int,
        segments: Sequence[ConvSegment],
        *,
        kernel_size: int,
        has_bias: bool = False,
    ) -> None:
        assert kernel_size >= 2, kernel_size
        self.layer = layer
        self.segments = tuple(segments)
        self.kernel_size = kernel_size
        self.sizes = [len(segment.channels) for segment in segments]
        self.weight = context.empty(sum(self.sizes), 1, kernel_size)
        self.bias = context.empty(sum(self.sizes)) if has_bias else None
        self.in_one: Step | None = None
        if len(segments) <= SEGMENTS_MAX:
            shape = ConvShape(kernel_size, has_bias, context.dtype, context.device)
            self.in_one = choose_conv(shape).step

    def take(
        self, projected: Tensor, parts: ConvParts, rows: SequenceRows, slots: SlotPass
    ) -> list[Tensor] | None:
        """The parts of `projected` [T, width], those of the segments through the convolution, in
        one launch; None where that is not to be had."""
        if self.in_one is None or not rows.is_single:
            return None
        places = slots.in_place(CONV, self.layer, [segment.name for segment in self.segments])
        if places is None or any(state.dtype != projected.dtype for state in places.states):
            return None
        units = tuple(segment.unit_size for segment in self.segments)
        return self.in_one(ConvStep(parts, self.weight, self.bias, units), projected, places)

    def __call__(self, inputs: Tensor, rows: SequenceRows, slots: SlotPass) -> Tensor:
        before = self._read(slots, inputs)
        if rows.is_single:
            window = torch.cat((before, inputs[:, None]), dim=1)
            mixed = (window.float() * self._taps()).sum(dim=1)
            self._write(slots, window[:, 1:])
        else:
            padded = rows.padded(self.kernel_size - 1)
            window = inputs.new_empty(padded.count, inputs.shape[1])
            window[padded.fronts] = before
            window[padded.rows] = inputs
            for part in rows.rounds:
                if part.before is not None:
                    window[padded.fronts[part.sequences]] = window[padded.backs[part.before]]
            self._write(slots, window[padded.backs])
            mixed = self._mix(window)[padded.rows - (self.kernel_size - 1)]
        if self.bias is not None:
            mixed = mixed + self.bias.float()
        return F.silu(mixed.to(inputs.dtype))

    def weights(self) -> Iterator[Weight]:
        for segment, weight in zip(
            self.segments, torch.split(self.weight, self.sizes), strict=True
        ):
            take = slice(segment.channels.start, segment.channels.stop)
            shape = (segment.size, 1, self.kernel_size)
            taken = (take, slice(None), slice(None))
            yield Weight(((TensorSlice(f"{segment.tensor}.weight", shape, taken, weight),),))
        if self.bias is None:
            return
        for segment, bias in zip(self.segments, torch.split(self.bias, self.sizes), strict=True):
            take = slice(segment.channels.start, segment.channels.stop)
            piece = TensorSlice(f"{segment.tensor}.bias", (segment.size,), (take,), bias)
            yield Weight(((piece,),))

    # ----------------------------------------------------------------------------------------------

    def _taps(self) -> Tensor:
        """fp32[K, C], the factor on the oldest input first."""
        return self.weight[:, 0].t().float()

    def _mix(self, window: Tensor) -> Tensor:
        """fp32[rows - K + 1, C]: row i is the sum over rows i .. i + K - 1 of `window`."""
        count = len(window) - self.kernel_size + 1
        mixed = torch.zeros(count, window.shape[1], dtype=torch.float32, device=window.device)
        for place, tap in enumerate(self._taps()):
            mixed.addcmul_(window[place : place + count].float(), tap)
        return mixed

    def _read(self, slots: SlotPass, like: Tensor) -> Tensor:
        """[B, K - 1, C] in the inputs' dtype."""
        parts = []
        for segment in self.segments:
            state = slots.read(CONV, self.layer, segment.name)
            parts.append(state.reshape(len(state), -1, self.kernel_size - 1))
        return torch.cat(parts, dim=1).transpose(1, 2).to(like.dtype)

    def _write(self, slots: SlotPass, last: Tensor) -> None:
        """last: [B, K - 1, C]."""
        width = self.kernel_size - 1
        for segment, part in zip(self.segments, torch.split(last, self.sizes, dim=2), strict=True):
            units = len(segment.channels) // segment.unit_size
            state = part.transpose(1, 2).reshape(len(part), units, segment.unit_size * width)
            slots.write(CONV, self.layer, segment.name, state)
