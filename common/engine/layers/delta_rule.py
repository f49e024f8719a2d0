"""The gated delta rule: a recurrence whose state forgets, and corrects what it recalls of a key.

Per head and token, with a state S [key dim, value dim]:

    S <- exp(g) S          g <= 0 of the whole head, or of every key channel on its own
    S <- S + k (beta (v - k^T S))^T
    o  = q^T S

q and k are normalised to length one, and q is scaled by key dim^-0.5. Everything is fp32, whatever
the model's dtype. A pass of many tokens is computed in chunks, whose inner part is matrix products
for all chunks at once; only the state goes from chunk to chunk (Yang et al., Gated Delta Networks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.layers.sequence_rows import SequencePart, SequenceRows, apply_by_length

STATE = "state"
"""The cache component of S: fp32 per head, a key channel's values side by side."""

NORM_EPSILON = 1e-6
# Rows of a chunk. With a decay per channel the products inside a chunk are no matrix products any
# more, and their cost grows with its size.
HEAD_CHUNK = 64
CHANNEL_CHUNK = 16


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """T tokens; value heads are a multiple of key heads, consecutive ones share a key head.

    query, key: [T, key heads, key dim]. value: [T, heads, value dim].
    log_decay: fp32[T, heads, 1], or [T, heads, key dim]. beta: [T, heads].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor

    def take(self, part: SequencePart) -> DeltaInputs:
        return DeltaInputs(
            part.take_rows(self.query),
            part.take_rows(self.key),
            part.take_rows(self.value),
            part.take_rows(self.log_decay),
            part.take_rows(self.beta),
        )


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """What the decay of a whole head and beta are made of: step, beta: [T, heads]; decay_log,
    step_bias: fp32[heads]."""

    step: Tensor
    beta: Tensor
    decay_log: Tensor
    step_bias: Tensor

    def log_decay(self) -> Tensor:
        """fp32[T, heads, 1]."""
        step = F.softplus(self.step.float() + self.step_bias)
        return (-self.decay_log.exp() * step)[..., None]

    def inputs(self, query: Tensor, key: Tensor, value: Tensor) -> DeltaInputs:
        return DeltaInputs(query, key, value, self.log_decay(), self.beta.sigmoid())


class DeltaKernels(Protocol):
    """Computes the rule on a device. All return (outputs [T, heads, value dim] in the dtype of
    the values, states after the last token fp32[B, heads, key dim, value dim])."""

    name: str

    def step(self, inputs: DeltaInputs, states: Tensor) -> tuple[Tensor, Tensor]:
        """One token of every sequence."""
        ...

    def step_gated(
        self, query: Tensor, key: Tensor, value: Tensor, gates: DeltaGates, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `step`, with what the gates make of theirs."""
        ...

    def run(self, inputs: DeltaInputs, rows: SequenceRows, states: Tensor) -> tuple[Tensor, Tensor]:
        """Several tokens of every sequence."""
        ...


