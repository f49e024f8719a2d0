"""FlashInfer's paged kernels, each planned for one batch and run by every layer of its kind.

Written against the sources of FlashInfer 0.6.18 and 0.7.2; imported only where a backend is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.ascending import Ascending
from common.engine.attention.kinds import AttentionKind
from common.engine.attention.page_runs import HostRuns, PageRuns
from common.engine.host_copy import Array, pack, unpack, upload_into

LAYOUT = "HND"
# Query heads per KV head from which a decode fills a tensor core's tile better than a vector unit.
TENSOR_CORE_GROUP_MIN = 4
PLAN_NBYTES = 8 * 1024 * 1024
"""Size of the plan buffer that FlashInfer itself allocates."""


class DecodeWrapper(Protocol):
    """flashinfer.BatchDecodeWithPagedKVCacheWrapper, as far as it is used."""

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
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None: ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor: ...

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None: ...


class PrefillWrapper(Protocol):
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper, and its heir that knows sinks."""

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
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None: ...

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *jit_args: Tensor | float
    ) -> Tensor: ...

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Shapes:
    """Inputs of a plan beside the batch's pages. query_starts: int32[B + 1] on the CPU.

    dtype, cache_dtype: of queries, and of keys and values.
    """

    query_starts: Tensor
    page_items: int
    dtype: torch.dtype
    cache_dtype: torch.dtype


class DecodeKernel:
    """One new token per sequence."""

    def __init__(self, kind: AttentionKind, wrapper: DecodeWrapper) -> None:
        self._kind = kind
        self._wrapper = wrapper

    def plan(self, runs: PageRuns, shapes: Shapes) -> None:
        self._plan_by(self._wrapper.plan, runs, shapes)

    def _plan_by(
        self, plan: Callable[..., None], runs: PageRuns, shapes: Shapes, **more: Tensor
    ) -> None:
        kind = self._kind
        plan(
            runs.starts,
            runs.page_ids,
            runs.last_page_lengths,
            kind.head_count,
            kind.kv_head_count,
            kind.head_dim,
            shapes.page_items,
            sm_scale=kind.score_scale,
            window_left=window_left(kind),
            logits_soft_cap=kind.softcap,
            q_data_type=shapes.dtype,
            kv_data_type=shapes.cache_dtype,
            **more,
        )

    def run(self, query: Tensor, planes: tuple[Tensor, Tensor], sinks: Tensor | None) -> Tensor:
        """query: [B, heads, head dim]; planes: keys and values [page, head, item, head dim]."""
        assert sinks is None
        return self._wrapper.run(query, planes)


class RecordedDecodeKernel(DecodeKernel):
    """One whose page runs are in its memory before it is planned.

    plan_again: plans a second time and later, and copies nothing but what it has planned. The first
    plan copies the runs as well, and chooses what is compiled.
    """

    def __init__(
        self, kind: AttentionKind, wrapper: DecodeWrapper, plan_again: Callable[..., None]
    ) -> None:
        super().__init__(kind, wrapper)
        self._plan_again = plan_again
        self._is_planned = False

    def plan(self, runs: PageRuns, shapes: Shapes) -> None:
        if not self._is_planned:
            super().plan(runs, shapes)
            self._is_planned = True
            return
        plan = partial(self._plan_again, self._wrapper)
        self._plan_by(plan, runs, shapes, global_override_indptr_cpu=runs.starts)


class PrefillKernel:
    """Any number of new tokens per sequence; kinds with sinks decode by it too."""

    def __init__(self, kind: AttentionKind, wrapper: PrefillWrapper) -> None:
        self._kind = kind
        self._wrapper = wrapper

    def plan(self, runs: PageRuns, shapes: Shapes) -> None:
        kind = self._kind
        self._wrapper.plan(
            shapes.query_starts,
            runs.starts,
            runs.page_ids,
            runs.last_page_lengths,
            kind.head_count,
            kind.kv_head_count,
            kind.head_dim,
            shapes.page_items,
            causal=True,
            sm_scale=kind.score_scale,
            window_left=window_left(kind),
            logits_soft_cap=kind.softcap,
            q_data_type=shapes.dtype,
            kv_data_type=shapes.cache_dtype,
        )

    def run(self, query: Tensor, planes: tuple[Tensor, Tensor], sinks: Tensor | None) -> Tensor:
        """query: [T, heads, head dim]; sinks: [heads], in any dtype."""
        if sinks is None:
            return self._wrapper.run(query, planes)
        # The kernel reads fp32, whatever it is given.
        return self._wrapper.run(query, planes, sinks.float(), self._kind.score_scale)


Kernel = DecodeKernel | PrefillKernel


@dataclass(frozen=True, slots=True)
class Places:
    """Where T tokens go in one page group; both int32[T] on the device."""

    pages: Tensor
    rows: Tensor


Append = Callable[[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Places], None]
"""See `Kernels.append`."""


