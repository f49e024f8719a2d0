"""The Mamba-2 mixer: one projection in, a short convolution, the recurrence, a gate, one out.

    [z | x | B | C | dt] = W_in hidden;  x, B, C = conv(x, B, C);  W_out gated(ssd(x, dt, B, C), z)

Heads are cut over the ranks. What a group's heads share goes where they go: to several ranks if
there are fewer groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.checkpoint.weights import Weight
from common.engine.config.model import ModelConfig
from common.engine.layers.group_norm import GatedGroupNorm
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.linear import ColumnLinear, OutputBlock, RowLinear, features_of, shifted
from common.engine.layers.short_conv import ConvSegment, ShortConv
from common.engine.layers.ssd import SsdInputs, SsdRule, apply_ssd
from common.engine.models.family import gqa_cache
from common.engine.models.layer_pass import LayerPass
from common.engine.models.mamba_config import MambaConfig, MambaFamily
from common.layout.component import CacheComponent
from common.layout.families import mamba_components

STATE = "state"
"""The cache component's name."""


class MambaMixer:
    """hidden [T, hidden size] to the same shape.

    name: of the mixer's tensors in a checkpoint. layer: global id.
    """

    def __init__(
        self,
        context: LayerContext,
        mamba: MambaConfig,
        name: str,
        layer: int,
        *,
        hidden_size: int,
    ) -> None:
        self.name = name
        self.layer = layer
        self.mamba = mamba
        self.heads = context.cut(mamba.head_count)
        blocks = projected_rows(context, mamba)
        self.sizes = [len(rows) for rows in blocks.values()]
        self.projection = ColumnLinear(
            context,
            hidden_size,
            [
                OutputBlock(f"{name}.in_proj", mamba.projected_size, rows, mamba.has_input_bias)
                for rows in blocks.values()
            ],
        )
        self.conv = ShortConv(
            context,
            layer,
            [
                ConvSegment(
                    segment,
                    f"{name}.conv1d",
                    mamba.conv_size,
                    shifted(blocks[segment], -mamba.inner_size),
                    mamba.head_dim if segment == "x" else mamba.state_dim,
                )
                for segment in ("x", "b", "c")
            ],
            kernel_size=mamba.kernel_size,
            has_bias=mamba.has_conv_bias,
        )
        self.per_head = {
            part: context.empty_fp32(len(self.heads)) for part in ("A_log", "D", "dt_bias")
        }
        self.norm = GatedGroupNorm(
            context,
            f"{name}.norm",
            size=mamba.inner_size,
            group_count=mamba.group_count,
            epsilon=mamba.epsilon,
            style=mamba.gate,
        )
        self.output = RowLinear(
            context,
            f"{name}.out_proj",
            input_size=mamba.inner_size,
            output_size=hidden_size,
            has_bias=mamba.has_output_bias,
        )

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor:
        mamba, slots = self.mamba, layer_pass.slots
        token_count = len(hidden)
        z_size, *conv_sizes, dt_size = self.sizes
        gate, convolved, dt = torch.split(
            self.project(hidden), [z_size, sum(conv_sizes), dt_size], dim=-1
        )
        mixed = self.conv(convolved, layer_pass.rows, slots).float()
        x, b, c = torch.split(mixed, conv_sizes, dim=-1)
        inputs = SsdInputs(
            x=x.reshape(token_count, -1, mamba.head_dim),
            dt=F.softplus(dt.float() + self.per_head["dt_bias"]),
            b=b.reshape(token_count, -1, mamba.state_dim),
            c=c.reshape(token_count, -1, mamba.state_dim),
        )
        rule = SsdRule(a=-self.per_head["A_log"].exp(), d=self.per_head["D"])
        before = slots.read(STATE, self.layer)
        states = before.view(*before.shape[:2], mamba.head_dim, mamba.state_dim)
        outputs, states = apply_ssd(rule, inputs, layer_pass.rows, states)
        slots.write(STATE, self.layer, None, states.flatten(2))
        return self.output(self.norm(outputs.flatten(1), gate).to(hidden.dtype))

    def project(self, hidden: Tensor) -> Tensor:
        """This rank's z, x, B, C and dt side by side."""
        return self.projection(hidden)

    def weights(self) -> Iterator[Weight]:
        yield from self.projection.weights()
        yield from self.conv.weights()
        for part, tensor in self.per_head.items():
            yield Weight.cut(f"{self.name}.{part}", self.mamba.head_count, self.heads, tensor)
        yield from self.norm.weights()
        yield from self.output.weights()


def projected_rows(context: LayerContext, mamba: MambaConfig) -> dict[str, range]:
    """The rows of the input projection that this rank computes. x, B and C are channels of the
    convolution too, which has no gate before them.

    gate z | x | B of all groups | C of all groups | dt
    """
    heads, groups = context.cut(mamba.head_count), context.share(mamba.group_count)
    inner = features_of(heads, mamba.head_dim)
    shared, shared_size = features_of(groups, mamba.state_dim), mamba.group_count * mamba.state_dim
    return {
        "z": inner,
        "x": shifted(inner, mamba.inner_size),
        "b": shifted(shared, 2 * mamba.inner_size),
        "c": shifted(shared, 2 * mamba.inner_size + shared_size),
        "dt": shifted(heads, mamba.inner_size + mamba.conv_size),
    }


def mamba_cache(config: ModelConfig, dtype: str) -> tuple[CacheComponent, ...]:
    """Keys and values of the layers that attend, slots of those that recur."""
    family = config.family
    assert isinstance(family, MambaFamily), config.architecture
    mamba = family.mamba
    slots = mamba_components(
        layers=family.mamba_layers,
        heads=(mamba.head_count, mamba.head_dim),
        groups=(mamba.group_count, mamba.state_dim),
        kernel_size=mamba.kernel_size,
        conv_dtype=config.dtype,
    )
    keys_values = (
        replace(
            component,
            layers=family.attention_layers,
            order=component.order if family.is_rotated else "",
        )
        for component in gqa_cache(config, dtype)
    )
    return (*keys_values, *slots)
