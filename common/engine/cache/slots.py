"""States of constant size, one per sequence: read before a pass, written after it.

A page of a slot group is one slot, and holds the state after all tokens that are computed: of a
recurrence, or the last inputs of a convolution. Knows nothing of the meaning of a state.

A sequence of a pass may leave its state in a slot that it did not read: the next one of the pass
goes on from it, and the layers hand it on themselves.

A slot is never cleared. A sequence that starts reads zeros in place of the last owner's state. A
sequence whose cache came from another server reads the transferred state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from common.engine.cache.cast import cast, raw
from common.engine.cache.kv_pool import KvPool
from common.engine.forward_batch import ForwardBatch
from common.engine.host_copy import upload
from common.layout.component import LiveKind


@dataclass(frozen=True, slots=True)
class SlotPlaces:
    """Where states lie, for a kernel that reads and writes them in place.

    states: [page, unit, element] of some segments. read, write: int64[B], the page that a sequence
    reads, and the one that it leaves its state in.
    """

    states: tuple[Tensor, ...]
    read: Tensor
    write: Tensor


class SlotPass:
    """The slots of one forward pass; what all layers share is prepared once.

    Row b of everything belongs to sequence b of the batch. Segments as `KvPool.plane` has them.
    """

    def __init__(self, batch: ForwardBatch, pool: KvPool) -> None:
        self._pool = pool
        is_new = [start == 0 for start in batch.start_list]
        self._is_any_new = any(is_new)
        self._is_all_new = all(is_new)
        self._starts = batch.starts
        self._slots: dict[int, Tensor] = {
            index: batch.page_tables[index][:, 0].to(torch.int64)
            for index, group in enumerate(pool.groups)
            if group.live.kind is LiveKind.SLOT
        }
        self._targets = self._slots
        if batch.state_pages:
            self._targets = {
                index: _replaced(slots, index, batch.state_pages)
                for index, slots in self._slots.items()
            }

    def read(self, component: str, layer: int, segment: str | None = None) -> Tensor:
        """The states before this pass, [B, unit, element] in the component's dtype.

        A copy: zeros for a sequence whose first token is computed in this pass.
        """
        states, group = self._states(component, layer, segment)
        slots = self._slots[group]
        if self._is_all_new:
            return states.new_zeros((len(slots), *states.shape[1:]))
        found = raw(states)[slots].view(states.dtype)
        if self._is_any_new:
            # Not a product with zero: what lies there may be NaN.
            raw(found).masked_fill_(self._is_new, 0)
        return found

    def in_place(
        self, component: str, layer: int, segments: Sequence[str | None]
    ) -> SlotPlaces | None:
        """None if a sequence starts in this pass, whose state is zeros, or if segments lie apart
        from each other."""
        found = [self._states(component, layer, segment) for segment in segments]
        groups = {group for _, group in found}
        if self._is_any_new or len(groups) > 1:
            return None
        (group,) = groups
        states = tuple(states for states, _ in found)
        return SlotPlaces(states, self._slots[group], self._targets[group])

    @cached_property
    def _is_new(self) -> Tensor:
        return (self._starts == 0)[:, None, None]

    def write(self, component: str, layer: int, segment: str | None, values: Tensor) -> None:
        """Keep the states after this pass: values[B, unit, element], cast to the component's dtype.

        No two rows go to one place.
        """
        states, group = self._states(component, layer, segment)
        slots = self._targets[group]
        assert values.shape == (len(slots), *states.shape[1:]), (values.shape, states.shape)
        raw(states).index_copy_(0, slots, raw(cast(values, states.dtype)))

    def _states(self, component: str, layer: int, segment: str | None) -> tuple[Tensor, int]:
        """(view [page, unit, element], the page group)."""
        plane = self._pool.plane(component, layer, segment)
        return plane.view[:, :, 0], plane.geometry.group


def _replaced(slots: Tensor, group: int, state_pages: Mapping[int, Sequence[int]]) -> Tensor:
    """int64[B]: where the states of a group go."""
    rows = np.array(list(state_pages), dtype=np.int64)
    pages = np.array([of_groups[group] for of_groups in state_pages.values()], dtype=np.int64)
    return slots.index_copy(0, *upload(slots.device, rows, pages))
