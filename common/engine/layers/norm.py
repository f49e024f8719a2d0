"""RMSNorm in its spellings: normalised in fp32, then cast to the model dtype and scaled, or scaled
in fp32 too and cast last, by a weight or by an offset from one. And LayerNorm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.checkpoint.weights import TensorSlice, Weight
from common.engine.layers.fused_kinds import AnyKernels
from common.engine.layers.gated_norm_fla import GatedNormShape, choose_gated_norm
from common.engine.layers.layer_context import LayerContext


def normalize(hidden: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) over the last dimension, computed in fp32, in the dtype of `hidden`."""
    if hidden.dtype == torch.float32 or not hidden.is_cpu:
        # There it is one kernel, which computes in fp32 whatever comes and goes.
        return F.rms_norm(hidden, (hidden.shape[-1],), None, epsilon)
    wide = hidden.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(hidden.dtype)


class RmsNorm:
    """x / rms(x) * w. has_kernel: whether a spelling computes just that, and may be fused.
    is_offset: whether weights are offsets from one."""

    has_kernel: ClassVar[bool] = True
    is_offset: ClassVar[bool] = False

    def __init__(self, context: LayerContext, name: str, size: int, epsilon: float) -> None:
        self.name = name
        self.epsilon = epsilon
        self.weight = context.empty(size)
        self.fused = context.fused if self.has_kernel else None

    def __call__(self, hidden: Tensor) -> Tensor:
        if (fused := self.fused_for(hidden)) is not None:
            return fused.rms_norm(hidden, self.weight, self.epsilon, is_offset=self.is_offset)
        if hidden.dtype == torch.float32:
            return F.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.epsilon)
        return self.weight * normalize(hidden, self.epsilon)

    def in_place(self, rows: Tensor) -> None:
        """The same of rows [T, size], which may lie apart, in their memory."""
        if (fused := self.fused_for(rows)) is not None:
            fused.rms_norm(rows, self.weight, self.epsilon, is_offset=self.is_offset, output=rows)
        else:
            rows.copy_(self(rows))

    def after_add(self, hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """(the sum of both [T, size], its norm); neither may be used afterwards."""
        if (fused := self.fused_for(hidden, added)) is not None:
            return fused.add_rms_norm(
                hidden, added, self.weight, self.epsilon, is_offset=self.is_offset
            )
        total = hidden + added
        return total, self(total)

    def fused_for(self, *rows: Tensor) -> AnyKernels | None:
        """The kernels if they take such rows: of two dimensions and in the weight's dtype."""
        if self.fused is None or (self.is_offset and not self.fused.has_offset_norms):
            return None
        is_taken = all(part.dim() == 2 and part.dtype == self.weight.dtype for part in rows)
        return self.fused if is_taken else None

    def weights(self) -> Iterator[Weight]:
        yield Weight.whole(f"{self.name}.weight", self.weight)


class WideNorm(RmsNorm):
    """x / rms(x) * w, all of it in fp32, cast last; the weight is kept in fp32."""

    has_kernel = False

    def __init__(self, context: LayerContext, name: str, size: int, epsilon: float) -> None:
        super().__init__(context, name, size, epsilon)
        self.weight = context.empty_fp32(size)

    def __call__(self, hidden: Tensor) -> Tensor:
        wide = F.rms_norm(hidden.float(), (hidden.shape[-1],), self.weight, self.epsilon)
        return wide.to(hidden.dtype)


class OffsetNorm(RmsNorm):
    """x / rms(x) * (1 + w), all of it in fp32, cast last."""

    is_offset = True

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.fused_for(hidden) is not None:
            return super().__call__(hidden)
        return (normalize(hidden.float(), self.epsilon) * (1.0 + self.weight.float())).to(
            hidden.dtype
        )


class GatedNorm(RmsNorm):
    """x / rms(x) * w, then times silu(gate), which is fp32."""

    def __init__(self, context: LayerContext, name: str, size: int, epsilon: float) -> None:
        super().__init__(context, name, size, epsilon)
        self.kernel = choose_gated_norm(GatedNormShape(size, context.dtype, context.device)).kernel

    def gated(self, hidden: Tensor, gate: Tensor) -> Tensor:
        """Both [.., size]; the norm comes first."""
        if self.kernel is not None:
            return self.kernel(hidden, gate, self.weight, self.epsilon)
        return (self(hidden) * F.silu(gate.float())).to(hidden.dtype)


class SigmoidGatedNorm(WideNorm):
    """x / rms(x) * w * sigmoid(gate), all of it in fp32, cast last."""

    def gated(self, hidden: Tensor, gate: Tensor) -> Tensor:
        """Both [.., size]; the norm comes first."""
        return (self(hidden.float()) * gate.float().sigmoid()).to(hidden.dtype)


class LayerNorm:
    """(x - mean) / deviation * w + b over the last dimension."""

    def __init__(self, context: LayerContext, name: str, size: int, epsilon: float) -> None:
        self.name = name
        self.epsilon = epsilon
        self.weight = context.empty(size)
        self.bias = context.empty(size)

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.epsilon)

    def weights(self) -> Iterator[Weight]:
        yield Weight.whole(f"{self.name}.weight", self.weight)
        yield Weight.whole(f"{self.name}.bias", self.bias)


class QkNorm:
    """RMSNorm over each head's dimension, of query and key heads in one go.

    Input and output [T, query heads + KV heads, head dim]; all query heads share one weight, and
    all KV heads another. is_offset: whether weights are offsets from one.
    """

    is_offset: ClassVar[bool] = False

    def __init__(
        self,
        context: LayerContext,
        name: str,
        *,
        head_count: int,
        kv_head_count: int,
        head_dim: int,
        epsilon: float,
    ) -> None:
        self.name = name
        self.epsilon = epsilon
        self.head_count = head_count
        self.weight = context.empty(head_count + kv_head_count, head_dim)

    def __call__(self, heads: Tensor) -> Tensor:
        return self.weight * normalize(heads, self.epsilon)

    def weights(self) -> Iterator[Weight]:
        for part, target in (
            ("q_norm", self.weight[: self.head_count]),
            ("k_norm", self.weight[self.head_count :]),
        ):
            shape = (self.weight.shape[1],)
            yield Weight(
                ((TensorSlice(f"{self.name}.{part}.weight", shape, (slice(None),), target),),)
            )


class OffsetQkNorm(QkNorm):
    """`QkNorm` as `OffsetNorm` spells it."""

    is_offset = True

    def __call__(self, heads: Tensor) -> Tensor:
        return (normalize(heads.float(), self.epsilon) * (1.0 + self.weight.float())).to(
            heads.dtype
        )
