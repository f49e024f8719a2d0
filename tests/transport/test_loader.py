"""Which UCX a process gets."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.environment import UCX_HOOK_VARIABLE
from common.transport import loader
from common.transport.loader import UcxOrigin, UcxUnavailable, choose_origin, load_ucx
from common.transport.ucx import UcxSettings, UcxTransport


def pretend_system(
    monkeypatch: pytest.MonkeyPatch, directory: Path, *, infiniband: bool, rdma_device: bool
) -> None:
    (directory / "ucx").mkdir()
    (directory / "libucp.so.0").touch()
    if infiniband:
        (directory / "ucx" / "libuct_ib.so.0").touch()
    monkeypatch.setattr(loader, "SYSTEM_DIRECTORIES", (Path("/nonexistent"), directory))
    monkeypatch.setattr(loader, "has_rdma_device", lambda: rdma_device)


@pytest.mark.parametrize(
    ("infiniband", "rdma_device", "kind"),
    [
        (True, True, "system"),
        (True, False, "wheel"),
        (False, True, "wheel"),
        (False, False, "wheel"),
    ],
)
def test_auto_prefers_the_system_only_if_it_drives_an_rdma_device(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    infiniband: bool,
    rdma_device: bool,
    kind: str,
) -> None:
    pretend_system(monkeypatch, tmp_path, infiniband=infiniband, rdma_device=rdma_device)
    assert choose_origin("auto").kind == kind


def test_system_without_ucx_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "SYSTEM_DIRECTORIES", (Path("/nonexistent"),))
    with pytest.raises(UcxUnavailable, match="/nonexistent"):
        choose_origin("system")


def test_unknown_choice_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(UcxUnavailable, match="auto, wheel, system or a directory"):
        choose_origin("newest")


def test_directory_is_taken_as_it_is() -> None:
    assert choose_origin("/opt/mine") == UcxOrigin("directory", Path("/opt/mine"))


def run_python(program: str) -> str:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_directory_without_ucx_is_refused() -> None:
    program = """
from common.transport.loader import UcxUnavailable, load_ucx
try:
    load_ucx("/nonexistent")
except UcxUnavailable as exc:
    print("refused", exc)
"""
    assert run_python(program).startswith("refused ucx=/nonexistent")


@pytest.mark.slow
def test_ucx_of_the_process_is_taken_by_auto_and_not_replaced() -> None:
    program = """
from common.transport.loader import UcxUnavailable, load_ucx
wheel = load_ucx("wheel")
again = load_ucx("auto")
assert (again.kind, again.directory) == ("loaded", wheel.directory.resolve()), again
assert load_ucx("wheel") == wheel
try:
    load_ucx("/nonexistent")
except UcxUnavailable as exc:
    print("refused", exc)
"""
    assert "already loaded" in run_python(program)


def test_loading_twice_is_harmless() -> None:
    assert load_ucx("wheel") == load_ucx("wheel")


def test_ucx_keeps_no_list_of_device_memory() -> None:
    """It would learn of allocations through hooks that an allocator can bypass. Every operation
    names its type of memory."""
    UcxTransport(UcxSettings(tls="tcp")).close()
    value = ctypes.create_string_buffer(16)
    ctypes.CDLL("libucs.so.0").ucs_global_opts_get_value(b"MEMTYPE_CACHE", value, len(value))
    assert value.value == b"n"


@pytest.mark.parametrize(
    ("has_rdma", "has_gpu", "own", "told"),
    [
        (False, False, None, "none"),
        (False, False, "bistro", "bistro"),
        (True, False, None, None),
        (False, True, None, None),
    ],
)
def test_ucx_hooks_into_unmapping_where_a_card_may_have_registered_memory(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_rdma: bool,
    has_gpu: bool,
    own: str | None,
    told: str | None,
) -> None:
    name = UCX_HOOK_VARIABLE
    gpu = tmp_path / "gpu"
    if has_gpu:
        gpu.touch()
    monkeypatch.setattr(loader, "has_rdma_device", lambda: has_rdma)
    monkeypatch.setattr(loader, "NVIDIA_DEVICE", gpu)
    monkeypatch.setattr(loader, "loaded_directory", lambda: None)
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: None)
    # What is set here is gone behind this test.
    monkeypatch.setenv(name, own or "")
    if own is None:
        os.environ.pop(name)
    load_ucx("wheel")
    assert os.environ.get(name) == told
