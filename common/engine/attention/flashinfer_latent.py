"""Attention over latent rows on CUDA by FlashInfer, straight over the strided envelopes.

The projections are absorbed (`latent.py`), so that all heads read the rows as they lie, those of
decodes and of chunks behind a prefix. A prompt's first chunk has its rows at hand, and more new
tokens than `ABSORBED_MAX` allows take less arithmetic and memory expanded: both stay with torch,
as do layers that see a selection of tokens only. The kernels take the two parts of a row as tensors
with strides of their own and pages of any size. Written against the sources of FlashInfer 0.6.18
and 0.7.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.attention.kinds import LatentKind
from common.engine.attention.latent import (
    LATENT,
    LatentPass,
    LatentProjection,
    Selection,
    absorb_query,
    project_sums,
)
from common.engine.attention.page_runs import HostRuns, PageRuns, page_runs
from common.engine.cache.kv_pool import KvPool, Scratch
from common.engine.forward_batch import ForwardBatch, HostRows
from common.engine.host_copy import upload

WORKSPACE_NBYTES = 128 * 1024 * 1024
"""FlashInfer's recommendation. Its plan for these kernels splits over all blocks of the device,
whatever the batch."""
SUPPORTED_DIMS = (512, 64)
"""Latent and rotated part of a row."""
ABSORBED_MAX = 2**18
"""New tokens of chunks times heads: 256 MiB of absorbed queries in two bytes, and as much of sums
of rows."""


class MlaWrapper(Protocol):
    """flashinfer.mla.BatchMLAPagedAttentionWrapper, as far as it is used."""

    def plan(
        self,
        *,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None: ...

    def run(
        self, *, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor
    ) -> Tensor: ...


class LatentKernel:
    """One wrapper, planned for some sequences of a batch and run by every layer."""

    def __init__(
        self, kind: LatentKind, wrapper: MlaWrapper, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._kind = kind
        self._wrapper = wrapper
        self._dtype = dtype
        self._is_on_gpu = device.type == "cuda"
        self._copied: torch.cuda.Event | None = None

    def plan(self, batch: ForwardBatch, pool: KvPool, sequences: Sequence[int] | None) -> None:
        """sequences: those of the batch that are attended; None for all."""
        group = pool.group_of(LATENT)
        table = batch.page_tables[group]
        lengths, new_counts = batch.kv_length_list, batch.query_lengths
        if sequences is not None:
            (chosen,) = upload(table.device, np.asarray(sequences, dtype=np.int64))
            table = table[chosen]
            lengths = tuple(lengths[i] for i in sequences)
            new_counts = tuple(new_counts[i] for i in sequences)
        runs = page_runs(table, pool.page_items[group], lengths, new_counts)
        query_starts = np.zeros(len(lengths) + 1, dtype=np.int32)
        query_starts[1:] = np.cumsum(new_counts)
        self.plan_runs(runs, query_starts, pool.page_items[group])

    def plan_runs(self, runs: PageRuns, query_starts: NDArray[np.int32], page_items: int) -> None:
        """query_starts: int32[B + 1]."""
        if self._copied is not None:
            # The host's memory of the last plan is free to be written again.
            self._copied.synchronize()
        self._wrapper.plan(
            qo_indptr=torch.from_numpy(query_starts),
            kv_indptr=runs.starts,
            kv_indices=runs.page_ids,
            kv_len_arr=runs.lengths,
            num_heads=self._kind.head_count,
            head_dim_ckv=self._kind.latent_dim,
            head_dim_kpe=self._kind.rope_dim,
            page_size=page_items,
            causal=True,
            sm_scale=self._kind.scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        if self._is_on_gpu:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def run(self, query: Tensor, rows: Tensor, projection: LatentProjection) -> Tensor:
        """query: [T, heads, nope dim + rope dim]. rows: [page, 1, item, row dim], strided.

        Returns: [T, heads, value dim].
        """
        latent_dim = self._kind.latent_dim
        sums = self._wrapper.run(
            q_nope=absorb_query(query, projection),
            q_pe=query[..., self._kind.nope_dim :],
            ckv_cache=rows[:, 0, :, :latent_dim],
            kpe_cache=rows[:, 0, :, latent_dim:],
        )
        return project_sums(sums, projection)


class FlashInferLatentAttention:
    """See `Attention` and `RecordableAttention`. Raises ImportError if the library is missing."""

    name = "flashinfer latent"

    def __init__(self, kind: LatentKind, *, dtype: torch.dtype, device: torch.device) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        self._kind = kind
        self._dtype = dtype
        self._device = device
        self._workspace = torch.zeros(WORKSPACE_NBYTES, dtype=torch.uint8, device=device)
        self._scratch = Scratch()
        self._make: Callable[..., MlaWrapper] = BatchMLAPagedAttentionWrapper
        self._kernel = self._new_kernel()
        self._recorded: dict[int, LatentKernel] = {}

    def start(self, batch: ForwardBatch, pool: KvPool) -> FlashInferLatentPass:
        absorbed = absorbed_sequences(batch, self._kind.head_count)
        is_all = len(absorbed) == batch.sequence_count
        if absorbed:
            self._kernel.plan(batch, pool, None if is_all else absorbed)
        return FlashInferLatentPass(batch, pool, self._scratch, self._kernel, absorbed)

    def reserve(self, batch_sizes: Sequence[int], page_max: int) -> None:
        """See `RecordableAttention`. Only one size runs at a time, so they share the page ids."""
        page_ids = self._numbers(max(batch_sizes) * page_max)
        for size in batch_sizes:
            self._recorded[size] = self._new_kernel(
                use_cuda_graph=True,
                qo_indptr=self._numbers(size + 1),
                kv_indptr=self._numbers(size + 1),
                kv_indices=page_ids,
                kv_len_arr=self._numbers(size),
            )

    def plan_recorded(self, rows: HostRows, pool: KvPool) -> None:
        """See `RecordableAttention`."""
        group = pool.group_of(LATENT)
        ones = np.ones_like(rows.lengths)
        runs = HostRuns.of(rows.lengths, ones, pool.page_items[group], 0)
        page_ids = torch.from_numpy(runs.page_ids(rows.page_tables[group]))
        self._recorded[len(rows)].plan_runs(
            PageRuns(
                starts=torch.from_numpy(runs.starts),
                lengths=torch.from_numpy(runs.lengths),
                last_page_lengths=torch.from_numpy(runs.last_page_lengths),
                page_ids=page_ids,
            ),
            np.arange(len(rows) + 1, dtype=np.int32),
            pool.page_items[group],
        )

    def start_recorded(self, batch: ForwardBatch, pool: KvPool) -> FlashInferLatentPass:
        """See `RecordableAttention`."""
        absorbed = range(batch.sequence_count)
        kernel = self._recorded[batch.sequence_count]
        return FlashInferLatentPass(batch, pool, self._scratch, kernel, absorbed)

    def _new_kernel(self, **options: object) -> LatentKernel:
        is_hopper = (
            self._device.type == "cuda" and torch.cuda.get_device_capability(self._device)[0] == 9
        )
        # By name: left to choose, later releases take kernels of others, which copy rows.
        backend = "fa3" if is_hopper else "fa2"
        wrapper = self._make(self._workspace, backend=backend, **options)
        return LatentKernel(self._kind, wrapper, self._dtype, self._device)

    def _numbers(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)


class FlashInferLatentPass(LatentPass):
    """See `LatentPass`. kernel: planned for the sequences `absorbed`, in order; torch has the
    others."""

    def __init__(
        self,
        batch: ForwardBatch,
        pool: KvPool,
        scratch: Scratch,
        kernel: LatentKernel,
        absorbed: Sequence[int],
    ) -> None:
        super().__init__(batch, pool, scratch)
        self._kernel = kernel
        self._absorbed_rows: Tensor | None = None
        if len(absorbed) < batch.sequence_count:
            ends = list(accumulate(batch.query_lengths))
            rows = [r for i in absorbed for r in range(ends[i] - batch.query_lengths[i], ends[i])]
            (self._absorbed_rows,) = upload(
                batch.token_ids.device, np.asarray(rows, dtype=np.int64)
            )
            firsts = {ends[i] - batch.query_lengths[i] for i in absorbed}
            self._expanded = [c for c in self.chunks if c.rows.start not in firsts]

    def attend_latent(
        self,
        layer: int,
        query: Tensor,
        row: Tensor,
        projection: LatentProjection,
        selection: Selection | None = None,
    ) -> Tensor:
        assert selection is None, "chosen tokens are torch's"
        self.append(LATENT, layer, row)
        if self._absorbed_rows is None:
            return self.attend_cached(layer, query, projection)
        plane = self._pool.plane(LATENT, layer)
        output = query.new_empty(*query.shape[:2], projection.value.shape[1])
        if len(self._absorbed_rows):
            some = query[self._absorbed_rows]
            output[self._absorbed_rows] = self._kernel.run(some, plane.view, projection)
        for chunk in self._expanded:
            output[chunk.rows] = self._attend_chunk(chunk, plane, query, row, projection)
        return output

    def attend_cached(self, layer: int, query: Tensor, projection: LatentProjection) -> Tensor:
        """As `attend_latent` where all sequences are absorbed and the rows are in the cache."""
        assert self._absorbed_rows is None
        return self._kernel.run(query, self._pool.plane(LATENT, layer).view, projection)


def absorbed_sequences(batch: ForwardBatch, head_count: int) -> list[int]:
    """Rows of the batch's sequences that are attended absorbed: decodes, and chunks behind a prefix
    as long as they are few."""
    found: list[int] = []
    room = ABSORBED_MAX // head_count
    for index, length in enumerate(batch.query_lengths):
        if length > 1 and (not batch.start_list[index] or length > room):
            continue
        found.append(index)
        room -= length if length > 1 else 0
    return found
