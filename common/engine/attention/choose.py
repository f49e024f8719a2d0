"""Chooses a rank's attention backend where no flag does, and gives the reason."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.engine.attention.attention import Attention, RecordableAttention
from common.engine.attention.compressed import CompressedAttention
from common.engine.attention.flashinfer import (
    SUPPORTED_CACHE_DTYPES,
    SUPPORTED_DTYPES,
    SUPPORTED_HEAD_DIMS,
    FlashInferAttention,
)
from common.engine.attention.flashinfer_latent import SUPPORTED_DIMS as LATENT_DIMS
from common.engine.attention.flashinfer_latent import FlashInferLatentAttention
from common.engine.attention.kinds import AttentionKind, LatentKind
from common.engine.attention.latent import LatentAttention
from common.engine.attention.paged_cpu import PagedCpuAttention, why_not_paged
from common.engine.attention.sdpa import SdpaAttention
from common.engine.attention.trial import (
    TOLERANCE,
    AttentionShape,
    check_attention,
    check_latent,
    check_recorded,
    check_recorded_latent,
)
from common.engine.graphs.cuda_graphs import CudaRecorder
from common.engine.graphs.recording import Record
from common.engine.kernel_trial import give_memory_back, try_kernels
from common.errors import ConfigError

log = logging.getLogger(__name__)

BACKENDS = ("auto", "sdpa", "flashinfer")
IN_RECORDING = "flashinfer in a recording"


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The backend, and why it is this one; for the log and /server_info.

    recordable: the backend again, if its decode passes can be recorded.
    shortfall: what of it is slower on this device than it could be, and what would help; "" if
    nothing is.
    """

    attention: Attention
    reason: str
    recordable: RecordableAttention | None = None
    shortfall: str = ""


def choose_attention(
    shape: AttentionShape, backend: str = "auto", *, may_record: bool = True
) -> AttentionChoice:
    """FlashInfer on CUDA for every kind of layer where it is there and agrees with SDPA, torch
    otherwise. backend: one of `BACKENDS`; "sdpa" stands for torch whatever the cache holds.
    may_record: whether a recording is tried too.

    Raises: ConfigError if FlashInfer is asked for and can't be used for all layers.
    """
    choice = _torch_choice(shape, "asked for")
    if backend != "sdpa":
        choice = _choose(shape, may_record)
        give_memory_back(shape.device)
    if backend == "flashinfer" and not choice.attention.name.startswith("flashinfer"):
        raise ConfigError(f"--attention-backend flashinfer: {choice.reason}; must be auto or sdpa")
    if backend == "flashinfer" and choice.shortfall:
        raise ConfigError(f"--attention-backend flashinfer: {choice.shortfall}")
    if choice.shortfall:
        log.warning("attention: %s", choice.shortfall)
    return choice


def _choose(shape: AttentionShape, may_record: bool) -> AttentionChoice:
    if shape.is_compressed:
        return _torch_choice(shape, "the path of windows beside blocks on every device")
    if shape.device.type != "cuda" and (shape.latent is not None or not shape.kinds):
        return _torch_choice(shape, f"the path of {shape.device.type}")
    if shape.latent is not None:
        return _choose_latent(shape.latent, shape, may_record)
    if not shape.kinds:
        return _torch_choice(shape, "no layer attends")
    if shape.device.type != "cuda":
        return _choose_on_cpu(shape)
    return _choose_by_kind(shape, may_record)


def _torch_choice(shape: AttentionShape, reason: str) -> AttentionChoice:
    if shape.latent is not None:
        return AttentionChoice(LatentAttention(), reason)
    if shape.is_compressed:
        return AttentionChoice(CompressedAttention(), reason)
    return AttentionChoice(SdpaAttention(), reason)


def _choose_on_cpu(shape: AttentionShape) -> AttentionChoice:
    """Each kind of layer is tried on its own; what fails is SDPA's."""
    # Of this rank alone: it has memory that its passes write to.
    plain: Attention = SdpaAttention()
    trusted: list[AttentionKind] = []
    found: list[str] = []
    for kind in shape.kinds:
        reason = why_not_paged(kind, shape.dtype, shape.cache_dtype)
        if not reason:

            def build_and_check(kind: AttentionKind = kind) -> tuple[Attention, float]:
                candidate = PagedCpuAttention([kind])
                return candidate, check_attention(candidate, kind, shape)

            chosen, reason = try_kernels(
                PagedCpuAttention.name, build_and_check, TOLERANCE[shape.dtype], plain
            )
            trusted += [kind] if chosen is not plain else []
        found.append(f"{kind}: {reason}")
    reason = f"the path of {shape.device.type}; {'; '.join(found)}"
    if not trusted:
        return AttentionChoice(plain, reason)
    return AttentionChoice(PagedCpuAttention(trusted), reason)


