"""Attention on CUDA by FlashInfer, straight over the strided envelopes [page, head, token, dim].

Nothing is gathered or copied. The library is imported when the backend is made, never before;
whoever makes it checks its numbers against SDPA first (`choose.py`). Written against the sources of
FlashInfer 0.6.18 and 0.7.2, whose kernels ask that keys and values have equal strides: in an
envelope they do. It needs a CUDA device, and no machine that had one has run it yet: without one
only the page table's conversion is tested; `tests/gpu/check.py` does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.engine.attention.attention import KEY, VALUE, CacheWriter
from common.engine.forward_batch import ForwardBatch
from common.engine.kv_pool import KvPool

# Scratch for the partial outputs of split keys. A plan that does not fit raises: FA2 may ask for
# heads * (2 * SMs / KV heads) tiles of 128 rows in fp32, on an H200 with 64 heads, 8 KV heads and
# dim 128 that is 138 MB, more than the 128 MiB that FlashInfer's documentation recommends.
WORKSPACE_NBYTES = 384 * 1024 * 1024
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16)
SUPPORTED_HEAD_DIMS = (64, 128, 256)
# Query heads per KV head from which a decode fills a tensor core's tile better than a vector unit.
TENSOR_CORE_GROUP_MIN = 4


class _DecodeWrapper(Protocol):
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None: ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor: ...


class _PrefillWrapper(Protocol):
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None: ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor: ...


class FlashInferAttention:
    """See `Attention`. Raises ImportError if the library is not installed.

    head_count, kv_head_count: of this rank.
    """

    name = "flashinfer"

    def __init__(
        self,
        *,
        head_count: int,
        kv_head_count: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        import flashinfer

        self.head_count = head_count
        self.kv_head_count = kv_head_count
        self.head_dim = head_dim
        self.dtype = dtype
        workspace = torch.zeros(WORKSPACE_NBYTES, dtype=torch.uint8, device=device)
        self.decode: _DecodeWrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "HND",
            use_tensor_cores=head_count // kv_head_count >= TENSOR_CORE_GROUP_MIN,
        )
        self.prefill: _PrefillWrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "HND"
        )

    def start(self, batch: ForwardBatch, pool: KvPool) -> FlashInferPass:
        page_items = pool.page_items[pool.group_of(KEY)]
        table = csr_page_table(batch, pool)
        layer = pool.first_layer(KEY)
        if layer is None:
            # A pipeline stage whose layers all do something else; it never attends.
            return FlashInferPass(batch, pool, self.decode)
        key_dtype = pool.view(KEY, layer).dtype
        if batch.is_decode_only:
            self.decode.plan(
                table.starts,
                table.page_ids,
                table.last_page_lengths,
                self.head_count,
                self.kv_head_count,
                self.head_dim,
                page_items,
                q_data_type=self.dtype,
                kv_data_type=key_dtype,
            )
            return FlashInferPass(batch, pool, self.decode)
        self.prefill.plan(
            torch.tensor([0, *batch.query_lengths], dtype=torch.int32).cumsum(0).int(),
            table.starts,
            table.page_ids,
            table.last_page_lengths,
            self.head_count,
            self.kv_head_count,
            self.head_dim,
            page_items,
            causal=True,
            q_data_type=self.dtype,
            kv_data_type=key_dtype,
        )
        return FlashInferPass(batch, pool, self.prefill)


class FlashInferPass:
    """See `AttentionPass`."""

    def __init__(
        self, batch: ForwardBatch, pool: KvPool, wrapper: _DecodeWrapper | _PrefillWrapper
    ) -> None:
        self._pool = pool
        self._writer = CacheWriter(batch, pool)
        self._wrapper = wrapper

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._writer.write(KEY, layer, key)
        self._writer.write(VALUE, layer, value)
        planes = (self._pool.view(KEY, layer), self._pool.view(VALUE, layer))
        return self._wrapper.run(query.contiguous(), planes)


@dataclass(frozen=True, slots=True)
class CsrPageTable:
    """The used part of a page table, sequence after sequence.

    starts: int32[B + 1] and last_page_lengths: int32[B], on the CPU, where FlashInfer plans;
    page_ids: int32[starts[-1]] on the device.
    """

    starts: Tensor
    page_ids: Tensor
    last_page_lengths: Tensor


def csr_page_table(batch: ForwardBatch, pool: KvPool) -> CsrPageTable:
    """The pages that hold kv_lengths tokens of each sequence; no wait for the device."""
    group = pool.group_of(KEY)
    items = pool.page_items[group]
    table = batch.page_tables[group]
    lengths = torch.tensor(batch.kv_length_list, dtype=torch.int32)
    counts = (lengths + items - 1) // items
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32)
    starts[1:] = counts.cumsum(0)
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
    columns = torch.arange(int(starts[-1])) - torch.repeat_interleave(starts[:-1], counts)
    page_ids = table[rows.to(table.device), columns.to(table.device)]
    return CsrPageTable(starts, page_ids, lengths - (counts - 1) * items)
