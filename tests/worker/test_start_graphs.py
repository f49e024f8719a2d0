"""Which ranks record decode passes, and what memory is set aside for them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from common.config import Role
from common.speculative import SpeculativeAlgorithm
from common.worker.start_graphs import kept_nbytes, largest_batch, why_not_recorded
from tests.worker.test_pools import config_of

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({"role": Role.DECODE}, CUDA, ""),
        ({"role": Role.DECODE}, torch.device("cpu"), "the device is cpu"),
        ({"role": Role.DECODE, "disable_cuda_graph": True}, CUDA, "--disable-cuda-graph"),
        ({"role": Role.DECODE, "pp_size": 2}, CUDA, "a pipeline stage waits"),
        ({"role": Role.PREFILL}, CUDA, "a prefill server decodes nothing"),
    ],
)
def test_only_what_will_decode_is_recorded(
    changes: dict[str, object], device: torch.device, reason: str
) -> None:
    found = why_not_recorded(config_of(**changes), device)
    assert found.startswith(reason) and bool(found) is bool(reason)


@pytest.mark.parametrize(
    ("running_max", "asked", "largest"),
    [(None, None, 256), (None, 64, 64), (32, None, 32), (400, None, 400), (32, 64, 32)],
)
def test_as_many_rows_are_recorded_as_requests_may_run(
    running_max: int | None, asked: int | None, largest: int
) -> None:
    config = config_of(max_running_requests=running_max, cuda_graph_max_bs=asked)
    assert largest_batch(config) == largest


@pytest.mark.parametrize(("asked", "largest"), [(None, 32), (100, 100), (4096, 128)])
def test_rows_of_proposals_are_recorded_if_asked_for(asked: int | None, largest: int) -> None:
    config = config_of(
        role=Role.DECODE,
        max_running_requests=32,
        cuda_graph_max_bs=asked,
        speculative_algorithm=SpeculativeAlgorithm.NGRAM,
        speculative_num_steps=3,
    )
    assert largest_batch(config) == largest


@dataclass
class Device:
    """Memory as torch's allocator holds it: what was let go stays until it is given back."""

    reserved: int = 100
    unused: int = 40
    made: list[str] = field(default_factory=list)

    def take(self, nbytes: int) -> None:
        self.reserved += max(0, nbytes - self.unused)
        self.unused = max(0, self.unused - nbytes)

    def let_go(self, nbytes: int) -> None:
        self.unused += nbytes

    def give_back(self) -> None:
        self.reserved -= self.unused
        self.unused = 0


class Recordings:
    """Keep 70, and needed 500 more while they were made."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.take(570)
        device.let_go(500)
        device.made.append("made")

    def __del__(self) -> None:
        self._device.let_go(70)
        self._device.made.append("dropped")


def test_what_recordings_keep_is_found_out_by_making_them_once() -> None:
    device = Device()
    nbytes = kept_nbytes(lambda: Recordings(device), lambda: device.reserved, device.give_back)
    assert nbytes == 70
    assert device.made == ["made", "dropped"]
    device.give_back()
    assert device.reserved == 60, "all of it is there for the pool"
