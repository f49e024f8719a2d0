"""The contract of an attention backend, and the writing of new keys and values that all share.

Knows nothing of models: a layer is a number, heads are whatever the rank holds of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from common.engine.cache.kv_pool import Geometry, KvPool, WriteIndex, write_index
from common.engine.forward_batch import ForwardBatch, HostRows

KEY = "k"
VALUE = "v"


class AttentionPass(Protocol):
    """The attention of one forward pass; what all layers share is prepared once."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append the new tokens' keys and values to the cache and attend to all of it, causally.

        layer: global id. query: [T, query heads, head dim]; key, value: [T, KV heads, head dim].
        Query head h reads KV head h // (query heads / KV heads). Scores are scaled by
        head dim ** -0.5.
        Returns: [T, query heads, head dim] in the dtype of `query`.
        """
        ...


class Attention(Protocol):
    """An attention backend. name: for logs and /server_info."""

    @property
    def name(self) -> str: ...

    def start(self, batch: ForwardBatch, pool: KvPool) -> AttentionPass:
        """Prepare one forward pass over `batch`, whose cache lies in `pool`."""
        ...


class RecordableAttention(Attention, Protocol):
    """A backend that can decode in a recording (`graphs/decode_graphs.py`)."""

    def reserve(self, batch_sizes: Sequence[int], page_max: int) -> None:
        """Memory for recordings of these sizes; page_max: pages of a sequence at most."""
        ...

    def plan_recorded(self, rows: HostRows, pool: KvPool) -> None:
        """Prepare on the host what the recording of this size is to do next.

        rows: as many as one of the sizes reserved.
        """
        ...

    def start_recorded(self, batch: ForwardBatch, pool: KvPool) -> AttentionPass:
        """As `start`, after `plan_recorded` and while it is recorded: what depends on lengths and
        on page tables is in memory that stays. batch: has no tables of pages that grow in number
        with the tokens."""
        ...


class CacheWriter:
    """Writes new rows of any component and layer; indexes are computed once per geometry."""

    def __init__(self, batch: ForwardBatch, pool: KvPool) -> None:
        self._batch = batch
        self._pool = pool
        self._indexes: dict[Geometry, WriteIndex] = {}

    def write(self, component: str, layer: int, values: Tensor) -> None:
        """values: [T, unit, element], rows in the order of the batch's tokens."""
        plane = self._pool.plane(component, layer)
        index = self._indexes.get(plane.geometry)
        if index is None:
            group = plane.geometry.group
            index = write_index(
                plane.geometry, self._batch.token_pages[group], self._batch.token_rows[group]
            )
            self._indexes[plane.geometry] = index
        plane.write(index, values)
