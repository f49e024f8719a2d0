"""What a decode step launches on a GPU: a kernel more in any of these is a change to be seen.

ARCHITECTURE.md and `python -m tests.launches` say the same figures.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.launches.counter import DEVICE, LaunchCounter
from tests.launches.step import AROUND, DRAWN, GREEDY, INSIDE, count_step

LAYERS = {
    "llama": {"GqaAttention, GatedMlp": 10},
    "qwen3": {"GqaAttention, GatedMlp": 10},
    "deepseek_v3": {"MlaAttention, GatedMlp": 15, "MlaAttention, GroupedMoeMlp": 23},
    "qwen3_next": {"GatedDeltaNet, SharedMoeMlp": 20, "GatedAttention, SharedMoeMlp": 21},
}
OUTSIDE = {
    "llama": (16, 17),
    "qwen3": (16, 17),
    "deepseek_v3": (21, 22),
    "qwen3_next": (17, 18),
}
"""Of all else in a step: of greedy rows, and of rows that are drawn."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_a_step_launches_no_kernel_more(name: str) -> None:
    greedy, drawn = count_step(name, GREEDY), count_step(name, DRAWN)
    assert greedy.layers == drawn.layers == LAYERS[name]
    assert (greedy.outside, drawn.outside) == OUTSIDE[name], (greedy.names, drawn.names)
    assert greedy.names[INSIDE] == drawn.names[INSIDE]
    assert greedy.names[AROUND].total() < drawn.names[AROUND].total()


def test_views_and_memory_are_no_launches_and_the_host_s_work_is_none() -> None:
    counter = LaunchCounter("here")
    with counter:
        hidden = torch.empty(4, 8, device=DEVICE)
        hidden.view(2, 16)[:, None].transpose(0, 1).split(8, dim=-1)
        torch.arange(3).cumsum(0) + 1
    assert not counter.names


def test_operations_are_launches_and_so_are_copies() -> None:
    counter = LaunchCounter("here")
    with counter, torch.inference_mode():
        hidden = torch.empty(4, 8, device=DEVICE)
        torch.isfinite(hidden)
        with counter.at("there"):
            F.linear(hidden, torch.zeros(2, 8, device=DEVICE)).sum().to(torch.int32)
            hidden.transpose(0, 1).reshape(-1)
            torch.zeros(3).to(DEVICE)
        with counter.one_kernel("a library's"):
            hidden + hidden
    assert counter.names["here"] == {"eq": 1, "abs": 1, "ne": 1, "mul": 1, "a library's": 1}
    assert counter.names["there"] == {
        "zeros": 1, "mm": 1, "sum": 1, "_to_copy": 2, "clone": 1,
    }  # fmt: skip


def test_a_step_that_asked_for_a_number_could_not_be_counted() -> None:
    with LaunchCounter("here"), pytest.raises(RuntimeError, match="meta"):
        torch.zeros(1, device=DEVICE).item()
