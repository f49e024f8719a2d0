"""The parts of the GPU check that need no servers, for pytest; skipped where there is no CUDA."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.attention_section import check_attention_section
from tests.gpu.handover_section import check_handover_section
from tests.gpu.native_build import build_native
from tests.gpu.recurrence_section import check_recurrence_section
from tests.gpu.report import Section

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

HANDOVER_NBYTES = 256 << 20


def test_attention_and_sampling_agree_with_the_reference() -> None:
    section = Section("attention")
    check_attention_section(section, torch.device("cuda", 0))
    assert section.checks and not section.has_failed, section.checks


def test_recurrences_agree_with_the_reference() -> None:
    section = Section("recurrence")
    check_recurrence_section(section, torch.device("cuda", 0))
    assert section.checks and not section.has_failed, section.checks


def test_pages_cross_two_processes_pools_over_cuda_ipc() -> None:
    build_native()
    section = Section("handover")
    check_handover_section(section, torch.device("cuda", 0), HANDOVER_NBYTES)
    assert any("cuda_ipc" in name for name in section.checks)
    assert not section.has_failed, section.checks
