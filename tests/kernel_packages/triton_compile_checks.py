"""Our own kernel, compiled for cards that are not here. Run by `packages.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

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


CHECKS: dict[str, Callable[[], None]] = {
    f"{'drawn' if is_any_drawn else 'greedy'} rows, sm_{capability}": partial(
        rows_are_compiled, is_any_drawn=is_any_drawn, capability=capability
    )
    for is_any_drawn in (False, True)
    for capability in (80, 90, 100)
}

if __name__ == "__main__":
    report_checks(CHECKS)
