"""The small functions of a layer in one pass each, on a CPU, by the native module `_layers`.

In torch each is several passes over its rows, and a pass takes microseconds whatever it computes.
They round where torch's spelling rounds, but for heads that are turned, which are rounded once.
`choose_fused.py` compares them with torch first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.layers.fused import KnownParts
from common.engine.native_modules import DTYPE_NAMES, load_native


class CpuKernels(KnownParts):
    """As `FusedKernels`, in float32 too.

    Raises: RuntimeError if this processor lacks what they need.
    """

    name = "native"
    name_of_turning = "native"
    dtypes = tuple(DTYPE_NAMES)
    experts = None

    def __init__(self) -> None:
        super().__init__()
        self._native = load_native("_layers")

    def rms_norm(
        self,
        hidden: Tensor,
        weight: Tensor,
        epsilon: float,
        *,
        is_offset: bool = False,
        output: Tensor | None = None,
    ) -> Tensor:
        """See `FusedKernels`."""
        hidden = _rows(hidden)
        dense = torch.empty(hidden.shape, dtype=hidden.dtype)
        self._norm(hidden, None, dense, weight, epsilon, is_offset)
        return dense if output is None else output.copy_(dense)

    def add_rms_norm(
        self,
        hidden: Tensor,
        added: Tensor,
        weight: Tensor,
        epsilon: float,
        *,
        is_offset: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """See `FusedKernels`."""
        hidden, added = _rows(hidden), added.contiguous()
        self._norm(hidden, added, added, weight, epsilon, is_offset)
        return hidden, added

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """See `FusedKernels`; of any number of dimensions."""
        return self._gate(gate_up, is_gelu=False)

    def gated_gelu(self, gate_up: Tensor) -> Tensor:
        """See `FusedKernels`."""
        return self._gate(gate_up, is_gelu=True)

    def rotate(
        self, query: Tensor, key: Tensor, angles: Tensor, *, is_interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        """See `FusedKernels`."""
        return (
            self._turn(query, angles, None, is_interleaved=is_interleaved),
            self._turn(key, angles, None, is_interleaved=is_interleaved),
        )

    def rotate_in_place(
        self, query: Tensor, key: Tensor, angles: Tensor, *, is_interleaved: bool
    ) -> None:
        """See `FusedKernels`."""
        for heads in (query, key):
            heads.copy_(self._turn(heads, angles, None, is_interleaved=is_interleaved))

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
        """See `FusedKernels`."""
        return self._turn(heads, angles, weight, epsilon, is_interleaved, is_offset)

    def _norm(
        self,
        hidden: Tensor,
        added: Tensor | None,
        output: Tensor,
        weight: Tensor,
        epsilon: float,
        is_offset: bool,
    ) -> None:
        self._native.norm_rows(
            DTYPE_NAMES[hidden.dtype],
            hidden.data_ptr(),
            hidden.stride(0),
            0 if added is None else added.data_ptr(),
            output.data_ptr(),
            *hidden.shape,
            weight.data_ptr(),
            epsilon,
            is_offset,
        )

    def _gate(self, gate_up: Tensor, *, is_gelu: bool) -> Tensor:
        rows = _rows(gate_up.flatten(0, -2))
        count, size = len(rows), rows.shape[1] // 2
        output = torch.empty(*gate_up.shape[:-1], size, dtype=rows.dtype)
        self._native.gate_rows(
            DTYPE_NAMES[rows.dtype],
            rows.data_ptr(),
            rows.stride(0),
            output.data_ptr(),
            count,
            size,
            is_gelu,
        )
        return output

    def _turn(
        self,
        heads: Tensor,
        angles: Tensor,
        weight: Tensor | None,
        epsilon: float = 0.0,
        is_interleaved: bool = False,
        is_offset: bool = False,
    ) -> Tensor:
        assert heads.stride(-1) == 1, heads.stride()
        output = torch.empty(heads.shape, dtype=heads.dtype)
        self._native.turn_heads(
            DTYPE_NAMES[heads.dtype],
            heads.data_ptr(),
            output.data_ptr(),
            *heads.shape,
            heads.stride(0),
            heads.stride(1),
            0 if weight is None else weight.data_ptr(),
            epsilon,
            is_offset,
            angles.data_ptr(),
            angles.shape[1],
            is_interleaved,
        )
        return output


def _rows(hidden: Tensor) -> Tensor:
    """The same rows [T, size], each without gaps."""
    return hidden if hidden.stride(-1) == 1 else hidden.contiguous()
