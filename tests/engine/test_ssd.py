"""The recurrence of Mamba-2 in chunks against one token at a time, and the norm behind it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.distributed import ParallelContext
from common.engine.layers.group_norm import GatedGroupNorm, GateStyle
from common.engine.layers.layer_context import LayerContext
from common.engine.layers.sequence_rows import SequenceRows
from common.engine.layers.ssd import CHUNK, SsdInputs, SsdRule, apply_ssd, decay_between
from tests.families.ranks import Crew, contexts

HEADS, GROUPS, HEAD_DIM, STATE_DIM = 6, 2, 5, 4
CPU = torch.device("cpu")


def draw(token_count: int, *, dt_max: float = 0.5) -> tuple[SsdRule, SsdInputs]:
    generator = torch.Generator().manual_seed(token_count)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rule = SsdRule(a=-torch.rand(HEADS, generator=generator) - 0.1, d=randn(HEADS))
    inputs = SsdInputs(
        x=randn(token_count, HEADS, HEAD_DIM),
        dt=torch.rand(token_count, HEADS, generator=generator) * dt_max,
        b=randn(token_count, GROUPS, STATE_DIM),
        c=randn(token_count, GROUPS, STATE_DIM),
    )
    return rule, inputs


def slow(rule: SsdRule, inputs: SsdInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence as it is written down, in double precision, token after token."""
    state = state.double()
    outputs = torch.empty(inputs.x.shape, dtype=torch.float64)
    shares = HEADS // GROUPS
    for token in range(len(inputs.x)):
        x, dt = inputs.x[token].double(), inputs.dt[token].double()[:, None]
        b = inputs.b[token].double().repeat_interleave(shares, dim=0)
        c = inputs.c[token].double().repeat_interleave(shares, dim=0)
        decay = torch.exp(dt * rule.a.double()[:, None])
        state = decay[:, :, None] * state + (dt * x)[:, :, None] * b[:, None]
        outputs[token] = (state * c[:, None]).sum(-1) + rule.d.double()[:, None] * x
    return outputs.float(), state.float()


@pytest.mark.parametrize(
    "lengths",
    [
        (1, 1, 1),
        (5, CHUNK - 1, CHUNK, CHUNK + 1),
        # Decodes beside prompts, and sequences whose chunks end at different times.
        (1, 2 * CHUNK + 3, 1, 7, CHUNK),
    ],
    ids=["decodes", "chunk ends", "mixed"],
)
def test_a_ragged_batch_gives_what_every_sequence_gives_alone(lengths: tuple[int, ...]) -> None:
    rule, inputs = draw(sum(lengths))
    states = torch.randn(
        len(lengths), HEADS, HEAD_DIM, STATE_DIM, generator=torch.Generator().manual_seed(1)
    )
    outputs, after = apply_ssd(rule, inputs, SequenceRows(lengths, CPU), states)
    first = 0
    for index, length in enumerate(lengths):
        rows = slice(first, first + length)
        own = SsdInputs(inputs.x[rows], inputs.dt[rows], inputs.b[rows], inputs.c[rows])
        expected, expected_after = slow(rule, own, states[index])
        torch.testing.assert_close(outputs[rows], expected, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(after[index], expected_after, atol=2e-5, rtol=1e-5)
        first = rows.stop


def test_a_decay_is_as_exact_behind_many_strong_ones_as_at_first() -> None:
    log_decay = torch.full((1, CHUNK), -1000.0)
    log_decay[0, -1] = -1e-3
    between = decay_between(log_decay)
    # The difference of two sums of 63,000 would be off by more than a thousandth.
    assert between[0, -1, -2].item() == pytest.approx(torch.tensor(-1e-3).exp().item(), rel=1e-7)
    assert torch.equal(between[0].diagonal(), torch.ones(CHUNK))
    assert not between[0].triu(1).any()


def norm_of(rank: ParallelContext, groups: int, style: GateStyle, weight: Tensor) -> GatedGroupNorm:
    norm = GatedGroupNorm(
        LayerContext(rank, CPU, torch.float32),
        "norm",
        size=len(weight),
        group_count=groups,
        epsilon=1e-5,
        style=style,
    )
    norm.weight.copy_(weight[norm.channels.start : norm.channels.stop])
    return norm


@pytest.mark.parametrize("style", GateStyle)
@pytest.mark.parametrize(("groups", "tp_size"), [(4, 2), (1, 2), (2, 4)])
def test_ranks_normalise_a_group_that_they_share(
    groups: int, tp_size: int, style: GateStyle
) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, gate, weight = (torch.randn(shape, generator=generator) for shape in ((3, 16),) * 3)
    weight = weight[0]
    ranks = contexts(tp_size, 1)
    norms = [norm_of(rank, groups, style, weight) for rank in ranks]

    def part(values: Tensor, rank: int) -> Tensor:
        channels = norms[rank].channels
        return values[:, channels.start : channels.stop]

    found = Crew(ranks).run(lambda rank: norms[rank](part(hidden, rank), part(gate, rank)))
    factor = F.silu(gate)
    grouped = hidden * factor if style is GateStyle.BEFORE_NORM else hidden
    grouped = F.rms_norm(grouped.view(3, groups, -1), (16 // groups,), None, 1e-5).view(3, 16)
    expected = {
        GateStyle.BEFORE_NORM: grouped * weight,
        GateStyle.BEHIND_NORM: grouped * weight * factor,
        GateStyle.NO_NORM: hidden * factor,
    }[style]
    torch.testing.assert_close(torch.cat(found, dim=1), expected)
