"""Kernels of libraries that compute nothing and are counted as one launch each.

What a call copies beside its kernel is spelled out as the libraries do it (FlashInfer 0.6.18,
fla-core 0.6.0), so that it is counted too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from common.engine import host_copy, pending_step
from common.engine.attention import flashinfer, flashinfer_kernels, flashinfer_latent
from common.engine.layers import moe, norm, short_conv
from common.engine.layers.choose_delta import DeltaChoice
from common.engine.layers.conv_step import ConvChoice, step_fused
from common.engine.layers.delta_fla import FlaDelta
from common.engine.layers.gated_norm_fla import GatedNormChoice
from common.engine.models import gated_delta_net, kimi_delta
from common.engine.sampling import draw, sampler
from tests.launches.counter import LaunchCounter


class _Paged:
    """flashinfer.BatchDecodeWithPagedKVCacheWrapper, and its heirs for more new tokens."""

    counter: LaunchCounter

    def __init__(self, workspace: Tensor, layout: str, **options: object) -> None:
        names = (
            ("paged_kv_indptr_buffer", "paged_kv_indptr_buf"),
            ("paged_kv_indices_buffer", "paged_kv_indices_buf"),
            ("paged_kv_last_page_len_buffer", "paged_kv_last_page_len_buf"),
        )
        found = [options.get(a, options.get(b)) for a, b in names]
        self.buffers = [buffer for buffer in found if isinstance(buffer, Tensor)]

    def reset_workspace_buffer(self, floats: Tensor, integers: Tensor) -> None:
        pass

    def plan(self, *tables: Tensor | int, **options: object) -> None:
        """Starts, pages and last page lengths go to the device, and then what was planned."""
        *_, starts, page_ids, last = (t for t in tables if isinstance(t, Tensor))
        if self.buffers:
            self.buffers[0].copy_(starts)
            self.buffers[2].copy_(last)
            self.buffers[1][: len(page_ids)].copy_(page_ids)
        else:
            for table in (starts, last):
                table.to(page_ids.device)
        self.counter.note("flashinfer plan")

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *jit_args: Tensor | float) -> Tensor:
        self.counter.note("flashinfer attention")
        return torch.empty_like(q, memory_format=torch.contiguous_format)


class _Latent:
    """flashinfer.mla.BatchMLAPagedAttentionWrapper."""

    counter: LaunchCounter

    def __init__(self, workspace: Tensor, *, backend: str, **options: object) -> None:
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        found = [options.get(name) for name in names]
        self.buffers = [buffer for buffer in found if isinstance(buffer, Tensor)]

    def plan(
        self,
        *,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        **options: object,
    ) -> None:
        tables = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        for buffer, table in zip(self.buffers, tables, strict=bool(self.buffers)):
            buffer[: len(table)].copy_(table)
        self.counter.note("flashinfer plan")

    def run(self, *, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor) -> Tensor:
        self.counter.note("flashinfer mla")
        return torch.empty_like(q_nope)


class _CountedCopy:
    """See `HostCopy`. Nobody waits for it."""

    counter: LaunchCounter

    def __init__(self, tensors: list[Tensor]) -> None:
        for _ in tensors:
            self.counter.note("copy to the host")


def install(monkeypatch: pytest.MonkeyPatch, counter: LaunchCounter) -> None:
    """Libraries are found, and each call of a kernel is one launch of `counter`."""
    for module in (flashinfer, flashinfer_latent):
        monkeypatch.setattr(module, "WORKSPACE_NBYTES", 16)
    monkeypatch.setattr(flashinfer_kernels, "PLAN_NBYTES", 16)
    for counted in (_Paged, _Latent, _CountedCopy):
        monkeypatch.setattr(counted, "counter", counter, raising=False)
    monkeypatch.setattr(pending_step, "HostCopy", _CountedCopy)
    monkeypatch.setattr(draw, "HostCopy", _CountedCopy)
    monkeypatch.setattr(host_copy, "pack", _pack)
    monkeypatch.setattr(moe, "has_grouped_kernel", lambda device, dtype: True)
    _install_flashinfer(monkeypatch, counter)
    _install_fla(monkeypatch, counter)
    _install_triton(monkeypatch, counter)


def _install_triton(monkeypatch: pytest.MonkeyPatch, counter: LaunchCounter) -> None:
    def draw_rows(logits: Tensor, steering: object) -> Tensor:
        counter.note("triton draw_rows")
        return logits.new_empty(3, len(logits), dtype=torch.int64)

    def norm_and_rotate(heads: Tensor, *args: object, **options: object) -> Tensor:
        counter.note("triton norm_and_rotate")
        return heads.new_empty(heads.shape)

    def route(logits: Tensor, count: int, **options: object) -> tuple[Tensor, Tensor]:
        counter.note("triton route")
        shape = (len(logits), count)
        return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)

    def arrange(
        hidden: Tensor, experts: Tensor, expert_count: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        counter.note("triton arrange")
        count = experts.numel()
        return (
            hidden.new_empty(count, hidden.shape[1]),
            experts.new_empty(count, dtype=torch.int64),
            experts.new_empty(expert_count, dtype=torch.int32),
            experts.new_empty(count, dtype=torch.int32),
        )

    def combine(outputs: Tensor, shares: Tensor, *args: object) -> Tensor:
        counter.note("triton combine")
        return outputs.new_empty(len(shares), outputs.shape[1])

    def conv_step(projected: Tensor, columns: Tensor, *args: object) -> Tensor:
        counter.note("triton conv_step")
        return projected.new_empty(len(projected) * len(columns))

    monkeypatch.setattr(short_conv, "choose_conv", lambda shape: ConvChoice(step_fused, "counted"))
    modules: dict[str, dict[str, object]] = {
        "triton_conv": {"conv_step": conv_step},
        "triton_rotation": {"norm_and_rotate": norm_and_rotate},
        "triton_experts": {"route": route, "arrange": arrange, "combine": combine},
    }
    for name, contents in modules.items():
        module = ModuleType(f"common.engine.layers.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    choice = SimpleNamespace(kernel=draw_rows)
    monkeypatch.setattr(sampler, "choose_draw", lambda vocab_size, device: choice)


def _pack(arrays: object, *, is_pinned: bool) -> Tensor:
    return _real_pack(arrays, is_pinned=False)  # type: ignore[arg-type]


_real_pack = host_copy.pack


def _install_flashinfer(monkeypatch: pytest.MonkeyPatch, counter: LaunchCounter) -> None:
    def first(name: str, width: int = 1) -> Callable[..., Tensor]:
        """A kernel that returns what is like its first argument, or a `width`th part of it."""

        def run(hidden: Tensor, *args: object, **options: object) -> Tensor:
            counter.note(f"flashinfer {name}")
            return hidden.new_empty(*hidden.shape[:-1], hidden.shape[-1] // width)

        return run

    def append(*args: object) -> None:
        counter.note("flashinfer append_paged_kv_cache")

    def rotate(
        positions: Tensor, query: Tensor, key: Tensor, *args: object, **options: object
    ) -> tuple[Tensor, Tensor]:
        counter.note("flashinfer apply_rope_with_cos_sin_cache")
        return query.new_empty(query.shape), key.new_empty(key.shape)

    def route(*args: object) -> None:
        counter.note("flashinfer fused_topk")

    parts: dict[str, dict[str, object]] = {
        "": {
            "BatchDecodeWithPagedKVCacheWrapper": _Paged,
            "fast_decode_plan": lambda *args, **options: counter.note("flashinfer plan"),
            "BatchPrefillWithPagedKVCacheWrapper": _Paged,
            "BatchAttentionWithAttentionSinkWrapper": _Paged,
        },
        ".mla": {"BatchMLAPagedAttentionWrapper": _Latent},
        ".norm": {
            name: first(name)
            for name in (
                "rmsnorm",
                "fused_add_rmsnorm",
                "gemma_rmsnorm",
                "gemma_fused_add_rmsnorm",
            )
        },
        ".fused_moe": {"fused_topk_deepseek": route},
        ".page": {"append_paged_kv_cache": append},
        ".rope": {
            "apply_rope_with_cos_sin_cache": rotate,
            "apply_rope_with_cos_sin_cache_inplace": rotate,
        },
        ".activation": {name: first(name, 2) for name in ("silu_and_mul", "gelu_tanh_and_mul")},
    }
    for name, contents in parts.items():
        module = ModuleType(f"flashinfer{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, f"flashinfer{name}", module)
        if name:
            setattr(sys.modules["flashinfer"], name[1:], module)


def _install_fla(monkeypatch: pytest.MonkeyPatch, counter: LaunchCounter) -> None:
    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        A_log: object = None,
        dt_bias: object = None,
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        **options: object,
    ) -> tuple[Tensor, Tensor]:
        counter.note("fla")
        states = options["initial_state"]
        assert isinstance(states, Tensor)
        return torch.empty_like(v), torch.empty_like(states)

    for name in ("gated_delta_rule", "kda"):
        module = ModuleType(f"fla.ops.{name}")
        for kind in ("chunk", "fused_recurrent"):
            setattr(module, f"{kind}_{name}", run)
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)

    def gated_norm(hidden: Tensor, *args: object) -> Tensor:
        counter.note("fla rms_norm_gated")
        return hidden.new_empty(hidden.shape)

    monkeypatch.setattr(norm, "choose_gated_norm", lambda _: GatedNormChoice(gated_norm, "counted"))
    for package in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for model in (gated_delta_net, kimi_delta):
        monkeypatch.setattr(
            model,
            "choose_delta_kernels",
            lambda shape: DeltaChoice(FlaDelta(is_per_channel=shape.is_per_channel), "counted"),
        )
