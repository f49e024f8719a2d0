"""The mixer of Qwen3-Next and Qwen3.5: a short convolution, the gated delta rule, a gated norm.

Heads of the recurrence are cut over the ranks by value head. Key heads go with the value heads they
serve, so consecutive ranks share one if there are fewer of them, as they share KV heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.engine.checkpoint.weights import Weight
from common.engine.config.model import ModelConfig
from common.engine.layers.choose_delta import DeltaShape, choose_delta_kernels
from common.engine.layers.conv_step import ConvParts, columns_of
from common.engine.layers.delta_rule import STATE, DeltaGates, apply_delta_rule
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.linear import ColumnLinear, OutputBlock, RowLinear, features_of, shifted
from common.engine.layers.norm import GatedNorm
from common.engine.layers.short_conv import ConvSegment, ShortConv
from common.engine.models.layer_pass import LayerPass
from common.engine.models.qwen3_next_config import DeltaNetConfig


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of the recurrence that a rank computes, by global id."""

    key: range
    value: range

    @staticmethod
    def of_rank(delta: DeltaNetConfig, context: LayerContext) -> DeltaHeads:
        return DeltaHeads(
            key=context.share(delta.key_head_count),
            value=context.cut(delta.value_head_count),
        )


class GatedDeltaNet:
    """Stands where a layer's attention would."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        name = f"model.layers.{layer}.linear_attn"
        delta = delta_config(config)
        heads = DeltaHeads.of_rank(delta, context)
        self.layer = layer
        self.delta = delta
        self.head_count = len(heads.value)
        self.projection: Projection
        if delta.is_fused:
            self.projection = FusedProjection(context, name, config.hidden_size, delta, heads)
        else:
            self.projection = SplitProjection(context, name, config.hidden_size, delta, heads)
        self.conv = ShortConv(
            context,
            layer,
            conv_segments(f"{name}.conv1d", delta, heads),
            kernel_size=delta.kernel_size,
        )
        self.parts: ConvParts | None = None
        if self.conv.in_one is not None:
            columns = self.projection.columns()
            self.parts = ConvParts(columns, len(self.conv.sizes), context.device)
        self.decay_log = context.empty_fp32(self.head_count)
        self.step_bias = context.empty_fp32(self.head_count)
        self.norm = GatedNorm(context, f"{name}.norm", delta.value_dim, config.rms_norm_eps)
        self.output = RowLinear(
            context,
            f"{name}.out_proj",
            input_size=delta.value_head_count * delta.value_dim,
            output_size=config.hidden_size,
        )
        self._per_head = (
            (f"{name}.A_log", self.decay_log, heads.value),
            (f"{name}.dt_bias", self.step_bias, heads.value),
        )
        self.kernels = choose_delta_kernels(delta_shape(config, context)).kernels

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor:
        delta, rows, slots = self.delta, layer_pass.rows, layer_pass.slots
        query, key, value, gate, beta, step = self._convolve(hidden, layer_pass)
        heads = (
            _by_head(query, delta.key_dim),
            _by_head(key, delta.key_dim),
            _by_head(value, delta.value_dim),
        )
        gates = DeltaGates(step, beta, self.decay_log, self.step_bias)
        kept = slots.read(STATE, self.layer).float()
        states = kept.view(len(kept), self.head_count, delta.key_dim, delta.value_dim)
        if rows.is_single:
            outputs, states = self.kernels.step_gated(*heads, gates, states)
        else:
            outputs, states = apply_delta_rule(self.kernels, gates.inputs(*heads), rows, states)
        slots.write(STATE, self.layer, None, states.flatten(2))
        gated = self.norm.gated(outputs, _by_head(gate, delta.value_dim))
        return self.output(gated.flatten(1))

    def _convolve(self, hidden: Tensor, layer_pass: LayerPass) -> list[Tensor]:
        """Queries, keys and values behind the convolution, gates, and what makes beta and the
        decay."""
        rows, slots = layer_pass.rows, layer_pass.slots
        projected = self.projection.linear(hidden)
        if self.parts is not None:
            found = self.conv.take(projected, self.parts, rows, slots)
            if found is not None:
                return found
        split = self.projection.split(projected)
        mixed = self.conv(split.mixed, rows, slots)
        return [*torch.split(mixed, self.conv.sizes, dim=-1), split.gate, split.beta, split.step]

    def weights(self) -> Iterator[Weight]:
        yield from self.projection.weights()
        yield from self.conv.weights()
        for name, target, heads in self._per_head:
            yield Weight.cut(name, self.delta.value_head_count, heads, target)
        yield from self.norm.weights()
        yield from self.output.weights()


@dataclass(frozen=True, slots=True)
class Projected:
    """Inputs of the recurrence; H value heads on this rank.

    mixed: [T, all q | all k | all v], before the convolution. gate: [T, H * value dim].
    beta, step: [T, H], before their activations.
    """

    mixed: Tensor
    gate: Tensor
    beta: Tensor
    step: Tensor


class Projection(Protocol):
    linear: ColumnLinear

    def split(self, projected: Tensor) -> Projected:
        """The parts of what `linear` makes."""
        ...

    def columns(self) -> list[list[int]]:
        """Where they lie in it: q, k, v, gate, beta and step."""
        ...

    def weights(self) -> Iterator[Weight]: ...


class FusedProjection:
    """Rows by key head: in_proj_qkvz [q | k | v of its value heads | z of them], and in_proj_ba
    likewise."""

    def __init__(
        self,
        context: LayerContext,
        name: str,
        hidden_size: int,
        delta: DeltaNetConfig,
        heads: DeltaHeads,
    ) -> None:
        shares = delta.value_head_count // delta.key_head_count
        self.key_head_count = len(heads.key)
        self.shares = len(heads.value) // len(heads.key)
        self.key_dim, self.value_dim = delta.key_dim, delta.value_dim
        wide = shares * delta.value_dim
        wide_rows, narrow_rows = [], []
        for head in heads.key:
            first = head * (2 * delta.key_dim + 2 * wide)
            wide_rows.append(range(first, first + 2 * delta.key_dim))
            # A rank may compute some of the value heads only.
            own = range(
                max(heads.value.start - head * shares, 0),
                min(heads.value.stop - head * shares, shares),
            )
            for part in range(2):
                behind = first + 2 * delta.key_dim + part * wide
                wide_rows.append(shifted(features_of(own, delta.value_dim), behind))
                narrow_rows.append(shifted(own, (2 * head + part) * shares))
        row_count = 2 * (delta.key_head_count * delta.key_dim) + 2 * delta.key_head_count * wide
        blocks = [
            OutputBlock(f"{name}.{part}", size, rows)
            for part, size, part_rows in (
                ("in_proj_qkvz", row_count, wide_rows),
                ("in_proj_ba", 2 * delta.value_head_count, narrow_rows),
            )
            for rows in _merged(part_rows)
        ]
        self.linear = ColumnLinear(context, hidden_size, blocks)

    def columns(self) -> list[list[int]]:
        wide = self.shares * self.value_dim
        per_head = 2 * self.key_dim + 2 * wide
        behind = self.key_head_count * per_head

        def of_heads(first: int, width: int, count: int) -> list[int]:
            heads = range(self.key_head_count)
            return [first + head * width + i for head in heads for i in range(count)]

        return [
            of_heads(0, per_head, self.key_dim),
            of_heads(self.key_dim, per_head, self.key_dim),
            of_heads(2 * self.key_dim, per_head, wide),
            of_heads(2 * self.key_dim + wide, per_head, wide),
            of_heads(behind, 2 * self.shares, self.shares),
            of_heads(behind + self.shares, 2 * self.shares, self.shares),
        ]

    def split(self, projected: Tensor) -> Projected:
        wide = self.shares * self.value_dim
        per_head = 2 * self.key_dim + 2 * wide
        first, second = torch.split(
            projected,
            [self.key_head_count * per_head, self.key_head_count * 2 * self.shares],
            dim=-1,
        )
        by_head = _by_head(first, per_head)
        query, key, value, gate = torch.split(
            by_head, [self.key_dim, self.key_dim, wide, wide], dim=-1
        )
        beta, step = _by_head(second, 2 * self.shares).chunk(2, dim=-1)
        return Projected(
            mixed=torch.cat([part.flatten(1) for part in (query, key, value)], dim=-1),
            gate=gate.flatten(1),
            beta=beta.flatten(1),
            step=step.flatten(1),
        )

    def weights(self) -> Iterator[Weight]:
        return self.linear.weights()


class SplitProjection:
    """in_proj_qkv [all q | all k | all v], and in_proj_z, in_proj_b and in_proj_a by value head."""

    def __init__(
        self,
        context: LayerContext,
        name: str,
        hidden_size: int,
        delta: DeltaNetConfig,
        heads: DeltaHeads,
    ) -> None:
        value_rows = features_of(heads.value, delta.value_dim)
        blocks = [
            OutputBlock(segment.tensor, segment.size, segment.channels)
            for segment in conv_segments(f"{name}.in_proj_qkv", delta, heads)
        ]
        mixed_size = sum(len(block.rows) for block in blocks)
        blocks += [
            OutputBlock(f"{name}.in_proj_z", delta.value_head_count * delta.value_dim, value_rows),
            OutputBlock(f"{name}.in_proj_b", delta.value_head_count, heads.value),
            OutputBlock(f"{name}.in_proj_a", delta.value_head_count, heads.value),
        ]
        self.sizes = [mixed_size, len(value_rows), len(heads.value), len(heads.value)]
        self.linear = ColumnLinear(context, hidden_size, blocks)

    def columns(self) -> list[list[int]]:
        return columns_of(self.linear)

    def split(self, projected: Tensor) -> Projected:
        return Projected(*torch.split(projected, self.sizes, dim=-1))

    def weights(self) -> Iterator[Weight]:
        return self.linear.weights()


def conv_segments(tensor: str, delta: DeltaNetConfig, heads: DeltaHeads) -> list[ConvSegment]:
    """q, k and v of a tensor whose first dimension is [all q | all k | all v]."""
    key_size = delta.key_head_count * delta.key_dim
    size = 2 * key_size + delta.value_head_count * delta.value_dim
    keys = features_of(heads.key, delta.key_dim)
    values = features_of(heads.value, delta.value_dim)
    return [
        ConvSegment("q", tensor, size, keys, delta.key_dim),
        ConvSegment("k", tensor, size, shifted(keys, key_size), delta.key_dim),
        ConvSegment("v", tensor, size, shifted(values, 2 * key_size), delta.value_dim),
    ]


def delta_shape(config: ModelConfig, context: LayerContext) -> DeltaShape:
    """Properties by which kernels are chosen."""
    delta = delta_config(config)
    heads = DeltaHeads.of_rank(delta, context)
    return DeltaShape(
        key_head_count=len(heads.key),
        head_count=len(heads.value),
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        is_per_channel=False,
        dtype=context.dtype,
        device=context.device,
    )


def delta_config(config: ModelConfig) -> DeltaNetConfig:
    """Settings that only these layers have."""
    assert isinstance(config.family, DeltaNetConfig), config.architecture
    return config.family


def _by_head(features: Tensor, dim: int) -> Tensor:
    """[T, heads * dim] to [T, heads, dim]."""
    return features.reshape(len(features), -1, dim)


def _merged(parts: Iterable[range]) -> list[range]:
    """The same rows in the same order, neighbours joined."""
    merged: list[range] = []
    for part in parts:
        if merged and merged[-1].stop == part.start:
            merged[-1] = range(merged[-1].start, part.stop)
        else:
            merged.append(part)
    return merged
