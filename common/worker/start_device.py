"""The device that a rank computes on, and the errors where it is missing or out of memory.

Knows nothing of models.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch

from common.config import ServerConfig
from common.config_checks import check_device
from common.errors import ConfigError, NotNow

log = logging.getLogger(__name__)

HOST_REFUSAL = "can't allocate memory"
"""Part of the message of torch's RuntimeError on a CPU. On CUDA the error has its own type."""


def with_device(config: ServerConfig, rank: int) -> ServerConfig:
    """`config` with the device that `auto` stands for on this machine, which its first rank logs.

    Raises: ConfigError if the other settings don't go with it.
    """
    if config.device != "auto":
        return config
    if torch.cuda.is_available():
        device, why = "cuda", f"torch {torch.__version__} sees {torch.cuda.device_count()} GPUs"
    else:
        device, why = "cpu", f"torch {torch.__version__} sees no GPU"
    if rank == config.local_ranks.start:
        log.info("--device auto is %s: %s", device, why)
    decided = msgspec.structs.replace(config, device=device)
    check_device(decided)
    return decided


def device_of(config: ServerConfig, rank: int) -> torch.device:
    """Raises: ConfigError that names what to install or to change."""
    if config.device != "cuda":
        return torch.device(config.device)
    if not torch.cuda.is_available():
        raise ConfigError(f"--device cuda: {why_no_cuda(torch.__version__, torch.version.cuda)}")
    count = torch.cuda.device_count()
    local_count = len(config.local_ranks)
    if config.base_gpu_id + local_count > count:
        first = f" from --base-gpu-id {config.base_gpu_id} on" if config.base_gpu_id else ""
        raise ConfigError(
            f"--tp-size {config.tp_size} x --pp-size {config.pp_size} puts {local_count} ranks on "
            f"this machine{first}: must be at most {max(0, count - config.base_gpu_id)}, its CUDA "
            "devices"
        )
    device = torch.device("cuda", config.base_gpu_id + rank - config.local_ranks.start)
    # NCCL and FlashInfer use the current device of the thread that calls them: this one.
    torch.cuda.set_device(device)
    return device


def why_no_cuda(torch_version: str, cuda_version: str | None) -> str:
    """cuda_version: that torch was built for; None if for no CUDA at all."""
    if cuda_version is None:
        return (
            f"torch {torch_version} was built without CUDA: install one with it, "
            "or use --device cpu"
        )
    return (
        f"torch {torch_version} finds no CUDA device: `nvidia-smi` must list one, of a driver for "
        f"CUDA {cuda_version}, and CUDA_VISIBLE_DEVICES must not hide it; or use --device cpu"
    )


@contextmanager
def enough_memory(what: str, remedy: str) -> Iterator[None]:
    """Raises: ConfigError with the remedy, if memory for `what` runs out inside."""
    try:
        yield
    except RuntimeError as exc:
        is_refusal = isinstance(exc, torch.OutOfMemoryError) or HOST_REFUSAL in str(exc)
        if not is_refusal:
            raise
        # The first two sentences. An account of the allocator follows, lines long.
        reason = ". ".join(str(exc).replace("\n", " ").split(". ")[:2]).rstrip(".")
        raise NotNow(f"no memory for {what}: {reason}; {remedy}") from exc
