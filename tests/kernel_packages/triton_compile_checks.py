"""Our own kernels, compiled for cards that are not here. Run by `packages.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from common.engine.layers import triton_conv, triton_experts, triton_rotation
from common.engine.sampling import triton_draw
from tests.kernel_packages.packages import report_checks

DRAW_ROWS = {
    "logits": "*fp32",
    "seeds": "*i64",
    "positions": "*i64",
    "temperatures": "*fp32",
    "out": "*i64",
    "row_count": "i32",
    "vocab_size": "i32",
    "is_any_drawn": "constexpr",
    "block": "constexpr",
}


def rows_are_compiled(*, is_any_drawn: bool, capability: int) -> None:
    constants = {"is_any_drawn": is_any_drawn, "block": triton_draw.BLOCK}
    compiled = triton.compile(
        ASTSource(triton_draw._draw_rows, DRAW_ROWS, constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": triton_draw.WARP_COUNT},
    )
    assert compiled.asm["cubin"]
    # Quotients and logarithms are those of torch, not the quick ones.
    assert not any(word in compiled.asm["ptx"] for word in (".approx", "div.full"))


HEADS = {
    "heads": "*bf16",
    "weight": "*bf16",
    "angles": "*fp32",
    "out": "*bf16",
    "token_stride": "i32",
    "head_stride": "i32",
    "head_count": "i32",
    "epsilon": "fp32",
    "head_dim": "constexpr",
    "rotated_dim": "constexpr",
    "is_interleaved": "constexpr",
    "is_offset": "constexpr",
}


def heads_are_compiled(*, is_interleaved: bool, capability: int) -> None:
    constants = {
        "head_dim": 256, "rotated_dim": 64, "is_interleaved": is_interleaved, "is_offset": True,
    }  # fmt: skip
    compiled = triton.compile(
        ASTSource(triton_rotation._norm_and_rotate, HEADS, constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 1},
    )
    assert compiled.asm["cubin"] and "cvt.rn.bf16" in compiled.asm["ptx"]
    assert not any(word in compiled.asm["ptx"] for word in (".approx", "div.full"))


ROUTE = {
    "logits": "*bf16",
    "bias": "*fp32",
    "shares": "*bf16",
    "experts": "*i32",
    "expert_count": "i32",
    "scaling": "fp32",
    "count": "constexpr",
    "is_sigmoid": "constexpr",
    "is_normalized": "constexpr",
    "block": "constexpr",
    "width": "constexpr",
}
ARRANGE = {
    "hidden": "*bf16",
    "experts": "*i32",
    "given": "*bf16",
    "places": "*i32",
    "ordered": "*i64",
    "ends": "*i32",
    "token_stride": "i32",
    "choice_count": "i32",
    "expert_count": "i32",
    "size": "i32",
    "per_token": "constexpr",
    "choice_block": "constexpr",
    "expert_block": "constexpr",
    "column_block": "constexpr",
}
COMBINE = {
    "outputs": "*bf16",
    "shares": "*fp32",
    "places": "*i32",
    "beside": "*bf16",
    "beside_gate": "*bf16",
    "out": "*bf16",
    "size": "i32",
    "per_token": "constexpr",
    "has_beside": "constexpr",
    "has_gate": "constexpr",
    "column_block": "constexpr",
}
CONV = {
    "projected": "*bf16",
    "columns": "*i32",
    "firsts": "*i32",
    "sizes": "*i32",
    "weight": "*bf16",
    "bias": "*bf16",
    "states": "*bf16",
    "read": "*i64",
    "write": "*i64",
    "out": "*bf16",
    **dict.fromkeys(("token_count", "token_stride", "column_count", "channel_count"), "i32"),
    "page_stride": "i64",
    **dict.fromkeys(("end_0", "end_1"), "i32"),
    **dict.fromkeys(("offset_1", "offset_2"), "i64"),
    **{f"unit_{segment}": "i32" for segment in range(3)},
    **{f"unit_stride_{segment}": "i32" for segment in range(3)},
    "has_bias": "constexpr",
    "kernel_size": "constexpr",
    "block": "constexpr",
}
KERNELS = {
    "convolution": (
        triton_conv._conv_step,
        CONV,
        {"has_bias": False, "kernel_size": 4, "block": triton_conv.COLUMN_BLOCK},
    ),
    "route to experts": (
        triton_experts._route,
        ROUTE,
        {"count": 10, "is_sigmoid": False, "is_normalized": True, "block": 512, "width": 16},
    ),
    "route to experts by sigmoids": (
        triton_experts._route,
        ROUTE | {"logits": "*fp32", "shares": "*fp32"},
        {"count": 8, "is_sigmoid": True, "is_normalized": True, "block": 512, "width": 8},
    ),
    "order of experts": (
        triton_experts._arrange,
        ARRANGE,
        {
            "per_token": 10,
            "choice_block": triton_experts.CHOICE_BLOCK,
            "expert_block": triton_experts.EXPERT_BLOCK,
            "column_block": triton_experts.COLUMN_BLOCK,
        },
    ),
    "sum of experts": (
        triton_experts._combine,
        COMBINE,
        {
            "per_token": 10,
            "has_beside": True,
            "has_gate": True,
            "column_block": triton_experts.COLUMN_BLOCK,
        },
    ),
}


def kernels_are_compiled(*, name: str, capability: int) -> None:
    kernel, arguments, constants = KERNELS[name]
    compiled = triton.compile(
        ASTSource(kernel, arguments, constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4},
    )
    assert compiled.asm["cubin"]


CHECKS: dict[str, Callable[[], None]] = (
    {
        f"{name}, sm_{capability}": partial(kernels_are_compiled, name=name, capability=capability)
        for name in KERNELS
        for capability in (80, 90, 100)
    }
    | {
        f"{'drawn' if is_any_drawn else 'greedy'} rows, sm_{capability}": partial(
            rows_are_compiled, is_any_drawn=is_any_drawn, capability=capability
        )
        for is_any_drawn in (False, True)
        for capability in (80, 90, 100)
    }
    | {
        f"heads, interleaved {is_interleaved}, sm_{capability}": partial(
            heads_are_compiled, is_interleaved=is_interleaved, capability=capability
        )
        for is_interleaved in (False, True)
        for capability in (80, 90, 100)
    }
)

if __name__ == "__main__":
    report_checks(CHECKS)