class FixedMemory:
    """Inputs of recorded decodes of one kind, in memory that stays. One size at a time uses it.

    plan: uint8, the kernel's own plan. query_starts: int32[B + 1], constant.
    starts: int32[B + 1], last_page_lengths: int32[B], page_ids: int32[pages] of its page runs.
    """

    def __init__(self, batch_size: int, page_count: int, device: torch.device) -> None:
        """For batches and page runs of these sizes at most."""
        self.plan = torch.empty(PLAN_NBYTES, dtype=torch.uint8, device=device)
        self.query_starts = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
        self._batch_size = batch_size
        arrays = self._arrays(*(np.zeros(0, dtype=np.int32),) * 2, np.zeros(page_count, np.int32))
        self._memory = pack(arrays, is_pinned=False).to(device)
        self.starts, self.last_page_lengths, self.page_ids = unpack(self._memory, arrays)

    def take(self, runs: HostRuns, page_ids: NDArray[np.int32]) -> PageRuns:
        """Copy these here, in one copy. Returns: the runs, whose page ids are the ones here."""
        upload_into(self._memory, *self._arrays(runs.starts, runs.last_page_lengths, page_ids))
        return PageRuns(
            starts=torch.from_numpy(runs.starts),
            lengths=torch.from_numpy(runs.lengths),
            last_page_lengths=torch.from_numpy(runs.last_page_lengths),
            page_ids=self.page_ids[: len(page_ids)],
        )

    def _arrays(
        self, starts: NDArray[np.int32], last: NDArray[np.int32], page_ids: NDArray[np.int32]
    ) -> list[Array]:
        """As large as the largest batch has them, so that all find them in one place."""
        size = self._batch_size
        return [
            np.pad(starts, (0, size + 1 - len(starts))),
            np.pad(last, (0, size - len(last))),
            page_ids,
        ]


class Kernels:
    """Makes the kernels of one device. Raises ImportError if the library is not installed.

    workspace_nbytes: for partial outputs. Kernels share it, for they run one after the other.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        workspace_nbytes: int,
    ) -> None:
        import flashinfer
        import flashinfer.page

        self._ascending = Ascending(device)
        self._plan_again: Callable[..., None] = flashinfer.fast_decode_plan
        self._append: Callable[..., None] = flashinfer.page.append_paged_kv_cache
        self._workspace = torch.zeros(workspace_nbytes, dtype=torch.uint8, device=device)
        self._dtype = dtype
        self._cache_dtype = cache_dtype
        self._decode_type: Callable[..., DecodeWrapper] = (
            flashinfer.BatchDecodeWithPagedKVCacheWrapper
        )
        self._prefill_type: Callable[..., PrefillWrapper] = (
            flashinfer.BatchPrefillWithPagedKVCacheWrapper
        )
        self._sink_type: Callable[..., PrefillWrapper] = (
            flashinfer.BatchAttentionWithAttentionSinkWrapper
        )

    def append(
        self, new: tuple[Tensor, Tensor], planes: tuple[Tensor, Tensor], places: Places
    ) -> None:
        """Keys and values [T, heads, head dim] into [page, head, item, head dim], in one launch."""
        count = len(places.pages)
        # Every token is a sequence of one page, in which it stands at its row.
        self._append(
            *new,
            self._ascending.first(count),
            places.rows,
            planes,
            places.pages,
            self._ascending.first(count + 1),
            places.rows,
            LAYOUT,
        )

    def decode(self, kind: AttentionKind) -> Kernel:
        return self._decode(kind)

    def recorded_decode(self, kind: AttentionKind, memory: FixedMemory, size: int) -> Kernel:
        """One for `size` rows, that is planned into `memory`, outside of a recording, and runs
        inside it."""
        return self._decode(kind, memory, size)

    def prefill(self, kind: AttentionKind) -> Kernel:
        if kind.has_sinks:
            return PrefillKernel(kind, self._with_sinks(kind, "auto"))
        return PrefillKernel(kind, self._prefill_type(self._workspace, LAYOUT))

    def _decode(
        self, kind: AttentionKind, memory: FixedMemory | None = None, size: int = 0
    ) -> Kernel:
        if kind.has_sinks:
            return PrefillKernel(kind, self._with_sinks(kind, "fa2", memory, size))
        # By name: left to choose, later releases take kernels of others for some shapes, which
        # copy what has strides.
        options: dict[str, object] = {"backend": "fa2"}
        if memory is not None:
            options |= {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": memory.starts[: size + 1],
                "paged_kv_indices_buffer": memory.page_ids,
                "paged_kv_last_page_len_buffer": memory.last_page_lengths[:size],
            }
        group = kind.head_count // kind.kv_head_count
        wrapper = self._decode_type(
            self._workspace, LAYOUT, use_tensor_cores=group >= TENSOR_CORE_GROUP_MIN, **options
        )
        if memory is None:
            return DecodeKernel(kind, wrapper)
        wrapper.reset_workspace_buffer(self._workspace, memory.plan)
        return RecordedDecodeKernel(kind, wrapper, self._plan_again)

    def _with_sinks(
        self,
        kind: AttentionKind,
        backend: str,
        memory: FixedMemory | None = None,
        size: int = 0,
    ) -> PrefillWrapper:
        options: dict[str, object] = {}
        if memory is not None:
            options = {
                "use_cuda_graph": True,
                "qo_indptr_buf": memory.query_starts[: size + 1],
                "paged_kv_indptr_buf": memory.starts[: size + 1],
                "paged_kv_indices_buf": memory.page_ids,
                "paged_kv_last_page_len_buf": memory.last_page_lengths[:size],
            }
        wrapper = self._sink_type(
            self._workspace,
            LAYOUT,
            backend=backend,
            q_data_type=self._dtype,
            kv_data_type=self._cache_dtype,
            head_dim_qk=kind.head_dim,
            head_dim_vo=kind.head_dim,
            window_left=window_left(kind),
            **options,
        )
        if memory is not None:
            wrapper.reset_workspace_buffer(self._workspace, memory.plan)
        return wrapper


def window_left(kind: AttentionKind) -> int:
    """How far before itself a token sees, as the kernels spell it: -1 for all of the past."""
    return kind.window - 1
