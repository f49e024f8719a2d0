"""The mixer of Kimi-Linear and Ling 3.0: a short convolution, the delta rule with a decay of every
key channel, a gated norm. Its heads, keys and values alike, are cut over the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.checkpoint.weights import TensorSlice, Weight
from common.engine.config.model import ModelConfig
from common.engine.layers.choose_delta import DeltaShape, choose_delta_kernels
from common.engine.layers.conv_step import ConvParts, columns_of
from common.engine.layers.delta_rule import STATE, DeltaInputs, apply_delta_rule
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.linear import ColumnLinear, OutputBlock, RowLinear, features_of
from common.engine.layers.norm import SigmoidGatedNorm
from common.engine.layers.short_conv import ConvSegment, ShortConv
from common.engine.models.kda_config import KdaConfig, kda_config
from common.engine.models.layer_pass import LayerPass


class KimiDelta:
    """Stands where a layer's attention would."""

    def __init__(self, context: LayerContext, config: ModelConfig, layer: int) -> None:
        name = f"model.layers.{layer}.self_attn"
        kda = kda_config(config)
        size, dim = kda.head_count * kda.head_dim, kda.head_dim
        heads = context.cut(kda.head_count)
        features = features_of(heads, dim)
        self.name, self.layer, self.kda = name, layer, kda
        self.heads, self.features = heads, features
        blocks = [OutputBlock(f"{name}.{part}_proj", size, features) for part in "qkv"]
        blocks.append(OutputBlock(f"{name}.b_proj", kda.head_count, heads))
        # Of decays and output gates: the values themselves, or a low rank to be projected up.
        self.decay_up: ColumnLinear | None = None
        self.gate_up: ColumnLinear | None = None
        if kda.gate_rank is None:
            blocks += [OutputBlock(f"{name}.{part}_proj", size, features) for part in "fg"]
        else:
            rank = kda.gate_rank
            blocks += [OutputBlock.whole(f"{name}.{part}_a_proj", rank) for part in "fg"]
            self.decay_up, self.gate_up = (
                ColumnLinear(context, rank, [OutputBlock(f"{name}.{part}_b_proj", size, features)])
                for part in "fg"
            )
        self.projection = ColumnLinear(context, config.hidden_size, blocks)
        self.sizes = [3 * len(features), *(len(block.rows) for block in blocks[3:])]
        self.conv = ShortConv(
            context,
            layer,
            [ConvSegment(part, f"{name}.{part}_conv1d", size, features, dim) for part in "qkv"],
            kernel_size=kda.kernel_size,
        )
        self.parts: ConvParts | None = None
        if self.conv.in_one is not None:
            columns = columns_of(self.projection)
            self.parts = ConvParts(columns, len(self.conv.sizes), context.device)
        self.decay_log = context.empty_fp32(len(heads))
        self.step_bias = context.empty_fp32(len(heads), dim)
        self.norm = SigmoidGatedNorm(context, f"{name}.o_norm", dim, config.rms_norm_eps)
        self.output = RowLinear(
            context,
            f"{name}.o_proj",
            input_size=size,
            output_size=config.hidden_size,
        )
        self.kernels = choose_delta_kernels(delta_shape(kda, context)).kernels

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor:
        slots, rows = layer_pass.slots, layer_pass.rows
        query, key, value, beta, decay, gate = self._convolve(hidden, layer_pass)
        if self.decay_up is not None and self.gate_up is not None:
            decay, gate = self.decay_up(decay), self.gate_up(gate)
        query, key, value = (self._by_head(part) for part in (query, key, value))
        inputs = DeltaInputs(query, key, value, self._log_decay(decay), beta.sigmoid())
        kept = slots.read(STATE, self.layer).float()
        states = kept.view(*kept.shape[:2], self.kda.head_dim, self.kda.head_dim)
        outputs, states = apply_delta_rule(self.kernels, inputs, rows, states)
        slots.write(STATE, self.layer, None, states.flatten(2))
        return self.output(self.norm.gated(outputs, self._by_head(gate)).flatten(1))

    def _convolve(self, hidden: Tensor, layer_pass: LayerPass) -> list[Tensor]:
        """Queries, keys and values behind the convolution, and what makes betas, decays, gates."""
        rows, slots = layer_pass.rows, layer_pass.slots
        projected = self.projection(hidden)
        if self.parts is not None:
            found = self.conv.take(projected, self.parts, rows, slots)
            if found is not None:
                return found
        mixed, *others = torch.split(projected, self.sizes, dim=-1)
        return [*self.conv(mixed, rows, slots).chunk(3, dim=-1), *others]

    def weights(self) -> Iterator[Weight]:
        kda = self.kda
        yield from self.projection.weights()
        if self.decay_up is not None and self.gate_up is not None:
            yield from self.decay_up.weights()
            yield from self.gate_up.weights()
        yield from self.conv.weights()
        if kda.gate_rank is None:
            yield Weight.cut(f"{self.name}.A_log", kda.head_count, self.heads, self.decay_log)
        else:
            whole, heads = slice(None), slice(self.heads.start, self.heads.stop)
            piece = TensorSlice(
                f"{self.name}.A_log",
                (1, 1, kda.head_count, 1),
                (whole, whole, heads, whole),
                self.decay_log.view(1, 1, -1, 1),
            )
            yield Weight(((piece,),))
        size = kda.head_count * kda.head_dim
        yield Weight.cut(f"{self.name}.dt_bias", size, self.features, self.step_bias.view(-1))
        yield from self.norm.weights()
        yield from self.output.weights()

    # ----------------------------------------------------------------------------------------------

    def _log_decay(self, step: Tensor) -> Tensor:
        """fp32[T, heads, head dim] of the projected [T, heads * head dim]; none is above 0."""
        step = self._by_head(step).float() + self.step_bias
        rate = self.decay_log.exp()[:, None]
        if self.kda.decay_floor is None:
            return -rate * F.softplus(step)
        return self.kda.decay_floor * (rate * step).sigmoid()

    def _by_head(self, features: Tensor) -> Tensor:
        return features.reshape(len(features), -1, self.kda.head_dim)


def delta_shape(kda: KdaConfig, context: LayerContext) -> DeltaShape:
    """Properties by which kernels are chosen."""
    head_count = len(context.cut(kda.head_count))
    return DeltaShape(
        key_head_count=head_count,
        head_count=head_count,
        key_dim=kda.head_dim,
        value_dim=kda.head_dim,
        is_per_channel=True,
        dtype=context.dtype,
        device=context.device,
    )