def _choose_by_kind(shape: AttentionShape, may_record: bool) -> AttentionChoice:
    """Each kind of layer is tried on its own; what fails is SDPA's."""
    trusted: list[AttentionKind] = []
    found: list[str] = []
    failed: list[str] = []
    for kind in shape.kinds:
        is_trusted, reason = _try_kind(kind, shape)
        if is_trusted:
            trusted.append(kind)
            found.append(f"{kind}: {reason}")
        else:
            failed.append(f"{kind}: {reason}; SDPA over gathered pages is used, which is slower")
    shortfall = "; ".join(failed)
    if not trusted:
        return AttentionChoice(SdpaAttention(), shortfall, shortfall=shortfall)
    attention = _flashinfer(trusted, shape)
    reason = "; ".join((*found, *failed))
    if failed or not may_record:
        # SDPA gathers what the host knows of lengths, which a recording would keep.
        return AttentionChoice(attention, reason, shortfall=shortfall)
    record = CudaRecorder(shape.device)
    lacks = [lack for kind in trusted if (lack := _try_recorded(kind, shape, record))]
    return _with_recording(attention, reason, "; ".join(lacks))


def _flashinfer(kinds: Sequence[AttentionKind], shape: AttentionShape) -> FlashInferAttention:
    return FlashInferAttention(
        kinds, dtype=shape.dtype, device=shape.device, cache_dtype=shape.cache_dtype
    )


def _try_recorded(kind: AttentionKind, shape: AttentionShape, record: Record) -> str:
    """Why decodes of a kind can't be recorded; "" if they can."""

    def build_and_check() -> tuple[Attention, float]:
        candidate = _flashinfer([kind], shape)
        return candidate, check_recorded(candidate, kind, shape, record)

    plain: Attention = SdpaAttention()
    chosen, reason = try_kernels(IN_RECORDING, build_and_check, TOLERANCE[shape.dtype], plain)
    return f"{kind}: {reason}" if chosen is plain else ""


def _with_recording(
    attention: FlashInferAttention | FlashInferLatentAttention, reason: str, lack: str
) -> AttentionChoice:
    """lack: why it can't be recorded, "" if it can."""
    if not lack:
        return AttentionChoice(attention, reason, recordable=attention)
    log.warning("attention: decode passes are not recorded, which is slower: %s", lack)
    return AttentionChoice(attention, f"{reason}; {lack}")


def _choose_latent(kind: LatentKind, shape: AttentionShape, may_record: bool) -> AttentionChoice:
    if kind.has_selection:
        return _torch_choice(shape, "layers that see chosen tokens are torch's on every device")
    made: list[FlashInferLatentAttention] = []

    def build_and_check() -> tuple[Attention, float]:
        made.append(FlashInferLatentAttention(kind, dtype=shape.dtype, device=shape.device))
        return made[0], check_latent(made[0], kind, shape)

    plain: Attention = LatentAttention()
    attention, reason = plain, _lack(shape)
    if not reason and (kind.latent_dim, kind.rope_dim) != LATENT_DIMS:
        dims = " + ".join(map(str, LATENT_DIMS))
        reason = f"flashinfer has no kernel for {kind}, which must be {dims}"
    if not reason:
        tolerance = TOLERANCE[shape.dtype]
        attention, reason = try_kernels("flashinfer", build_and_check, tolerance, plain)
    if attention is plain:
        shortfall = f"{reason}; torch over gathered rows is used, which is slower"
        return AttentionChoice(plain, shortfall, shortfall=shortfall)
    latent = made[0]
    if not may_record:
        return AttentionChoice(latent, reason)

    def check_recording() -> tuple[Attention, float]:
        return latent, check_recorded_latent(latent, kind, shape, CudaRecorder(shape.device))

    chosen, lack = try_kernels(IN_RECORDING, check_recording, TOLERANCE[shape.dtype], plain)
    return _with_recording(latent, reason, lack if chosen is plain else "")


def _lack(shape: AttentionShape, cache_dtypes: tuple[torch.dtype, ...] = ()) -> str:
    """The dtype that the rank needs and no kernel has; "" if kernels have all.

    cache_dtypes: supported ones, beside that of the queries.
    """
    if shape.dtype not in SUPPORTED_DTYPES:
        return f"flashinfer has no kernel for {shape.dtype}, which must be bfloat16 or float16"
    if shape.cache_dtype not in (None, shape.dtype, *cache_dtypes):
        return f"flashinfer is not checked over a cache of {shape.cache_dtype} for {shape.dtype}"
    return ""


def _try_kind(kind: AttentionKind, shape: AttentionShape) -> tuple[bool, str]:
    """(whether FlashInfer is right about it, and why or by how much)."""
    # The library names its kernels with sinks by the queries' type alone.
    if lack := _lack(shape, () if kind.has_sinks else SUPPORTED_CACHE_DTYPES):
        return False, lack
    if kind.head_dim not in SUPPORTED_HEAD_DIMS:
        dims = ", ".join(map(str, SUPPORTED_HEAD_DIMS))
        return False, (
            f"flashinfer has no kernel for head dim {kind.head_dim}, which must be one of {dims}"
        )

    def build_and_check() -> tuple[Attention, float]:
        candidate = _flashinfer([kind], shape)
        return candidate, check_attention(candidate, kind, shape)

    plain: Attention = SdpaAttention()
    tolerance = TOLERANCE[shape.dtype]
    chosen, reason = try_kernels("flashinfer", build_and_check, tolerance, plain)
    return chosen is not plain, reason
