"""The kernels of a layer's small functions, on whichever device."""

from __future__ import annotations

from common.engine.layers.fused import FusedKernels
from common.engine.layers.fused_cpu import CpuKernels

AnyKernels = FusedKernels | CpuKernels
