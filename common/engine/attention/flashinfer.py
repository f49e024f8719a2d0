"""Attention on CUDA by FlashInfer, straight over the strided envelopes [page, head, token, dim].

Nothing is gathered or copied; new keys and values are written by one kernel. The library is
imported when the backend is made, never before. `choose.py` first checks every kind of layer
against SDPA; kinds that FlashInfer can't compute go to SDPA in the same pass. The kernels need
equal strides of keys and values, which an envelope has.
Needs a CUDA device; without one, tests replace the compiled kernels (`tests/kernel_packages`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from common.engine.attention.attention import KEY, VALUE
from common.engine.attention.cache_kinds import kind_of, kinds_of_pool
from common.engine.attention.flashinfer_kernels import (
    Append,
    FixedMemory,
    Kernel,
    Kernels,
    Places,
    Shapes,
)
from common.engine.attention.kinds import AttentionKind
from common.engine.attention.page_runs import HostRuns, PageRuns, page_runs
from common.engine.attention.scores import PLAIN, ScoreRule
from common.engine.attention.sdpa import SdpaPass
from common.engine.cache.cast import cast
from common.engine.cache.kv_pool import KvPool, Scratch
from common.engine.forward_batch import ForwardBatch, HostRows

# Scratch for the partial outputs of split keys. A plan that does not fit raises: FA2 may ask for
# heads * (2 * SMs / KV heads) tiles of 128 rows in fp32, on an H200 with 64 heads, 8 KV heads and
# dim 128 that is 138 MB, more than the 128 MiB that FlashInfer's documentation recommends.
WORKSPACE_NBYTES = 384 * 1024 * 1024
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16)
SUPPORTED_CACHE_DTYPES = (torch.float8_e4m3fn,)
"""Beside that of the queries; a scale of 1.0 is what the kernels take where none is given."""
SUPPORTED_HEAD_DIMS = (64, 128, 256, 512)


class FlashInferAttention:
    """See `Attention`. Raises ImportError if the library is not installed.

    kinds: of the layers that it may be used for. Passes can be recorded if those are all of the
    model's; see `RecordableAttention`. cache_dtype: None for `dtype`.

    A pass plans once per page group and kind, when the first such layer attends. A plan is made on
    the host and copied from pinned memory of the kernel; the next one waits for that copy alone,
    which is done as soon as what was launched before it. Recordings are planned beforehand, all
    kinds at once, into memory that they know: `reserve`, then `plan_recorded` before each replay.
    """

    name = "flashinfer"

    def __init__(
        self,
        kinds: Collection[AttentionKind],
        *,
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.kinds = frozenset(kinds)
        self._dtypes = (dtype, cache_dtype or dtype)
        self._device = device
        self._make = Kernels(device, *self._dtypes, WORKSPACE_NBYTES)
        self._scratch = (Scratch(), Scratch())
        self._decodes: dict[AttentionKind, _Planned] = {}
        self._prefills: dict[AttentionKind, _Planned] = {}
        self._recorded: dict[tuple[AttentionKind, int], _Planned] = {}
        self._memory: dict[AttentionKind, FixedMemory] = {}
        self._query_starts = torch.zeros(0, dtype=torch.int32)

    def start(self, batch: ForwardBatch, pool: KvPool) -> FlashInferPass:
        planner = _PassPlanner(batch, pool, self._dtypes)
        kernels, make = (
            (self._decodes, self._make.decode)
            if batch.is_decode_only
            else (self._prefills, self._make.prefill)
        )
        planned: dict[AttentionKind, Kernel] = {}

        def kernel(kind: AttentionKind, group: int) -> Kernel | None:
            if kind not in self.kinds:
                return None
            if kind not in planned:
                if kind not in kernels:
                    kernels[kind] = _Planned(make(kind))
                planned[kind] = kernels[kind].plan(*planner.plan(kind, group))
            return planned[kind]

        return FlashInferPass(batch, pool, self._scratch, kernel, self._make.append)

    def reserve(self, batch_sizes: Sequence[int], page_max: int) -> None:
        """See `RecordableAttention`."""
        largest = max(batch_sizes)
        self._query_starts = torch.arange(largest + 1, dtype=torch.int32)
        for kind in self.kinds:
            memory = FixedMemory(largest, largest * page_max, self._device)
            self._memory[kind] = memory
            for size in batch_sizes:
                kernel = self._make.recorded_decode(kind, memory, size)
                self._recorded[kind, size] = _Planned(kernel)

    def plan_recorded(self, rows: HostRows, pool: KvPool) -> None:
        """See `RecordableAttention`. Each kind's runs are one copy, into memory that it reads."""
        count = len(rows)
        ones = np.ones_like(rows.lengths)
        for kind, group in kinds_of_pool(self.kinds, pool).items():
            page_items = pool.page_items[group]
            runs = HostRuns.of(rows.lengths, ones, page_items, kind.window)
            taken = self._memory[kind].take(runs, runs.page_ids(rows.page_tables[group]))
            shapes = Shapes(self._query_starts[: count + 1], page_items, *self._dtypes)
            self._recorded[kind, count].plan(taken, shapes)

    def start_recorded(self, batch: ForwardBatch, pool: KvPool) -> FlashInferPass:
        """See `RecordableAttention`."""
        return FlashInferPass(
            batch,
            pool,
            self._scratch,
            lambda kind, _: self._recorded[kind, batch.sequence_count].kernel,
            self._make.append,
        )


