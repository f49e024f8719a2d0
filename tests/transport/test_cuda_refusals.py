"""What a transport says where CUDA is asked for and there is none: nothing may hang or pass."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from common.errors import TransportError
from common.transport.transport import RegionRefused
from common.transport.ucx import UcxSettings, UcxTransport, goes_through_host, resolve_tls


def has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


no_driver = pytest.mark.skipif(has_cuda_driver(), reason="needs a machine without a CUDA driver")


def test_a_cuda_device_adds_its_transports_to_the_automatic_choice() -> None:
    names = resolve_tls(UcxSettings(cuda_device=0)).split(",")
    assert {"cuda_copy", "cuda_ipc", "posix"} <= set(names)
    assert not any("cuda" in name for name in resolve_tls(UcxSettings()).split(","))


@pytest.mark.parametrize("device", [None, 0])
def test_tcp_is_never_chosen_by_itself(device: int | None) -> None:
    assert "tcp" not in resolve_tls(UcxSettings(cuda_device=device)).split(",")


@pytest.mark.parametrize(
    ("transports", "is_slow"),
    [
        ("cuda_ipc,tcp", False),
        ("tcp", True),
        ("posix", True),
        ("cuda_copy,posix,tcp", True),
        ("rc_mlx5", False),
    ],
)
def test_a_connection_that_gpu_memory_reaches_by_a_detour_only_is_known(
    transports: str, is_slow: bool
) -> None:
    assert goes_through_host(transports) is is_slow


@no_driver
def test_a_device_without_a_driver_ends_the_start() -> None:
    with pytest.raises(TransportError, match=r"cuda_device=0: libcuda\.so\.1 can't be loaded"):
        UcxTransport(UcxSettings(cuda_device=0))


@no_driver
def test_memory_that_no_transport_can_share_is_refused_at_once() -> None:
    """UCX itself registers it without a word, and every put to it would fail much later."""
    memory = np.zeros(4096, dtype=np.uint8)
    transport = UcxTransport(UcxSettings(tls="tcp,cuda_copy,cuda_ipc"))
    try:
        with pytest.raises(RegionRefused, match=r"region pages-0: .*no UCX transport can share it"):
            transport.register("pages-0", memory.ctypes.data, memory.nbytes, "cuda")
    finally:
        transport.close()


def test_cuda_memory_needs_a_transport_with_cuda() -> None:
    transport = UcxTransport(UcxSettings(tls="tcp"))
    try:
        with pytest.raises(RegionRefused, match=r"cuda_copy,cuda_ipc in tls=tcp"):
            transport.register("pages-0", 4096, 4096, "cuda")
    finally:
        transport.close()
