"""What a worker refuses at start, and what it says of itself when it is ready."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.clock import ManualClock
from common.config import ReturnCache, Role, ServerConfig
from common.errors import ConfigError
from common.protocol.codec import decode_layout
from common.worker.staging.source import REGION as SOURCE_REGION
from common.worker.start import host_id, start_rank
from common.worker.start_device import device_of, enough_memory, why_no_cuda, with_device


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def config_of(checkpoint: Path, **changes: object) -> ServerConfig:
    values: dict[str, object] = {
        "role": Role.DECODE,
        "model_path": str(checkpoint),
        "tokenizer_path": str(checkpoint),
        "served_model_name": "tiny",
        "port": 1,
        "device": "cpu",
        "max_total_tokens": 512,
        **changes,
    }
    return ServerConfig(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"context_length": 5000}, r"--context-length 5000: must be in 1\.\.1024"),
        ({"max_total_tokens": 2**40}, "--max-total-tokens 1099511627776: needs"),
        ({"host_cache_gb": 65536.0}, r"--host-cache-gb 65536: takes 70368744177664 bytes of"),
        ({"host_cache_gb": 1e-5}, r"--host-cache-gb 1e-05: no room for a page of group full: must"),
        ({"pp_size": 99}, "pp_size=99: must be in 1"),
        ({"tp_size": 3}, "tp_size=3"),
        ({"ucx": "/nowhere"}, "--ucx /nowhere"),
        ({"transport": "ucx-tcp", "net_devices": "nosuch0"}, "--net-devices nosuch0"),
        ({"page_size": 48}, "page_size=48"),
        ({"attention_backend": "flashinfer"}, "--attention-backend flashinfer: the path of cpu"),
        ({"dtype": "int8"}, "dtype=int8"),
        ({"load_format": "pickle"}, "load_format=pickle"),
    ],
)
def test_a_setting_that_can_not_work_is_named(
    checkpoint: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        start_rank(config_of(checkpoint, **changes), 0, ManualClock())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_device_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"--device cuda: torch .*(install|nvidia-smi)"):
        start_rank(config_of(checkpoint, device="cuda"), 0, ManualClock())


@pytest.mark.parametrize(("has_gpu", "device"), [(False, "cpu"), (True, "cuda")])
def test_auto_is_a_gpu_where_torch_sees_one(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_gpu: bool,
    device: str,
) -> None:
    """What torch says of GPUs is replaced."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    caplog.set_level("INFO")
    config = config_of(checkpoint, device="auto", tp_size=2)
    assert [with_device(config, rank).device for rank in range(2)] == [device] * 2
    assert [line for line in caplog.messages if "--device auto is" in line] == caplog.messages
    assert len(caplog.messages) == 1 and f"auto is {device}: torch" in caplog.text
    if has_gpu:
        with pytest.raises(ConfigError, match="--transport shm: must be auto or ucx-tcp"):
            with_device(config_of(checkpoint, device="auto", transport="shm"), 0)


def test_ranks_take_the_gpus_from_the_base_on(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch says of GPUs is replaced."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    config = config_of(checkpoint, device="cuda", tp_size=2, base_gpu_id=1)
    assert [device_of(config, rank).index for rank in range(2)] == [1, 2]
    with pytest.raises(ConfigError, match="from --base-gpu-id 2 on: must be at most 1"):
        device_of(config_of(checkpoint, device="cuda", tp_size=2, base_gpu_id=2), 0)


def test_each_lack_of_cuda_has_its_own_message() -> None:
    """A torch that can't know any device is replaced; else the driver is looked at."""
    assert "was built without CUDA: install one with it" in why_no_cuda("2.11.0+cpu", None)
    assert "torch 2.11.0+cu130 finds no CUDA device: `nvidia-smi`" in why_no_cuda(
        "2.11.0+cu130", "13.0"
    )


def test_weights_that_no_memory_is_there_for_end_the_start_in_words(
    checkpoint: Path, tmp_path: Path
) -> None:
    """More than any machine can address."""
    settings = json.loads((checkpoint / "config.json").read_text()) | {"vocab_size": 1 << 50}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    asked = config_of(tmp_path, load_format="dummy")
    with pytest.raises(ConfigError, match=r"no memory for the weights: .*; raise --tp-size"):
        start_rank(asked, 0, ManualClock())


def test_an_error_that_is_not_about_memory_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"^size mismatch$"), enough_memory("weights", "pray"):
        raise RuntimeError("size mismatch")
    message = "no memory for weights: CUDA out of memory. Tried to allocate 2.00 GiB; pray"
    with pytest.raises(ConfigError, match=f"^{message}$"), enough_memory("weights", "pray"):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80 GiB"
        )


def test_a_checkpoint_without_weights_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="safetensors"):
        start_rank(config_of(tmp_path), 0, ManualClock())