class FlashInferPass(SdpaPass):
    """See `AttentionPass`. kernel: planned for a kind over a page group, None if SDPA does it.
    append: writes keys and values; None if torch does it."""

    def __init__(
        self,
        batch: ForwardBatch,
        pool: KvPool,
        scratch: tuple[Scratch, Scratch],
        kernel: Callable[[AttentionKind, int], Kernel | None],
        append: Append | None = None,
    ) -> None:
        super().__init__(batch, pool, scratch)
        self._kernel = kernel
        self._append = append
        self._places: dict[int, Places] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule = PLAIN
    ) -> Tensor:
        keys, values = (self._pool.plane(part, layer) for part in (KEY, VALUE))
        if self._append is None or key.shape[-1] not in SUPPORTED_HEAD_DIMS:
            return super().attend(layer, query, key, value, rule)
        assert keys.geometry == values.geometry, (keys.geometry, values.geometry)
        dtype = keys.view.dtype
        new = (cast(key, dtype), cast(value, dtype))
        self._append(new, (keys.view, values.view), self._places_in(keys.geometry.group))
        return self._attend(layer, query, (key, value), rule)

    def _places_in(self, group: int) -> Places:
        if group not in self._places:
            found = (self._batch.token_pages[group], self._batch.token_rows[group])
            self._places[group] = Places(*(numbers.to(torch.int32) for numbers in found))
        return self._places[group]

    def _attend(
        self, layer: int, query: Tensor, new: tuple[Tensor, Tensor] | None, rule: ScoreRule
    ) -> Tensor:
        keys, values = (self._pool.plane(part, layer) for part in (KEY, VALUE))
        kind = kind_of(keys, self._pool, query.shape[1], rule)
        kernel = self._kernel(kind, keys.geometry.group)
        if kernel is None:
            return super()._attend(layer, query, new, rule)
        # Queries may lie among keys and values, as one product makes them; only a head has to be
        # without gaps.
        assert query.stride(-1) == 1, query.stride()
        return kernel.run(query, (keys.view, values.view), rule.sinks)


class _PassPlanner:
    """Inputs of the plans of one pass, by page group."""

    def __init__(
        self, batch: ForwardBatch, pool: KvPool, dtypes: tuple[torch.dtype, torch.dtype]
    ) -> None:
        self._batch = batch
        self._pool = pool
        self._dtypes = dtypes
        self._runs: dict[int, PageRuns] = {}

    def plan(self, kind: AttentionKind, group: int) -> tuple[PageRuns, Shapes]:
        batch = self._batch
        page_items = self._pool.page_items[group]
        if group not in self._runs:
            self._runs[group] = page_runs(
                batch.page_tables[group],
                page_items,
                batch.kv_length_list,
                batch.query_lengths,
                window=kind.window,
            )
        query_starts = np.zeros(len(batch.query_lengths) + 1, dtype=np.int32)
        query_starts[1:] = np.cumsum(batch.query_lengths)
        return self._runs[group], Shapes(torch.from_numpy(query_starts), page_items, *self._dtypes)


class _Planned:
    """A kernel, and whether its last plan has left the host."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._copied: torch.cuda.Event | None = None

    def plan(self, runs: PageRuns, shapes: Shapes) -> Kernel:
        if self._copied is not None:
            self._copied.synchronize()
        self.kernel.plan(runs, shapes)
        if runs.page_ids.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return self.kernel
