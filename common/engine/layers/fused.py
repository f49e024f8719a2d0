"""The small functions of a layer as one kernel each, by FlashInfer on CUDA.

Spelled out in torch they take two to five kernels, each of which takes microseconds whatever it
computes: the part of a decode pass that does not read weights. The library is imported when this is
made; `choose_fused.py` compares it with plain torch first. Written against the sources of
FlashInfer 0.6.18 and 0.7.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.ascending import Ascending
from common.engine.layers.fused_experts import ExpertKernels

ROTATED_HEAD_DIMS = (64, 128, 256, 512)
"""Of other heads, the library takes another kernel."""


@dataclass(frozen=True, slots=True)
class RotationShape:
    """Heads of one size, whose first `rotated_dim` channels are turned."""

    head_dim: int
    rotated_dim: int
    is_interleaved: bool


@dataclass(frozen=True, slots=True)
class NormedRotation:
    """Heads that are normed each, and then turned. is_offset: see `QkNorm`."""

    rotation: RotationShape
    is_offset: bool


class KnownParts:
    """What kernels are known to be right about. rotations: shapes of heads that are turned;
    normed_rotations: those that are normed as well. has_offset_norms: whether norms by offsets
    are."""

    def __init__(self) -> None:
        self.rotations: set[RotationShape] = set()
        self.normed_rotations: set[NormedRotation] = set()
        self.has_offset_norms = False

    def forget_offset_norms(self) -> None:
        self.has_offset_norms = False


class FusedKernels(KnownParts):
    """Raises ImportError if the library is not installed. All tensors in one dtype of two bytes.

    Kernels can't be launched for nothing, so no rows are answered without one.
    """

    name = "flashinfer"
    name_of_turning = "triton"
    """Of what norms and rotates in one."""
    dtypes = (torch.float16, torch.bfloat16)

    def __init__(self) -> None:
        from flashinfer import activation, norm, rope

        super().__init__()
        self._rms_norm: Callable[[Tensor, Tensor, float, Tensor], Tensor] = norm.rmsnorm
        self._add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], None] = norm.fused_add_rmsnorm
        self._offset_rms_norm: Callable[[Tensor, Tensor, float, Tensor], Tensor] = (
            norm.gemma_rmsnorm
        )
        self._add_offset_rms_norm: Callable[[Tensor, Tensor, Tensor, float], None] = (
            norm.gemma_fused_add_rmsnorm
        )
        self._gated_silu: Callable[[Tensor], Tensor] = activation.silu_and_mul
        self._gated_gelu: Callable[[Tensor], Tensor] = activation.gelu_tanh_and_mul

        self._rotate: Callable[..., tuple[Tensor, Tensor]] = rope.apply_rope_with_cos_sin_cache
        self._rotate_in_place: Callable[..., None] = rope.apply_rope_with_cos_sin_cache_inplace
        self._ascending: dict[torch.device, Ascending] = {}
        self.experts = ExpertKernels()

    def rms_norm(
        self,
        hidden: Tensor,
        weight: Tensor,
        epsilon: float,
        *,
        is_offset: bool = False,
        output: Tensor | None = None,
    ) -> Tensor:
        """x / rms(x) * w over the last of two dimensions. is_offset: times 1 + w. output: rows to
        write to, which may be the input's; None for new ones."""
        if output is None:
            output = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        if hidden.shape[0]:
            norm = self._offset_rms_norm if is_offset else self._rms_norm
            norm(_aligned(hidden), weight, epsilon, output)
        return output

    def add_rms_norm(
        self,
        hidden: Tensor,
        added: Tensor,
        weight: Tensor,
        epsilon: float,
        *,
        is_offset: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(sum, norm of the sum), in the memory of `hidden` and `added` if that has no gaps."""
        if hidden.shape[0] == 0:
            return hidden, added
        hidden, added = hidden.contiguous(), added.contiguous()
        add_norm = self._add_offset_rms_norm if is_offset else self._add_rms_norm
        add_norm(added, hidden, weight, epsilon)
        return hidden, added

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [T, 2 n], the gate in the first half."""
        return self._gated_silu(gate_up)

    def gated_gelu(self, gate_up: Tensor) -> Tensor:
        """gelu(gate) * up, GELU in its tanh form."""
        return self._gated_gelu(gate_up)

    def rotate(
        self, query: Tensor, key: Tensor, angles: Tensor, *, is_interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        """Two times [T, heads, head dim], rotated by fp32[T, rotated dim] of cosines and sines."""
        places, dim = self._places(query), query.shape[-1]
        turned = self._rotate(places, query, key, dim, angles, is_neox=not is_interleaved)
        return turned[0].view(query.shape), turned[1].view(key.shape)

    def rotate_in_place(
        self, query: Tensor, key: Tensor, angles: Tensor, *, is_interleaved: bool
    ) -> None:
        """As `rotate`, in the memory of both."""
        places, dim = self._places(query), query.shape[-1]
        self._rotate_in_place(places, query, key, dim, angles, is_neox=not is_interleaved)

    def _places(self, query: Tensor) -> Tensor:
        """Where each token's angles are: int32[T]."""
        device = query.device
        if device not in self._ascending:
            self._ascending[device] = Ascending(device)
        return self._ascending[device].first(len(query))

    def norm_and_rotate(
        self,
        heads: Tensor,
        weight: Tensor,
        epsilon: float,
        angles: Tensor,
        *,
        is_interleaved: bool,
        is_offset: bool,
    ) -> Tensor:
        """[T, heads, head dim], each normed by its row of weight [heads, head dim], then turned as
        `rotate` does; by Triton."""
        from common.engine.layers.triton_rotation import norm_and_rotate

        return norm_and_rotate(
            heads, weight, epsilon, angles, is_interleaved=is_interleaved, is_offset=is_offset
        )


def _aligned(rows: Tensor) -> Tensor:
    """The same rows [T, size], each where a kernel can read 16 bytes at a time."""
    step = 16 // rows.element_size()
    is_taken = (
        rows.stride(1) == 1 and not rows.stride(0) % step and not rows.storage_offset() % step
    )
    return rows if is_taken else rows.contiguous()
