"""The native modules of the engine on a CPU, which are built for some processors alone."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Elements that they take, as they call them."""


def load_native(name: str) -> ModuleType:
    """A module of `baton_native` that may run here.

    Raises: RuntimeError if this processor, or this torch, lacks what it needs.
    """
    try:
        native = import_module(f"baton_native.{name}")
    except ImportError as exc:
        raise RuntimeError(f"the native module is not built for this processor: {exc}") from exc
    if reason := native.why_unusable():
        raise RuntimeError(reason)
    return native
