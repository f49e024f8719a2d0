"""What the GPU section makes of the GPU check's figures, whose names the check itself gives."""

from __future__ import annotations

import pytest
import torch

from bench import gpu
from bench.report import NotRun, Row
from tests.gpu.model_shapes import LLAMA_8B
from tests.gpu.pair_section import measure
from tests.gpu.report import Section
from tests.gpu.servers import Running


class PacedServer(Running):
    """Answers in no time and tells times of its own: the first token after so many seconds."""

    def __init__(self, first_s: float) -> None:
        super().__init__([])
        self.first_s = first_s

    def stream_times(self, prompt: list[int], token_count: int) -> list[float]:
        return [self.first_s + 0.004 * index for index in range(token_count)]


def test_figures_become_rows_with_their_targets() -> None:
    section = Section("pair")
    measure(section, "single", PacedServer(0.010), LLAMA_8B)
    measure(section, "pair", PacedServer(0.0145), LLAMA_8B)
    figures: gpu.Figures = {"pair": dict(section.figures)}
    figures["handover"] = {"2048 KiB pages: GB/s": 243.0}
    rows = {row.name: row for row in gpu.results_of(figures) if isinstance(row, Row)}
    told = {name: (round(row.value, 3), row.is_met) for name, row in rows.items()}
    assert told == {
        "gpu_handover_1GiB": (243.0, False),
        **{f"gpu_ttft_{length}": (14.5, True) for length in (128, 2048, 8192)},
        **{f"gpu_ttft_{length}_added": (4.5, length == 8192) for length in (128, 2048, 8192)},
        "gpu_itl_1_stream": (4.0, True),
    }


def test_what_the_check_does_not_measure_is_reported_as_not_run() -> None:
    results = gpu.results_of({})
    assert [result.name for result in results] == [one.name for one in gpu.WANTED]
    assert all(isinstance(result, NotRun) and result.target for result in results)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_every_target_says_so() -> None:
    results = gpu.run()
    assert len(results) == len(gpu.WANTED)
    for result in results:
        assert isinstance(result, NotRun) and result.reason == "torch sees no CUDA device"
