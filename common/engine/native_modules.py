"""The native modules of the engine on a CPU, each built once for each width of vectors."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Elements that they take, as they call them."""
VECTORS = ("avx512", "avx2")
"""Of processors that each module is built for, the fastest first."""


def load_native(name: str) -> ModuleType:
    """A module of `baton_native`, as it is built for this processor.

    Raises: RuntimeError if this processor, or this torch, lacks what it needs.
    """
    reasons = []
    for vectors in VECTORS:
        try:
            native = import_module(f"baton_native.{name}_{vectors}")
        except ImportError as exc:
            reasons.append(f"the native module for {vectors} is not built: {exc}")
            continue
        reason = native.why_unusable()
        if not reason:
            return native
        reasons.append(reason)
    raise RuntimeError("; ".join(reasons))