def test_weights_that_are_not_finite_are_found_by_the_first_pass(
    checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"a first pass failed: .*not finite"):
        start_rank(config_of(tmp_path), 0, ManualClock())


def test_a_rank_that_started_says_what_its_scheduler_must_know(checkpoint: Path) -> None:
    config = config_of(
        checkpoint, load_format="dummy", kv_cache_dtype="bfloat16", transport="stream"
    )
    started = start_rank(config, 0, ManualClock())
    ready = started.ready
    assert ready.page_counts == [512 // 16] == started.page_counts
    layout = decode_layout(ready.layout)
    assert layout == started.layout.server
    assert {component.dtype for component in layout.components} == {"bfloat16"}
    assert (ready.vocab_size, ready.context_length, ready.eos_token_ids) == (512, 1024, [2])
    assert ready.fingerprint["weights"].startswith("dummy")
    assert (
        ready.describe["stream"] == "not encrypted"
        and ready.describe["device"] == ready.device == "cpu"
    )
    assert ready.describe["attention"].startswith("sdpa (the path of cpu; ")
    assert "over a cache of torch.bfloat16" in ready.describe["attention"]
    said = ready.describe["norms and activations"]
    assert said.startswith(("fused (differs from torch by ", "torch (native can't be used: "))
    # What the model says of itself, as which kernels recur, is there too.
    assert ready.describe["architecture"] == "Qwen3ForCausalLM"
    assert ready.host_id == host_id() and "pid:[" in ready.host_id
    assert started.runner.sequence_count == 0
    started.transport.close()


def test_a_rank_with_a_tier_in_host_memory_says_how_many_pages_it_has(checkpoint: Path) -> None:
    config = config_of(checkpoint, host_cache_gb=0.01, transport="stream")
    started = start_rank(config, 0, ManualClock())
    (count,) = started.ready.host_page_counts
    page_nbytes = started.layout.groups[0].page_nbytes
    assert count == (512 // 16) * round(0.01 * 2**30) // ((512 // 16 + 1) * page_nbytes)
    assert started.ready.describe["host_cache"] == (
        f"{(count + 1) * page_nbytes / 2**30:.3g} GiB: {count} pages"
    )
    assert started.host_pages.page_counts == [count]
    started.transport.close()

    without = start_rank(config_of(checkpoint, transport="stream"), 0, ManualClock())
    assert without.ready.host_page_counts == []
    assert without.ready.describe["host_cache"] == "none"
    without.transport.close()


@pytest.mark.parametrize("role", Role)
def test_a_rank_that_sends_and_receives_stages_both_ways(checkpoint: Path, role: Role) -> None:
    """What it gathers leaves from the memory that it was gathered in."""
    peers = {"prefill": ("127.0.0.1:1",), "role": role, "transport": "stream"}
    config = config_of(checkpoint, return_cache=ReturnCache.AUTO, staging_buffer_mb=8, **peers)
    started = start_rank(config, 0, ManualClock())
    regions = started.transport.describe()["regions"]
    assert started.staging_target is not None and started.staging_source is not None
    numbers = {name: number for number, name in enumerate(regions)}
    assert started.staging_source.region_index == numbers[SOURCE_REGION]
    started.transport.close()


@pytest.mark.parametrize("role", Role)
def test_a_rank_stages_one_way_where_no_caches_go_back(checkpoint: Path, role: Role) -> None:
    config = config_of(
        checkpoint,
        role=role,
        prefill=("127.0.0.1:1",),
        transport="stream",
        return_cache=ReturnCache.OFF,
    )
    started = start_rank(config, 0, ManualClock())
    assert (started.staging_source is not None) == (role is Role.PREFILL)
    assert (started.staging_target is not None) == (role is Role.DECODE)
    started.transport.close()


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_a_cache_may_be_stored_in_less_than_the_model_computes_in(
    checkpoint: Path, dtype: str
) -> None:
    config = config_of(checkpoint, kv_cache_dtype=dtype, transport="stream")
    started = start_rank(config, 0, ManualClock())
    assert {component.dtype for component in started.layout.server.components} == {dtype}
    started.transport.close()


@pytest.mark.parametrize(
    ("name", "backends"),
    [
        ("gpt_oss", ("onednn", "sdpa")),
        ("deepseek_v3", ("latent torch",)),
        ("deepseek_v32", ("latent torch",)),
        ("qwen3_next", ("onednn", "sdpa")),
        ("deepseek_v4", ("compressed torch",)),
    ],
)
def test_a_rank_starts_with_the_attention_that_its_layers_ask_for(
    name: str, backends: tuple[str, ...], tiny_checkpoint: Callable[[str], Path]
) -> None:
    config = config_of(tiny_checkpoint(name), transport="stream")
    started = start_rank(config, 0, ManualClock())
    assert started.ready.describe["attention"].partition(" (")[0] in backends
    started.transport.close()
