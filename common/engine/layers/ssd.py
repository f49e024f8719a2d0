"""The recurrence of Mamba-2: a state that forgets by head, and takes in one outer product a token.

Per head and token, with a state S [head dim, state dim] and a step dt >= 0:

    S <- exp(dt A) S + (dt x) B^T        A < 0 of the head
    y  = S C + D x

B and C are shared by the heads of a group. Everything is fp32, whatever the model's dtype. A pass
of many tokens is computed in chunks, whose inner part is matrix products for all chunks at once;
only the state goes from chunk to chunk (Dao and Gu, Transformers are SSMs).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from common.engine.layers.sequence_rows import (
    RowChunks,
    SequencePart,
    SequenceRows,
    apply_by_length,
)

# Rows of a chunk: what is held is a square of it for every head and chunk.
CHUNK = 64


@dataclass(frozen=True, slots=True)
class SsdInputs:
    """T tokens, all fp32; heads are a multiple of groups, consecutive ones share a group.

    x: [T, heads, head dim]. dt: [T, heads]. b, c: [T, groups, state dim].
    """

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor

    def take(self, part: SequencePart) -> SsdInputs:
        return SsdInputs(
            part.take_rows(self.x),
            part.take_rows(self.dt),
            part.take_rows(self.b),
            part.take_rows(self.c),
        )


@dataclass(frozen=True, slots=True)
class SsdRule:
    """Learned parameters of heads: fp32[heads] each. a: below 0, of the decay. d: of x itself."""

    a: Tensor
    d: Tensor


def apply_ssd(
    rule: SsdRule, inputs: SsdInputs, rows: SequenceRows, states: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence over a ragged batch: sequences of one token in one step, the others in chunks.

    states: fp32[B, heads, head dim, state dim] before the first token of each sequence.
    Returns: (y fp32[T, heads, head dim], states after the last token of each sequence).
    """
    return apply_by_length(partial(_step, rule), partial(_run, rule), inputs, rows, states)


def _step(rule: SsdRule, inputs: SsdInputs, states: Tensor) -> tuple[Tensor, Tensor]:
    """One token of every sequence."""
    count, head_count, head_dim = inputs.x.shape
    group_count = inputs.b.shape[1]
    grouped = (count, group_count, head_count // group_count, head_dim)
    taken = (inputs.x * inputs.dt[:, :, None]).view(grouped)
    added = taken[..., None] * inputs.b[:, :, None, None]
    states = states * (inputs.dt * rule.a).exp()[:, :, None, None]
    states = states + added.view(states.shape)
    recalled = (states.view(added.shape) * inputs.c[:, :, None, None]).sum(dim=-1)
    return recalled.view(inputs.x.shape) + rule.d[:, None] * inputs.x, states


def _run(
    rule: SsdRule, inputs: SsdInputs, rows: SequenceRows, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Several tokens of every sequence.

    Letters: n chunk, q and k row of a chunk, g group, r head of a group, p of head dim, s of state
    dim. Rows that no token fills change nothing: their dt is zero, and so is their decay.
    """
    chunks = rows.chunks(CHUNK)
    group_count, state_dim = inputs.b.shape[1:]
    head_dim = inputs.x.shape[2]
    by_group = (chunks.count, CHUNK, group_count, -1)
    taken = chunks.pack(inputs.x * inputs.dt[:, :, None]).view(*by_group, head_dim)
    b, c = chunks.pack(inputs.b), chunks.pack(inputs.c)
    log_decay = chunks.pack(inputs.dt * rule.a).view(by_group).permute(0, 2, 3, 1)

    between = decay_between(log_decay)
    seen = torch.einsum("nqgs,nkgs->ngqk", c, b)[:, :, None] * between
    outputs = torch.einsum("ngrqk,nkgrp->nqgrp", seen, taken)
    # Each row's share of the state at the end of its chunk.
    left = taken * between[:, :, :, -1].permute(0, 3, 1, 2)[..., None]
    added = torch.einsum("nqgrp,nqgs->ngrps", left, b)
    from_start = log_decay.cumsum(dim=-1).exp()

    state = states[chunks.order].view(len(states), group_count, -1, head_dim, state_dim)
    _carry(chunks, state, outputs, c, added, from_start)
    after = torch.empty_like(states)
    after[chunks.order] = state.view(states.shape)
    unpacked = chunks.unpack(outputs.reshape(chunks.count, CHUNK, -1, head_dim))
    return unpacked + rule.d[:, None] * inputs.x, after


def _carry(
    chunks: RowChunks,
    state: Tensor,
    outputs: Tensor,
    c: Tensor,
    added: Tensor,
    from_start: Tensor,
) -> None:
    """From chunk to chunk: adds to `outputs` what rows see of earlier chunks, and leaves in `state`
    [B, g, r, p, s] that after the last one. from_start: decays [n, g, r, q] since the chunk began.
    """
    for wave in chunks.waves:
        count = wave.stop - wave.start
        before = state[:count]
        recalled = torch.einsum("nqgs,ngrps->nqgrp", c[wave], before)
        outputs[wave] += recalled * from_start[wave].permute(0, 3, 1, 2)[..., None]
        state[:count] = before * from_start[wave, ..., -1, None, None] + added[wave]


def decay_between(log_decay: Tensor) -> Tensor:
    """[.., q, k] = exp of the sum of log_decay[.., k + 1 .. q], and 0 for k > q.

    Sums are taken over just these, not as differences of sums from the first row on: those grow
    with a chunk, and their rounding with them.
    """
    size = log_decay.shape[-1]
    is_up_to = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril()
    spread = log_decay[..., :, None].expand(*log_decay.shape, size)
    sums = spread.masked_fill(~is_up_to.tril(-1), 0.0).cumsum(dim=-2)
    return sums.masked_fill_(~is_up_to, float("-inf")).exp_()
