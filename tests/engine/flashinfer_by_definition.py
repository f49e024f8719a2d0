"""What FlashInfer's wrappers are documented to compute, key by key, on any device.

Stands for the library where there is no GPU: plans are taken as the sources of 0.6.18 take them, a
wrapper for recordings reads only the buffers that it was given, and masks are the kernels' own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.attention import flashinfer, flashinfer_kernels, flashinfer_latent
from common.engine.cache.cast import raw


class PagedAttention:
    """Any number of new tokens per sequence."""

    def __init__(
        self,
        workspace: Tensor,
        layout: str,
        *,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        **_: object,
    ) -> None:
        assert workspace.dtype == torch.uint8 and layout == "HND"
        self.buffers: list[Tensor] | None = None
        if use_cuda_graph:
            buffers = (paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
            self.buffers = [buffer for buffer in buffers if buffer is not None]
            assert len(self.buffers) == 3

    def reset_workspace_buffer(self, floats: Tensor, integers: Tensor) -> None:
        assert floats.dtype == integers.dtype == torch.uint8

    def plan(
        self,
        qo_indptr: Tensor,
        *table: Tensor | int,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        causal: bool,
    ) -> None:
        assert causal and not qo_indptr.is_cuda
        self.dtypes = (q_data_type, kv_data_type)
        *tensors, self.head_count, self.kv_head_count, self.dim, self.page_size = table
        pages: list[Tensor] = [t for t in tensors if isinstance(t, Tensor)]
        assert all(t.dtype == torch.int32 for t in (qo_indptr, *pages))
        if self.buffers is not None:
            for buffer, tensor in zip(self.buffers, pages, strict=True):
                buffer[: len(tensor)].copy_(tensor)
            assert len(self.buffers[2]) == len(pages[2]), "one batch size for good"
            pages = self.buffers
        self.query_starts, self.pages = qo_indptr, pages
        self.scale, self.window_left, self.softcap = sm_scale, window_left, logits_soft_cap

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *jit_args: Tensor | float) -> Tensor:
        keys, values = kv
        assert keys.stride() == values.stride() and q.stride(-1) == 1
        assert (q.dtype, keys.dtype) == self.dtypes
        assert q.shape[1:] == (self.head_count, self.dim) and len(q) == self.query_starts[-1]
        assert keys.shape[1:] == (self.kv_head_count, self.page_size, self.dim)
        sinks = None
        if jit_args:
            sinks, scale = jit_args
            assert isinstance(sinks, Tensor) and sinks.dtype == torch.float32
            assert scale == self.scale
        return torch.cat(
            [self.one(sequence, q, keys, values, sinks) for sequence in range(len(self.pages[2]))]
        )

    def one(
        self, sequence: int, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
    ) -> Tensor:
        starts, ids, last = self.pages
        pages = ids[starts[sequence] : starts[sequence + 1]].long()
        length = (len(pages) - 1) * self.page_size + int(last[sequence])
        rows = q[self.query_starts[sequence] : self.query_starts[sequence + 1]].float()
        group = self.head_count // self.kv_head_count
        read = (raw(part)[pages].view(part.dtype).float() for part in (keys, values))
        key, value = (
            part.transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(group, dim=0)
            for part in read
        )
        scores = torch.einsum("thd,hkd->thk", rows, key) * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        query_index = torch.arange(len(rows))[:, None]
        key_index = torch.arange(length)[None]
        seen = key_index + len(rows) <= length + query_index
        if self.window_left >= 0:
            seen &= key_index + len(rows) + self.window_left >= length + query_index
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        if sinks is not None:
            column = sinks[None, :, None].expand(len(rows), -1, 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., :length]
        return torch.einsum("thk,hkd->thd", weights, value).to(q.dtype)


class Decode(PagedAttention):
    """One new token per sequence."""

    def __init__(
        self,
        workspace: Tensor,
        layout: str,
        *,
        use_tensor_cores: bool,
        backend: str,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        super().__init__(
            workspace,
            layout,
            use_cuda_graph=use_cuda_graph,
            paged_kv_indptr_buf=paged_kv_indptr_buffer,
            paged_kv_indices_buf=paged_kv_indices_buffer,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buffer,
        )

    def plan(self, indptr: Tensor, *table: Tensor | int, **options: object) -> None:
        query_starts = torch.arange(len(indptr), dtype=torch.int32)
        super().plan(query_starts, indptr, *table, causal=True, **options)  # type: ignore[arg-type]


def fast_decode_plan(
    wrapper: Decode,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    *shape: int,
    sm_scale: float,
    window_left: int,
    logits_soft_cap: float,
    q_data_type: torch.dtype,
    kv_data_type: torch.dtype,
    global_override_indptr_cpu: Tensor,
) -> None:
    """Nothing is copied: what the wrapper was given is there already."""
    assert wrapper.buffers is not None and len(indices) <= len(wrapper.buffers[1])
    assert not global_override_indptr_cpu.is_cuda and not last_page_len.is_cuda
    assert shape == (wrapper.head_count, wrapper.kv_head_count, wrapper.dim, wrapper.page_size)
    assert (wrapper.scale, wrapper.window_left) == (sm_scale, window_left)
    assert wrapper.softcap == logits_soft_cap and wrapper.dtypes == (q_data_type, kv_data_type)
    assert wrapper.pages is wrapper.buffers, "planned once before"


class Mla:
    """Rows [latent | rotated] that all heads share, by absorbed queries."""

    def __init__(
        self,
        workspace: Tensor,
        *,
        backend: str,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
    ) -> None:
        assert workspace.dtype == torch.uint8 and backend in ("fa2", "fa3")
        self.buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr) if use_cuda_graph else None

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
    ) -> None:
        assert causal and q_data_type == kv_data_type
        self.shape = (num_heads, head_dim_ckv, head_dim_kpe, page_size)
        self.scale = sm_scale
        self.tables = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert all(table.dtype == torch.int32 for table in self.tables)
        if self.buffers is not None:
            for buffer, table in zip(self.buffers, self.tables, strict=True):
                assert buffer is not None
                buffer[: len(table)].copy_(table)
            assert self.buffers[3] is not None and len(self.buffers[3]) == len(kv_len_arr)

    def run(self, *, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor) -> Tensor:
        heads, latent_dim, rope_dim, page_size = self.shape
        assert q_nope.shape[1:] == (heads, latent_dim) and q_pe.shape[1:] == (heads, rope_dim)
        assert ckv_cache.shape[1:] == (page_size, latent_dim)
        assert kpe_cache.shape[1:] == (page_size, rope_dim)
        tables = self.tables
        if self.buffers is not None:
            tables = self.buffers  # type: ignore[assignment]
        query_starts, starts, ids, lengths = tables
        outputs: list[Tensor] = []
        for sequence, length in enumerate(lengths.tolist()):
            pages = ids[starts[sequence] : starts[sequence + 1]].long()
            latent = ckv_cache[pages].flatten(0, 1)[:length].float()
            rotated = kpe_cache[pages].flatten(0, 1)[:length].float()
            rows = slice(query_starts[sequence], query_starts[sequence + 1])
            scores = q_nope[rows].float() @ latent.T + q_pe[rows].float() @ rotated.T
            count = len(scores)
            seen = torch.arange(length)[None] + count <= length + torch.arange(count)[:, None]
            scores = (scores * self.scale).masked_fill(~seen[:, None], float("-inf"))
            outputs.append((scores.softmax(-1) @ latent).to(q_nope.dtype))
        return torch.cat(outputs)


def rmsnorm(hidden: Tensor, weight: Tensor, epsilon: float, out: Tensor | None = None) -> Tensor:
    """Rows may lie apart, 16 bytes of them can be read at a time, and out may be them."""
    assert len(hidden) and hidden.stride(1) == 1 and hidden.dtype == weight.dtype
    assert not hidden.stride(0) % 8 and not hidden.storage_offset() % 8
    wide = hidden.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    found = (wide * scale * weight.float()).to(hidden.dtype)
    return found if out is None else out.copy_(found)


def fused_add_rmsnorm(hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    residual += hidden
    hidden.copy_(rmsnorm(residual, weight, epsilon))


def gemma_rmsnorm(
    hidden: Tensor, weight: Tensor, epsilon: float, out: Tensor | None = None
) -> Tensor:
    # Offsets are added in fp32.
    wide = rmsnorm(hidden.float(), 1.0 + weight.float(), epsilon).to(hidden.dtype)
    return wide if out is None else out.copy_(wide)


def gemma_fused_add_rmsnorm(
    hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> None:
    residual += hidden
    hidden.copy_(gemma_rmsnorm(residual, weight, epsilon))


NORMS = (rmsnorm, fused_add_rmsnorm, gemma_rmsnorm, gemma_fused_add_rmsnorm)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str,
) -> None:
    assert kv_layout == "HND" and len(kv_indptr) == len(kv_last_page_len) + 1
    indexes = (batch_indices, positions, kv_indices, kv_indptr)
    assert all(index.dtype == torch.int32 and index.is_contiguous() for index in indexes)
    page_size = paged_kv_cache[0].shape[2]
    items = kv_indptr[batch_indices] * page_size + positions
    pages, rows = kv_indices[items // page_size].long(), (items % page_size).long()
    for cache, new in zip(paged_kv_cache, (append_key, append_value), strict=True):
        assert cache.dtype == new.dtype and new.stride(-1) == 1
        raw(cache)[pages, :, rows] = raw(new)


def apply_rope_with_cos_sin_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor]:
    assert cos_sin_cache.dtype == torch.float32 and len(positions) == len(query) == len(key)
    cos, sin = (part[:, None] for part in cos_sin_cache[positions].chunk(2, -1))
    count = cos_sin_cache.shape[1]
    turned: list[Tensor] = []
    for heads in (query.view(len(query), -1, head_size), key.view(len(key), -1, head_size)):
        wide, out = heads.float(), heads.float().clone()
        if is_neox:
            places = (slice(0, count // 2), slice(count // 2, count))
        else:
            places = (slice(0, count, 2), slice(1, count, 2))
        first, second = (wide[..., place] for place in places)
        out[..., places[0]] = first * cos - second * sin
        out[..., places[1]] = second * cos + first * sin
        turned.append(out.to(heads.dtype))
    return turned[0].flatten(1), turned[1].flatten(1)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    found = apply_rope_with_cos_sin_cache(positions, query, key, head_size, cos_sin_cache, is_neox)
    for heads, turned in zip((query, key), found, strict=True):
        heads.copy_(turned.view(heads.shape))


class Rerun:
    """See `Recording`: reads the same memory again."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self.compute = compute
        self.output = compute().clone()

    def replay(self) -> None:
        self.output.copy_(self.compute())


