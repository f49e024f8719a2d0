"""Products with one weight, in whichever form it is fastest to multiply by.

A weight's rows are packed once they are filled, if a library has a better order: oneDNN arranges a
weight anew for every product, unless it is given one that it has arranged before; for few tokens
that is most of the time. The products are the same, bit for bit. A processor that has no products
of bfloat16 is given float32, made for one product at a time. A quantised weight may stay as small
as it is stored instead, if a kernel multiplies by that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.checkpoint.codes import Codes, join_rows
from common.engine.layers.narrow import NarrowProduct, NarrowWeights, choose_narrow
from common.engine.widened import multiplies_bfloat16, multiply_widened


class Matrix:
    """y = x W^T + b. rows: W [outputs, inputs], to be filled by the loader.

    keeps_rows: whether another layer reads the rows after that; then both orders stay in memory.
    narrow: what may stay as it is stored. Rows on the meta device have no memory on `device` until
    they are written: those of a weight that stays narrow never are.
    """

    def __init__(
        self,
        rows: Tensor,
        narrow: NarrowWeights = NarrowWeights.WIDE,
        device: torch.device | None = None,
    ) -> None:
        self.keeps_rows = False
        self.device = device or rows.device
        self._narrow = narrow
        self._rows: Tensor | None = rows
        self._product: PackedProduct | WidenedProduct | NarrowProduct | None = None

    @property
    def rows(self) -> Tensor:
        assert self._rows is not None, "the rows were given up for another form"
        return self._rows

    def keep(self, parts: Sequence[Codes]) -> bool:
        """Take the weight as it is stored, part below part; False if it must be made wide."""
        rows = self.rows
        codes = join_rows(parts)
        is_whole = sum(len(part.values) for part in parts) == len(rows)
        if codes is None or not is_whole or self.keeps_rows or rows.dtype != torch.bfloat16:
            return False
        self._product = choose_narrow(codes, self._narrow)
        if self._product is not None:
            self._rows = None
        return self._product is not None

    def room(self, view: Tensor) -> Tensor:
        """The memory of a view of the rows, to be written."""
        if self.rows.is_meta:
            self._rows = memory_for(self.rows, self.device)
        if not view.is_meta:
            return view
        return self.rows.as_strided(view.shape, view.stride(), view.storage_offset())

    def pack(self) -> None:
        """The rows are filled, and are not written any more."""
        if self._product is not None or not is_packable(self.rows):
            return
        kind = PackedProduct if multiplies_bfloat16() else WidenedProduct
        self._product = kind(self.rows)
        if not self.keeps_rows:
            self._rows = None

    def __call__(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._product is None:
            return F.linear(inputs, self.rows, bias)
        return self._product(inputs, bias)

    @property
    def forms(self) -> list[tuple[str, int]]:
        """(elements and kernel, bytes) of what is multiplied by."""
        if self._product is not None:
            return [(self._product.name, self._product.nbytes)]
        return [(f"{str(self.rows.dtype).removeprefix('torch.')}, aten::linear", self.rows.nbytes)]


class PackedProduct:
    """oneDNN's own order of a weight."""

    name = "bfloat16, mkldnn::_linear_pointwise"

    def __init__(self, rows: Tensor) -> None:
        self.nbytes = rows.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(rows)

    def __call__(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self._packed, bias, "none", [], ""
        )
        return product


class WidenedProduct:
    """The rows as they are, for a processor without products of bfloat16; see `widened.py`."""

    name = "bfloat16, float32 for one product"

    def __init__(self, rows: Tensor) -> None:
        self.nbytes = rows.nbytes
        self._rows = rows

    def __call__(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        return multiply_widened(inputs, self._rows, bias)


def memory_for(rows: Tensor, device: torch.device) -> Tensor:
    """Of a tensor on the meta device. Not empty_like: that imports sympy, a third of a second."""
    return torch.empty(rows.shape, dtype=rows.dtype, device=device)


def is_packable(rows: Tensor) -> bool:
    """Whether there is a better way than torch's to multiply by such a weight on a CPU."""
    return (
        rows.device.type == "cpu"
        and rows.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and rows.numel() > 0
    )


class Multiplied(Protocol):
    """A weight, or a stack of them."""

    def pack(self) -> None:
        """It is filled, and is not written any more."""

    @property
    def forms(self) -> list[tuple[str, int]]: ...


def describe_matrices(matrices: Iterable[Multiplied]) -> str:
    """How many weights, and how large, are multiplied in which form, by which kernel."""
    forms: dict[str, tuple[int, int]] = {}
    for name, nbytes in (form for matrix in matrices for form in matrix.forms):
        count, sum_nbytes = forms.get(name, (0, 0))
        forms[name] = (count + 1, sum_nbytes + nbytes)
    lines = [f"{name}: {count} weights, {size} bytes" for name, (count, size) in forms.items()]
    return "; ".join(sorted(lines))
