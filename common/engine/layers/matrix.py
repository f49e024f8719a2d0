"""Products with one weight, which is packed once it is loaded, if a library has a better order.

oneDNN arranges a weight anew for every product, unless it is given one that it has arranged before:
for few tokens that is most of the time. The products are the same, bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_DTYPES = (torch.bfloat16,)


class Matrix:
    """y = x W^T + b. rows: W [outputs, inputs], to be filled by the loader.

    keeps_rows: whether somebody reads the rows after that, who then pays for both orders.
    """

    def __init__(self, rows: Tensor) -> None:
        self.keeps_rows = False
        self._rows: Tensor | None = rows
        self._packed: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        assert self._rows is not None, "the rows were given up when they were packed"
        return self._rows

    def pack(self) -> None:
        """The rows are filled, and are not written any more."""
        rows = self.rows
        if not is_packable(rows):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(rows)
        if not self.keeps_rows:
            self._rows = None

    def __call__(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._packed is None:
            return F.linear(inputs, self.rows, bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self._packed, bias, "none", [], ""
        )
        return product


def is_packable(rows: Tensor) -> bool:
    """Whether oneDNN multiplies by such a weight here, and nothing is empty."""
    return (
        rows.device.type == "cpu"
        and rows.dtype in PACKED_DTYPES
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and rows.numel() > 0
    )