class Kept(Rerun):
    """A recording that has kept what it read."""

    def replay(self) -> None:
        pass


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import flashinfer` finds this, which needs no workspace."""
    monkeypatch.setattr(flashinfer, "WORKSPACE_NBYTES", 16)
    monkeypatch.setattr(flashinfer_kernels, "PLAN_NBYTES", 16)
    monkeypatch.setattr(flashinfer_latent, "WORKSPACE_NBYTES", 16)
    module = ModuleType("flashinfer")
    vars(module).update(
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        fast_decode_plan=fast_decode_plan,
        BatchPrefillWithPagedKVCacheWrapper=PagedAttention,
        BatchAttentionWithAttentionSinkWrapper=PagedAttention,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    parts = {
        "mla": {"BatchMLAPagedAttentionWrapper": Mla},
        "norm": {kernel.__name__: kernel for kernel in NORMS},
        "page": {"append_paged_kv_cache": append_paged_kv_cache},
        "rope": {
            kernel.__name__: kernel
            for kernel in (apply_rope_with_cos_sin_cache, apply_rope_with_cos_sin_cache_inplace)
        },
        "activation": {kernel.__name__: kernel for kernel in (silu_and_mul, gelu_tanh_and_mul)},
    }
    for name, contents in parts.items():
        part = ModuleType(f"flashinfer.{name}")
        vars(part).update(contents)
        setattr(module, name, part)
        monkeypatch.setitem(sys.modules, f"flashinfer.{name}", part)
