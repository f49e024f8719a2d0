"""The experts of a batch as one product against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.layers import moe
from common.engine.layers.moe import ExpertGroups


@pytest.mark.parametrize("has_grouped_kernel", [True, False])
def test_rows_are_multiplied_by_their_own_expert(
    has_grouped_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "_takes_groups", lambda rows, weights: has_grouped_kernel)

    @settings(max_examples=40, deadline=None)
    @given(
        experts=st.lists(st.integers(0, 5), min_size=1, max_size=12).map(sorted),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    )
    def check(experts: list[int], dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(len(experts))
        rows = torch.randn(len(experts), 8, generator=generator).to(dtype)
        weights = torch.randn(6, 4, 8, generator=generator).to(dtype)
        groups = ExpertGroups.of(torch.tensor(experts), expert_count=6)
        expected = torch.stack([row @ weights[e].t() for row, e in zip(rows, experts, strict=True)])
        actual = groups.multiply(rows, weights)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected)

    check()