def apply_delta_rule(
    kernels: DeltaKernels, inputs: DeltaInputs, rows: SequenceRows, states: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule over a ragged batch: sequences of one token in one step, the others in chunks.

    states: fp32[B, heads, key dim, value dim] before the first token of each sequence.
    Returns: as `DeltaKernels`.
    """
    return apply_by_length(kernels.step, kernels.run, inputs, rows, states)


class TorchDelta:
    """The rule in plain torch, on every device; what other kernels are checked against."""

    name = "torch"

    def step(self, inputs: DeltaInputs, states: Tensor) -> tuple[Tensor, Tensor]:
        query, key = normalized_query_key(inputs)
        states = states * inputs.log_decay.exp()[..., None]
        recalled = (key[..., None, :] @ states)[..., 0, :]
        update = (inputs.value.float() - recalled) * inputs.beta.float()[..., None]
        states.addcmul_(key[..., None], update[..., None, :])
        outputs = (query[..., None, :] @ states)[..., 0, :]
        return outputs.to(inputs.value.dtype), states

    def step_gated(
        self, query: Tensor, key: Tensor, value: Tensor, gates: DeltaGates, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.step(gates.inputs(query, key, value), states)

    def run(self, inputs: DeltaInputs, rows: SequenceRows, states: Tensor) -> tuple[Tensor, Tensor]:
        is_per_head = inputs.log_decay.shape[-1] == 1
        chunks = rows.chunks(HEAD_CHUNK if is_per_head else CHANNEL_CHUNK)
        query, key = normalized_query_key(inputs)
        beta = inputs.beta.float()[..., None]
        # All [chunk, head, row, ..]. Rows that no token fills change nothing: their beta is zero,
        # and so is their decay.
        packed = [
            chunks.pack(values).transpose(1, 2)
            for values in (query, key, inputs.value.float() * beta, key * beta, inputs.log_decay)
        ]
        state = states[chunks.order]
        outputs = torch.empty_like(packed[2])
        # Wave by wave, so that what is in between stays small: fresh memory for all of a long
        # prompt costs more than its products.
        for wave in chunks.waves:
            count = wave.stop - wave.start
            of_wave = [part[wave] for part in packed]
            outputs[wave], state[:count] = _run_chunk(of_wave, state[:count])
        after = torch.empty_like(state)
        after[chunks.order] = state
        return chunks.unpack(outputs.transpose(1, 2)).to(inputs.value.dtype), after


def _run_chunk(packed: list[Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of every sequence: (outputs, states after), from states before.

    packed: query, key, value * beta, key * beta and log decay, each [sequence, head, row, ..].
    """
    query, key, value_beta, key_beta, log_decay = packed
    decay = log_decay.cumsum(dim=2)
    since_start, last = decay.exp(), decay[:, :, -1:]
    # Share of token j that token i of its chunk sees, by its query, and by its key times beta.
    seen, corrected = _products(query, key_beta, key, decay)
    # (1 + corrected below the diagonal) x = right: one token's correction contains all earlier.
    right = torch.cat((value_beta, key_beta * since_start), dim=-1)
    solved = torch.linalg.solve_triangular(corrected, right, upper=False, unitriangular=True)
    value_dim = value_beta.shape[-1]
    update = solved[..., :value_dim] - solved[..., value_dim:] @ states
    outputs = (query * since_start) @ states + seen @ update
    kept = states * last.exp().transpose(2, 3)
    return outputs, kept + (key * (last - decay).exp()).transpose(2, 3) @ update


def normalized_query_key(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """fp32[T, heads, key dim] each, of length one, the query scaled; one of each per value head."""
    shares = inputs.value.shape[1] // inputs.key.shape[1]
    query, key = (
        _unit_length(heads.float()).repeat_interleave(shares, dim=1)
        for heads in (inputs.query, inputs.key)
    )
    return query * inputs.key.shape[-1] ** -0.5, key


def _unit_length(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt((heads * heads).sum(dim=-1, keepdim=True) + NORM_EPSILON)


def _products(query: Tensor, key_beta: Tensor, key: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """[.., i, j] = sum over channels of x_i key_j exp(decay_i - decay_j), of the query and of the
    key times beta; 0 for j > i.

    decay: summed up inside the chunk, so that no exponent is positive for j <= i. The others could
    overflow; they are masked before, or not computed.
    """
    if decay.shape[-1] == 1:
        exponents = decay - decay.transpose(2, 3)
        is_later = torch.ones(exponents.shape[2:], dtype=torch.bool, device=decay.device).triu(1)
        between = exponents.masked_fill_(is_later, float("-inf")).exp_()
        turned = key.transpose(2, 3)
        return (query @ turned).mul_(between), (key_beta @ turned).mul_(between)
    shape = (*key.shape[:3], key.shape[2])
    by_query, by_key = key.new_zeros(shape), key.new_zeros(shape)
    for j in range(key.shape[2]):
        weighted = (decay[:, :, j:] - decay[:, :, j : j + 1]).exp_() * key[:, :, j : j + 1]
        by_query[:, :, j:, j] = (query[:, :, j:] * weighted).sum(dim=-1)
        by_key[:, :, j:, j] = (key_beta[:, :, j:] * weighted).sum(dim=-1)
    return by_query, by_key
