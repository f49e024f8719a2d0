"""The experts of a batch as one product against a loop over tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from common.engine.layers import expert_groups
from common.engine.layers.expert_groups import PADDED_ROWS_MAX, ExpertGroups

Multiply = Callable[[ExpertGroups, Tensor, Tensor], Tensor]
WAYS: dict[str, Multiply] = {
    "multiply": ExpertGroups.multiply,
    "by row": ExpertGroups.multiply_by_row,
    "padded": ExpertGroups.multiply_padded,
    "by expert": ExpertGroups.multiply_by_expert,
}


def groups_of(
    experts: list[int], expert_count: int, row_max: int, *, has_kernel: bool = False
) -> ExpertGroups:
    chosen = torch.tensor(experts)
    return ExpertGroups.of(chosen, expert_count, row_max=row_max, has_kernel=has_kernel)


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_multiplied_by_their_own_expert(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_groups, "BY_ROW_NBYTES", 200)  # one copy of weights or a few

    @settings(max_examples=60, deadline=None)
    @given(
        experts=st.lists(st.integers(0, 5), min_size=1, max_size=12).map(sorted),
        spare=st.integers(0, 3),
        out=st.sampled_from([4, 8]),
        has_kernel=st.booleans(),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    )
    def check(
        experts: list[int], spare: int, out: int, has_kernel: bool, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(len(experts))
        rows = torch.randn(len(experts), 8, generator=generator).to(dtype)
        weights = torch.randn(6, out, 8, generator=generator).to(dtype)
        row_max = max(map(experts.count, experts)) + spare
        groups = groups_of(experts, 6, row_max, has_kernel=has_kernel)
        expected = torch.stack([row @ weights[e].t() for row, e in zip(rows, experts, strict=True)])
        actual = WAYS[way](groups, rows, weights)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected)

    check()


def chosen(row_count: int, expert_count: int, seed: int) -> Tensor:
    """Four experts for each of so many rows, in order."""
    scores = torch.rand(row_count, expert_count, generator=torch.Generator().manual_seed(seed))
    return scores.topk(4).indices.flatten().sort().values


@pytest.mark.parametrize("row_count", [1, 10, 160])
def test_decodes_ask_the_device_for_nothing_where_torch_has_no_kernel(row_count: int) -> None:
    """What a tracer can't follow is a number that Python needs: a recording can't have it."""
    expert_count, generator = 32, torch.Generator().manual_seed(1)
    weights = torch.randn(expert_count, 8, 8, generator=generator)
    rows = torch.randn(row_count * 4, 8, generator=generator)

    def compute(multiply: Multiply) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def run(experts: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
            groups = ExpertGroups.of(experts, expert_count, row_max=row_count, has_kernel=False)
            return multiply(groups, rows, weights)

        return run

    first, second = (chosen(row_count, expert_count, seed) for seed in (1, 2))
    recorded = make_fx(compute(ExpertGroups.multiply), tracing_mode="fake")(first, rows, weights)
    expected = torch.stack([row @ weights[e].t() for row, e in zip(rows, second, strict=True)])
    torch.testing.assert_close(recorded(second, rows, weights), expected)
    with pytest.raises(GuardOnDataDependentSymNode):
        make_fx(compute(ExpertGroups.multiply_by_expert), tracing_mode="fake")(first, rows, weights)


def test_long_chunks_are_multiplied_expert_by_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = groups_of([0, 1, 1], 2, PADDED_ROWS_MAX + 1)
    rows, weights = torch.randn(3, 8), torch.randn(2, 8, 8)
    monkeypatch.setattr(ExpertGroups, "multiply_padded", None)
    monkeypatch.setattr(ExpertGroups, "multiply_by_row", None)
    expected = torch.stack([rows[0] @ weights[0].t(), *(row @ weights[1].t() for row in rows[1:])])
    torch.testing.assert_close(groups.multiply(rows, weights), expected)
