"""Rotations of queries and keys as one kernel.

Spelled out they take four launches, and six for a pass to make their angles ready. Kernels read
cosines and sines in fp32 and round once. `choose_fused.py` compares it with the plain spelling for
every shape of heads that a model has; other heads are turned by the plain spelling.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from common.engine.layers.fused import NormedRotation, RotationShape
from common.engine.layers.fused_kinds import AnyKernels
from common.engine.layers.norm import QkNorm
from common.engine.layers.rotary import RotaryEmbedding, Rotation


class FusedRotation:
    """The angles of T tokens; stands where a `Rotation` would."""

    def __init__(self, rotary: RotaryEmbedding, positions: Tensor, fused: AnyKernels) -> None:
        """positions: int64[T]."""
        self._rotary = rotary
        self._positions = positions
        self._fused = fused

    def apply(self, heads: Tensor) -> Tensor:
        """See `Rotation`."""
        # The kernel wants keys as well: one head more is turned than is needed.
        return self.apply_both(heads, heads[:, :1])[0]

    def apply_both(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate two times [T, heads, head dim], of equal head dims."""
        if not self._is_known(query, key):
            return apply_both(self._spelled, query, key)
        return self._fused.rotate(
            query, key, self._table, is_interleaved=self._rotary.is_interleaved
        )

    def apply_in_place(self, query: Tensor, key: Tensor) -> None:
        """As `apply_both`, in the memory of both."""
        if self._is_known(query, key):
            self._fused.rotate_in_place(
                query, key, self._table, is_interleaved=self._rotary.is_interleaved
            )
        else:
            apply_in_place(self._spelled, query, key)

    def apply_normed(self, heads: Tensor, norm: QkNorm) -> Tensor | None:
        """Norm and rotate queries and keys [T, heads, head dim] in one launch; None if no kernel is
        known to do it."""
        wanted = NormedRotation(self._shape(heads), norm.is_offset)
        if wanted not in self._fused.normed_rotations or heads.stride(-1) != 1:
            return None
        return self._fused.norm_and_rotate(
            heads,
            norm.weight,
            norm.epsilon,
            self._table,
            is_interleaved=self._rotary.is_interleaved,
            is_offset=norm.is_offset,
        )

    def _is_known(self, query: Tensor, key: Tensor) -> bool:
        is_taken = query.stride(-1) == key.stride(-1) == 1
        return is_taken and self._shape(query) in self._fused.rotations

    @cached_property
    def _spelled(self) -> Rotation:
        return self._rotary.rotate(self._positions)

    def _shape(self, heads: Tensor) -> RotationShape:
        return RotationShape(
            heads.shape[-1], 2 * len(self._rotary.frequencies), self._rotary.is_interleaved
        )

    @cached_property
    def _table(self) -> Tensor:
        """fp32[T, rotated dim]: the cosines of each token, then its sines."""
        angles = self._positions[:, None] * self._rotary.frequencies
        half = angles.shape[1]
        table = angles.new_empty(len(angles), 2 * half)
        torch.cos(angles, out=table[:, :half])
        torch.sin(angles, out=table[:, half:])
        return table if self._rotary.scale == 1.0 else table.mul_(self._rotary.scale)


AnyRotation = Rotation | FusedRotation


def apply_both(rotation: AnyRotation, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [T, heads, head dim], rotated."""
    if isinstance(rotation, FusedRotation):
        return rotation.apply_both(query, key)
    return rotation.apply(query), rotation.apply(key)


def apply_in_place(rotation: AnyRotation, query: Tensor, key: Tensor) -> None:
    """As `apply_both`, in the memory of both."""
    if isinstance(rotation, FusedRotation):
        rotation.apply_in_place(query, key)
    else:
        query.copy_(rotation.apply(query))
        key.copy_(rotation.apply(key))


def apply_cut(rotation: AnyRotation, heads: Tensor, query_count: int) -> tuple[Tensor, Tensor]:
    """As `apply_both`, of heads [T, queries and keys, head dim] that lie side by side."""
    if isinstance(rotation, FusedRotation):
        return rotation.apply_both(heads[:, :query_count], heads[:, query_count:])
    turned = rotation.apply(heads)
    return turned[:, :query_count], turned[:, query_count:]
