"""Products with the weights of all experts of a layer, in whichever form they are kept.

Wide weights are one tensor. Quantised ones may stay as small as they are stored: by a kernel of a
CPU, expert by expert, or made wide just before a product (`stored_experts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.engine.checkpoint.codes import Codes, join_rows
from common.engine.layers.expert_groups import BY_ROW_NBYTES, BY_ROW_SHARE, ExpertGroups
from common.engine.layers.matrix import memory_for
from common.engine.layers.narrow import NarrowProduct, NarrowWeights, choose_narrow
from common.engine.layers.stored_experts import Scratch, StoredExperts
from common.engine.widened import is_widened, linear

HOST_ASKS = ("cpu",)
"""Devices that the host may ask, in the middle of a pass, how many rows each expert has."""


class ExpertMatrix:
    """y = x W^T, W of each row's expert. rows: W [experts, outputs, inputs], to be filled by the
    loader.

    narrow: what may stay as it is stored. Rows on the meta device have no memory on `device` until
    they are written: those of weights that stay narrow never are.
    """

    def __init__(
        self, rows: Tensor, narrow: NarrowWeights, device: torch.device, scratch: Scratch
    ) -> None:
        self.device = device
        self._narrow = narrow
        self._scratch = scratch
        self._rows: Tensor | None = rows
        self._shape = tuple(rows.shape)
        self._dtype = rows.dtype
        self._products: dict[int, NarrowProduct] = {}
        self._stored: StoredExperts | None = None
        self._is_taken = False
        self.stack = ExpertRows(self, range(self._shape[0]))
        self.experts = [ExpertRows(self, range(e, e + 1)) for e in range(self._shape[0])]

    @property
    def rows(self) -> Tensor:
        assert self._rows is not None, "the rows were given up for another form"
        return self._rows

    def keep(self, expert: int, codes: Codes) -> bool:
        """Take one expert's weight as it is stored; False if it must be made wide."""
        if codes.values.shape != self._shape[1:] or not codes.values.numel():
            return False
        if self._asks and self._dtype == torch.bfloat16 and self._stored is None:
            product = choose_narrow(codes, self._narrow)
            if product is not None:
                self._products[expert] = product
                return True
        if self._products or not self._may_be_stored or not self.rows.is_meta:
            return False
        stored = self._stored = self._stored or StoredExperts(self._shape[0], codes)
        if not stored.put(expert, codes):
            return False
        if stored.is_whole:
            self._rows = None
        return True

    @property
    def stored(self) -> StoredExperts | None:
        """All weights, if they stay as they are stored."""
        return None if self._rows is not None else self._stored

    def take(self, way: str) -> None:
        """Products are made by a kernel that reads the stored weights. way: how, in words."""
        assert self._stored is not None
        self._stored.way, self._is_taken = way, True

    def room(self, view: Tensor) -> Tensor:
        """The memory of a view of the rows, to be written."""
        if self.rows.is_meta:
            self._rows = memory_for(self.rows, self.device)
            if self._stored is not None:
                # Experts of other forms: all are wide.
                for expert in self._stored.kept:
                    self._stored.widen_one(self._rows[expert], expert)
                self._stored = None
        if not view.is_meta:
            return view
        return self.rows.as_strided(view.shape, view.stride(), view.storage_offset())

    def pack(self) -> None:
        """All are filled, and are not written any more."""
        if len(self._products) == self._shape[0]:
            self._rows = None
        if self.stored is not None and not self._is_taken:
            count = 1 if self._asks else self._shape[0]
            element_count = count * self._shape[1] * self._shape[2]
            self._scratch.reserve(element_count, self._dtype, self.device)

    def multiply(self, groups: ExpertGroups, inputs: Tensor) -> Tensor:
        """inputs [n, in] in the order of their experts, times each one's weight: [n, out]."""
        is_one_by_one = self._asks and (self._stored is not None or is_widened(inputs))
        if self._products or is_one_by_one:
            return self._multiply_by_expert(groups, inputs)
        if self._stored is None:
            return groups.multiply(inputs, self.rows)
        return self.multiply_widened(groups, inputs)

    def multiply_widened(self, groups: ExpertGroups, inputs: Tensor) -> Tensor:
        """As `multiply`, without asking the device which experts have rows."""
        assert self._stored is not None
        if BY_ROW_SHARE * len(inputs) >= self._shape[0]:
            wide = self._stored.widen(self._scratch.view(*self._shape))
            return groups.multiply(inputs, wide)
        # Fewer rows than experts: only the weights of theirs, each row's on its own.
        _, outputs, width = self._shape
        step = max(1, BY_ROW_NBYTES // (outputs * width * inputs.element_size()))
        parts = []
        for first in range(0, len(inputs), step):
            rows, experts = (t[first : first + step] for t in (inputs, groups.experts))
            wide = self._stored.widen(self._scratch.view(len(rows), outputs, width), experts)
            parts.append(torch.bmm(rows[:, None], wide.transpose(1, 2)))
        return torch.cat(parts)[:, 0]

    @property
    def forms(self) -> list[tuple[str, int]]:
        """(elements and kernel, bytes) of what is multiplied by."""
        found = [(f"experts of {p.name}", p.nbytes) for p in self._products.values()]
        if self._stored is not None:
            return [(f"experts of {self._stored.name}", self._stored.nbytes)]
        if len(found) == self._shape[0]:
            return [(found[0][0], sum(nbytes for _, nbytes in found))]
        name = str(self._dtype).removeprefix("torch.")
        return [*found, (f"experts of {name}, aten::_grouped_mm", self.rows.nbytes)]

    # ----------------------------------------------------------------------------------------------

    @property
    def _asks(self) -> bool:
        return self.device.type in HOST_ASKS

    @property
    def _may_be_stored(self) -> bool:
        """It is slower than wide; on a card, whether a model fits counts more than that."""
        return self._narrow == NarrowWeights.NARROW or (
            self._narrow == NarrowWeights.AUTO and not self._asks
        )

    def _multiply_by_expert(self, groups: ExpertGroups, inputs: Tensor) -> Tensor:
        """As `multiply`, expert by expert: asks the device for the ends."""
        outputs = inputs.new_empty(len(inputs), self._shape[1])
        first = 0
        for expert, end in enumerate(groups.ends.tolist()):
            if first < end:
                outputs[first:end] = self._multiply_one(expert, inputs[first:end])
            first = end
        return outputs

    def _multiply_one(self, expert: int, inputs: Tensor) -> Tensor:
        if expert in self._products:
            return self._products[expert](inputs, None)
        if self._stored is None:
            return linear(inputs, self.rows[expert])
        wide = self._stored.widen_one(self._scratch.view(*self._shape[1:]), expert)
        return linear(inputs, wide)


class ExpertRows:
    """What may keep the weights of some experts as they are stored. See `CodesKeeper`."""

    def __init__(self, matrix: ExpertMatrix, experts: range) -> None:
        self._matrix = matrix
        self._experts = experts

    def keep(self, parts: Sequence[Codes]) -> bool:
        codes = join_rows(parts)
        if codes is None:
            return False
        is_stack = codes.values.dim() == 3
        each = [codes.of_expert(i) if is_stack else codes for i in range(len(self._experts))]
        return all(self._matrix.keep(*pair) for pair in zip(self._experts, each, strict=True))

    def room(self, view: Tensor) -> Tensor:
        return self._matrix.room(view)

    @property
    def device(self) -> torch.device:
        return self._matrix.device
