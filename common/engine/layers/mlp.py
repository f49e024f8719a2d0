"""The gated MLP: down(silu(gate(x)) * up(x)), its inner features cut over tensor parallel ranks.

What stands for silu(gate) * up may be another function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.nn.functional as F
from torch import Tensor

from common.engine.checkpoint.weights import Weight
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.linear import ColumnLinear, OutputBlock, RowLinear

Activation = Callable[[Tensor], Tensor]
"""[.., 2 n], the gate in the first half, to [.., n]."""


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [.., 2 n], the gate in the first half: [.., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gated_gelu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up of [.., 2 n], GELU in its tanh form: [.., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def squared_relu(up: Tensor) -> Tensor:
    """relu(up)^2, of a layer without a gate."""
    return F.relu(up).square()


KERNEL_WIDTH = 8
"""Kernels read 16 bytes at a time, of gates and of ups: so many elements of two bytes."""


def fastest(activation: Activation, context: LayerContext, inner_size: int) -> Activation:
    """The same activation of gates of this size as one kernel, where there is one."""
    fused = context.fused
    if fused is None or inner_size % KERNEL_WIDTH:
        return activation
    kernels: dict[Activation, Activation] = {
        gated_silu: fused.gated_silu,
        gated_gelu: fused.gated_gelu,
    }
    return kernels.get(activation, activation)


class GatedMlp:
    """activation: between the two products, if it is another one."""

    def __init__(
        self,
        context: LayerContext,
        name: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        has_bias: bool = False,
        activation: Activation = gated_silu,
    ) -> None:
        inner = context.cut(intermediate_size)
        self.activation = fastest(activation, context, len(inner))
        self.gate_up = ColumnLinear(
            context,
            hidden_size,
            [
                OutputBlock(f"{name}.{part}", intermediate_size, inner, has_bias)
                for part in ("gate_proj", "up_proj")
            ],
        )
        self.down = RowLinear(
            context,
            f"{name}.down_proj",
            input_size=intermediate_size,
            output_size=hidden_size,
            has_bias=has_bias,
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self.activation(self.gate_up(hidden)))

    def weights(self) -> Iterator[Weight]:
        yield from self.gate_up.weights()
        yield from self.down.weights()
