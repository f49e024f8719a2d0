"""The parts of the GPU check that need no servers, for pytest; skipped where there is no CUDA."""

from __future__ import annotations

import pytest
import torch

from common.config import Verify
from common.layout.cache_layout import ServerLayout
from common.layout.families import gqa_components
from common.protocol.codec import encode_layout
from common.protocol.digests import Digest
from common.worker.digester import Digester
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


def test_digests_are_those_of_the_cpu() -> None:
    components = gqa_components(layer_count=4, kv_head_count=4, head_dim=64, dtype="bfloat16")
    layout = ServerLayout(components, 1, ((0, 4),), 16)
    (rank,) = layout.ranks
    generator = torch.Generator().manual_seed(1)
    pool = torch.randint(
        0, 256, (65 * rank.groups[0].page_nbytes,), dtype=torch.uint8, generator=generator
    )
    pages = torch.randperm(64, generator=generator).add(1).tolist()
    for dtype in ("bfloat16", "float8_e4m3fn"):
        other = ServerLayout(
            gqa_components(layer_count=4, kv_head_count=4, head_dim=64, dtype=dtype),
            *(1, ((0, 4),), 16),
        )
        job = Digest(7, encode_layout(other), False, 1000, [(0, pages)], Verify.FULL)
        here, there = (Digester([pool.to(device)], rank).run(job) for device in ("cpu", "cuda"))
        assert here == there
