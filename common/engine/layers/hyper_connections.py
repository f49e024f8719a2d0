"""Residuals of several parallel streams, mixed by weights that are computed from the streams.

What goes into a half of a layer is a weighted sum of the streams; what comes out is added to each
of them, while the streams themselves are mixed by a doubly stochastic matrix. All weights are
computed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.checkpoint.weights import Weight
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.norm import WideNorm, normalize


@dataclass(frozen=True, slots=True)
class StreamShape:
    """stream_count: S. rounds: normalisations of rows and columns. epsilon: keeps weights above 0.

    norm_epsilon: of the norm of all streams together.
    """

    hidden_size: int
    stream_count: int
    rounds: int
    epsilon: float
    norm_epsilon: float


@dataclass(frozen=True, slots=True)
class StreamMix:
    """How one half of a layer goes back into the streams of T tokens.

    post: fp32[T, S]. comb: fp32[T, S, S], [from, to].
    """

    post: Tensor
    comb: Tensor

    def close(self, output: Tensor, streams: Tensor) -> Tensor:
        """[T, S, hidden] of what the half made, [T, hidden], and of the streams before it."""
        dtype = streams.dtype
        mixed = torch.matmul(self.comb.to(dtype).transpose(-1, -2), streams)
        return self.post.to(dtype)[..., None] * output[:, None] + mixed


class HyperConnection:
    """Around one half of a layer. name: without ".fn"."""

    def __init__(self, context: LayerContext, name: str, shape: StreamShape) -> None:
        count = shape.stream_count
        self.name = name
        self.shape = shape
        self.project = context.empty_fp32((2 + count) * count, count * shape.hidden_size)
        self.base = context.empty_fp32((2 + count) * count)
        self.scale = context.empty_fp32(3)

    def open(self, streams: Tensor) -> tuple[Tensor, StreamMix]:
        """Input of the half layer, [T, hidden], mixed from the streams [T, S, hidden]."""
        count, epsilon = self.shape.stream_count, self.shape.epsilon
        sizes = (count, count, count * count)
        flat = normalize(streams.flatten(1).float(), self.shape.norm_epsilon)
        pre, post, comb = F.linear(flat, self.project).split_with_sizes(sizes, dim=-1)
        pre_base, post_base, comb_base = self.base.split_with_sizes(sizes)
        pre_scale, post_scale, comb_scale = self.scale.unbind()
        pre = torch.sigmoid(pre * pre_scale + pre_base) + epsilon
        post = 2 * torch.sigmoid(post * post_scale + post_base)
        comb = torch.softmax((comb * comb_scale + comb_base).view(-1, count, count), dim=-1)
        comb = _balance(comb + epsilon, self.shape.rounds, epsilon)
        return _collapse(pre, streams), StreamMix(post, comb)

    def weights(self) -> Iterator[Weight]:
        yield Weight.whole(f"{self.name}.fn", self.project)
        yield Weight.whole(f"{self.name}.base", self.base)
        yield Weight.whole(f"{self.name}.scale", self.scale)


class CollapsingNorm(WideNorm):
    """Behind the last layer: one weighted sum of the streams, and its norm.

    [T, S, hidden] to [T, hidden]. stream_name: of the weights of the sum.
    """

    def __init__(
        self, context: LayerContext, name: str, stream_name: str, shape: StreamShape
    ) -> None:
        super().__init__(context, name, shape.hidden_size, shape.norm_epsilon)
        count = shape.stream_count
        self.stream_name = stream_name
        self.shape = shape
        self.project = context.empty_fp32(count, count * shape.hidden_size)
        self.base = context.empty_fp32(count)
        self.scale = context.empty_fp32(1)

    def __call__(self, hidden: Tensor) -> Tensor:
        flat = normalize(hidden.flatten(1).float(), self.shape.norm_epsilon)
        pre = torch.sigmoid(F.linear(flat, self.project) * self.scale + self.base)
        return super().__call__(_collapse(pre + self.shape.epsilon, hidden))

    def weights(self) -> Iterator[Weight]:
        yield from super().weights()
        yield Weight.whole(f"{self.stream_name}.hc_fn", self.project)
        yield Weight.whole(f"{self.stream_name}.hc_base", self.base)
        yield Weight.whole(f"{self.stream_name}.hc_scale", self.scale)


def _collapse(weights: Tensor, streams: Tensor) -> Tensor:
    """sum_i w_i x_i, [T, hidden], of fp32[T, S] and [T, S, hidden]."""
    return (weights[..., None] * streams).sum(dim=1).to(streams.dtype)


def _balance(comb: Tensor, rounds: int, epsilon: float) -> Tensor:
    """Sinkhorn-Knopp: rows and columns [.., from, to] that sum up to 1, columns last."""
    comb = comb / comb.sum(dim=-2, keepdim=True).add_(epsilon)
    for _ in range(rounds - 1):
        comb.div_(comb.sum(dim=-1, keepdim=True).add_(epsilon))
        comb.div_(comb.sum(dim=-2, keepdim=True).add_(epsilon))
    return comb
