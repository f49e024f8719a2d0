"""The parts of the GPU check that need no servers, for pytest; skipped where there is no CUDA."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from common.config import Verify
from common.engine.graphs.cuda_graphs import CudaRecorder
from common.engine.layers.expert_groups import ExpertGroups, has_grouped_kernel
from common.layout.cache_layout import ServerLayout
from common.layout.families import gqa_components
from common.protocol.codec import encode_layout
from common.protocol.digests import Digest
from common.transport.ucx import UcxSettings, UcxTransport
from common.worker.digester import Digester
from common.worker.pools import allocate_region
from tests.gpu.attention_section import check_attention_section
from tests.gpu.experts_section import check_experts_section
from tests.gpu.native_build import build_native
from tests.gpu.recurrence_section import check_recurrence_section
from tests.gpu.report import Section
from tests.gpu.transfer_section import check_transfer_section

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

TRANSFER_NBYTES = 256 << 20


def test_attention_and_sampling_agree_with_the_reference() -> None:
    section = Section("attention")
    check_attention_section(section, torch.device("cuda", 0))
    assert section.checks and not section.has_failed, section.checks


def test_recurrences_agree_with_the_reference() -> None:
    section = Section("recurrence")
    check_recurrence_section(section, torch.device("cuda", 0))
    assert section.checks and not section.has_failed, section.checks


def test_experts_agree_with_the_reference() -> None:
    section = Section("experts")
    check_experts_section(section, torch.device("cuda", 0))
    assert section.checks and not section.has_failed, section.checks


def test_pages_cross_two_processes_pools_over_cuda_ipc() -> None:
    build_native()
    section = Section("transfer")
    check_transfer_section(section, torch.device("cuda", 0), TRANSFER_NBYTES)
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


def test_two_recordings_share_what_they_compute_in() -> None:
    device = torch.device("cuda", 0)
    recorder = CudaRecorder(device)
    result = torch.zeros(1, device=device)

    def compute() -> torch.Tensor:
        return result.copy_(torch.ones(64 << 20, device=device).sum()[None])

    def reserved() -> int:
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(device)

    before = reserved()
    kept = [recorder(compute)]
    first = reserved() - before
    kept.append(recorder(compute))
    assert first >= 256 << 20 and reserved() - before == first
    for recording in kept:
        result.zero_()
        recording.replay()
        assert float(result) == 64 << 20


CONTEXTS = """
import ctypes, torch
from common.worker.device_thread import DeviceThread
second = torch.device("cuda", 1)
torch.cuda.set_device(second)
torch.ones(1, device=second)
def work():
    event = torch.cuda.Event(blocking=True)
    torch.ones(1).pin_memory().to(second, non_blocking=True)
    event.record()
    event.synchronize()
thread = DeviceThread("test", second, work, lambda: print("failed"))
thread.start()
thread.join()
driver, flags, is_active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
for index in range(torch.cuda.device_count()):
    driver.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(is_active))
    print(is_active.value)
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_rank_of_the_second_device_makes_no_context_on_the_first() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONTEXTS], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[:2] == ["0", "1"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row_count", [1, 20, 160])
def test_experts_of_a_decode_are_recorded(dtype: torch.dtype, row_count: int) -> None:
    device, expert_count, per_token = torch.device("cuda", 0), 128, 8
    has_kernel = has_grouped_kernel(device, dtype)
    weights = torch.randn(expert_count, 96, 64, device=device).to(dtype)
    rows = torch.randn(row_count * per_token, 64, device=device).to(dtype)

    def draw() -> torch.Tensor:
        scores = torch.rand(row_count, expert_count, device=device)
        return scores.topk(per_token).indices.flatten().sort().values

    experts = draw()

    def compute() -> torch.Tensor:
        groups = ExpertGroups.of(experts, expert_count, row_max=row_count, has_kernel=has_kernel)
        return groups.multiply(rows, weights)

    recording = CudaRecorder(device)(compute)
    experts.copy_(draw())
    recording.replay()
    expected = torch.einsum("ni,noi->no", rows.float(), weights[experts].float())
    torch.testing.assert_close(recording.output.float(), expected, rtol=2e-2, atol=2e-1)


def test_a_block_that_peers_open_holds_one_region_and_nothing_else() -> None:
    build_native()
    device = torch.device("cuda", 0)
    transport = UcxTransport(UcxSettings(cuda_device=0))
    sizes = (1 << 16, 3 << 20, 30 << 20)  # torch puts what is smaller than 10 MiB together
    kept: list[torch.Tensor] = []
    regions: list[torch.Tensor] = []
    for index, nbytes in enumerate(sizes):
        kept.append(torch.ones(nbytes, dtype=torch.uint8, device=device))
        regions.append(allocate_region(transport, f"region-{index}", nbytes, device))
        kept.append(torch.ones(nbytes, dtype=torch.uint8, device=device))
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    for region in regions:
        (segment,) = (
            s for s in segments if 0 <= region.data_ptr() - s["address"] < s["total_size"]
        )
        used = [b["address"] for b in segment["blocks"] if b["state"].startswith("active")]
        assert used == [region.data_ptr()]
        assert not region.any(), "zero, and written by nobody"
    transport.close()
