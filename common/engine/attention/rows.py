"""Cached rows of some sequences, read whole or by item, for rows that all heads share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.engine.cache.kv_pool import GatherIndex, Geometry, Plane, Scratch, gather_index


@dataclass(frozen=True, slots=True)
class Rows:
    """Pages of some sequences, and the indexes made of them when they are first needed.

    page_table: int64[B, pages]. is_token: bool[B, items], False where nothing of the sequence is;
    None if items behind the last token are cut off by the reader.
    """

    page_table: Tensor
    is_token: Tensor | None
    indexes: dict[Geometry, GatherIndex] = field(default_factory=dict)
    blanks: list[tuple[Tensor, ...]] = field(default_factory=list)

    def read(self, plane: Plane, scratch: Scratch, dtype: torch.dtype) -> Tensor:
        """[B, items, row dim], zero where no token is: a page's last owner may have left values
        there that are not finite, and a weight of 0 times NaN is NaN."""
        geometry = plane.geometry
        if geometry not in self.indexes:
            self.indexes[geometry] = gather_index(geometry, self.page_table)
        gathered = plane.gather(self.indexes[geometry], scratch)[:, 0]
        if self.is_token is not None:
            self._clear(gathered, self.is_token)
        return plane.widen(gathered, dtype)

    def _clear(self, gathered: Tensor, is_token: Tensor) -> None:
        """Set to zero what is of no token. Few items are: on a CPU to go to them takes a tenth of
        the time of looking at all, a GPU would have to wait for their number."""
        if gathered.device.type != "cpu":
            gathered.masked_fill_(~is_token[:, :, None], 0)
            return
        if not self.blanks:
            self.blanks.append((~is_token).nonzero(as_tuple=True))
        gathered[self.blanks[0]] = 0

    def pick(self, plane: Plane, items: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, k, row dim] of single items int64[B, k]."""
        page_items = plane.geometry.page_items
        page_index = torch.div(items, page_items, rounding_mode="floor")
        picked = plane.pick(self.page_table.gather(1, page_index), items - page_index * page_items)
        return plane.widen(picked[:, :, 0], dtype)


@dataclass(frozen=True, slots=True)
class Picks:
    """Chosen items of B sequences.

    items: int64[B, k], of each sequence, in order. is_picked: bool[B, k], False for filling.
    """

    items: Tensor
    is_picked: Tensor


def picks_of(is_chosen: Tensor, count: int) -> Picks:
    """The chosen items of bool[B, items], at most `count` in a row."""
    numbers = is_chosen.cumsum(-1)
    # Chosen items move to the front in their order; the others all fall into the last column.
    columns = torch.where(is_chosen, numbers - 1, count)
    places = torch.arange(is_chosen.shape[1], device=is_chosen.device)
    items = torch.zeros(len(is_chosen), count + 1, dtype=torch.int64, device=is_chosen.device)
    items.scatter_(1, columns, places.expand_as(columns))
    return Picks(items[:, :count], places[:count] < numbers[:, -1:])
