"""Attention and sampling on the device, against SDPA and against the same code on the CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import torch

from common.engine.attention.attention import Attention
from common.engine.attention.choose import choose_attention
from common.engine.attention.kinds import AttentionKind, LatentKind
from common.engine.attention.sdpa import SdpaAttention
from common.engine.attention.trial import AttentionShape
from common.engine.cache.kv_pool import KvPool
from common.engine.config.rope import RopeConfig, RopeKind
from common.engine.forward_batch import ForwardBatch, SequenceChunk
from common.engine.layers.choose_fused import FusedShape, choose_fused
from common.engine.layers.fused import RotationShape
from common.engine.sampling.choose_draw import choose_draw
from common.engine.sampling.noise import hash_bits, row_keys
from common.engine.sampling.sampler import Sampler
from common.layout.cache_layout import ServerLayout
from common.layout.families import gqa_components
from common.request import SamplingParams
from tests.gpu.report import Section

# (kind, dtype, page size): Llama-3-8B, Qwen2.5-7B with its groups of 7, heads that are not grouped,
# large pages, and one rank's share of a model cut eight times.
SHAPES = (
    (AttentionKind(32, 8, 128), torch.bfloat16, 16),
    (AttentionKind(28, 4, 128), torch.bfloat16, 16),
    (AttentionKind(8, 8, 64), torch.float16, 16),
    (AttentionKind(32, 8, 128), torch.bfloat16, 64),
    (AttentionKind(4, 1, 256), torch.bfloat16, 16),
)
# Windows and caps as Gemma-2-9B and Gemma-3-12B have them, a head of 512 as Gemma 4, sinks with and
# without a window as gpt-oss. Each is compiled on its own.
RULED_SHAPES = (
    (AttentionKind(16, 8, 256, scale=1 / 16, softcap=50.0), torch.bfloat16, 16),
    (AttentionKind(16, 8, 256, window=4096, scale=1 / 16, softcap=50.0), torch.bfloat16, 16),
    (AttentionKind(16, 8, 256, window=1024, scale=1 / 16), torch.bfloat16, 16),
    (AttentionKind(16, 4, 512, scale=1.0), torch.bfloat16, 16),
    (AttentionKind(64, 8, 64, window=128, has_sinks=True), torch.bfloat16, 16),
    (AttentionKind(64, 8, 64, has_sinks=True), torch.bfloat16, 16),
)
# DeepSeek-V3 whole and on one of 8 ranks: heads, rows, and what a head makes of them.
LATENT_SHAPES = (
    (LatentKind(128, 512, 64, 128, 128, scale=192**-0.5), 64),
    (LatentKind(16, 512, 64, 128, 128, scale=192**-0.5), 16),
)
TIMED = SHAPES[0]
MIXED = ((0, 5), (31, 17), (300, 40), (64, 1), (15, 1))
SDPA_TOLERANCE = 1e-4
TIMED_LAYERS = 4
TIMED_REPEATS = 10
DECODE_SEQUENCES, DECODE_TOKENS = 64, 4096
PREFILL_TOKENS = 4096
VOCAB = 1000


def check_attention_section(section: Section, device: torch.device) -> None:
    _check_sdpa(section, device)
    _check_sampler(section, device)
    if _has_flashinfer(section, device):
        _check_fused(section, device)
        _check_flashinfer(section, device, SHAPES)
        shape = AttentionShape((TIMED[0],), TIMED[1], device, TIMED[2])
        _time(section, "sdpa", SdpaAttention(), shape)


def _check_fused(section: Section, device: torch.device) -> None:
    rotation = RotationShape(128, 128, is_interleaved=False)
    shape = FusedShape(
        4096,
        14336,
        torch.bfloat16,
        device,
        rope=RopeConfig(RopeKind.DEFAULT, 1000000.0),
        rotations=(rotation,),
        has_qk_norm=True,
    )
    fused = choose_fused(shape)
    kernels = fused.kernels
    section.check("norms and activations as single kernels", bool(kernels), fused.reason)
    rotated = kernels is not None and rotation in kernels.rotations
    section.check("rotation as a single kernel", rotated, fused.reason)
    normed = kernels is not None and len(kernels.normed_rotations) == 2
    section.check("norm and rotation of heads as a single kernel", normed, fused.reason)
    drawing = choose_draw(128256, device)
    section.check("a draw as a single kernel", drawing.kernel is not None, drawing.reason)


def check_kinds_section(section: Section, device: torch.device) -> None:
    """What takes long to compile and no plain model needs."""
    if not _has_flashinfer(section, device):
        return
    _check_flashinfer(section, device, RULED_SHAPES)
    kind, dtype, page_size = TIMED
    narrow = torch.float8_e4m3fn
    choice = choose_attention(AttentionShape((kind,), dtype, device, page_size, narrow))
    is_used = choice.attention.name == "flashinfer"
    section.check("flashinfer over a cache of fp8", is_used, choice.reason)
    for kind, page_size in LATENT_SHAPES:
        shape = AttentionShape((), torch.bfloat16, device, page_size, latent=kind)
        choice = choose_attention(shape)
        name = f"flashinfer {kind.head_count} heads x {kind} page {page_size}"
        section.check(name, choice.attention.name == "flashinfer latent", choice.reason)
        section.figure(f"{name} difference", choice.reason)


def _has_flashinfer(section: Section, device: torch.device) -> bool:
    if device.type != "cuda":
        section.skip("flashinfer", f"runs on CUDA only, this is {device}")
        return False
    if importlib.util.find_spec("flashinfer") is None:
        section.skip("flashinfer", "is not installed; servers here use sdpa")
        return False
    return True


# Correctness --------------------------------------------------------------------------------------


def _check_flashinfer(
    section: Section,
    device: torch.device,
    shapes: tuple[tuple[AttentionKind, torch.dtype, int], ...],
) -> None:
    for kind, dtype, page_size in shapes:
        shape = AttentionShape((kind,), dtype, device, page_size)
        choice = choose_attention(shape)
        heads = f"{kind.head_count}/{kind.kv_head_count}"
        name = f"flashinfer {heads} x {kind} {dtype} page {page_size}"
        section.check(name, choice.attention.name == "flashinfer", choice.reason)
        if choice.attention.name == "flashinfer":
            section.figure(f"{name} difference", choice.reason)
            if (kind, dtype, page_size) == TIMED:
                _time(section, "flashinfer", choice.attention, shape)


def _check_sdpa(section: Section, device: torch.device) -> None:
    """The reference of every other check is itself checked: the CPU's fp32 numbers."""
    outputs = []
    for where in (torch.device("cpu"), device):
        shape = AttentionShape((AttentionKind(8, 2, 64),), torch.float32, where, 16)
        pool, batch = _deal(MIXED, shape, layer_count=1)
        generator = torch.Generator().manual_seed(3)
        query, key, value = (
            torch.randn(batch.token_count, heads, 64, generator=generator).to(where)
            for heads in (8, 2, 2)
        )
        output = SdpaAttention().start(batch, pool).attend(0, query, key, value)
        outputs.append((output.cpu(), pool.buffers[0].cpu()))
    (expected, expected_bytes), (actual, actual_bytes) = outputs
    difference = float((expected - actual).abs().max())
    section.figure("sdpa fp32, device against cpu", difference)
    section.check("sdpa agrees with the cpu", difference <= SDPA_TOLERANCE, f"off by {difference}")
    section.check("the cache's bytes agree", torch.equal(expected_bytes, actual_bytes))


def _check_sampler(section: Section, device: torch.device) -> None:
    keys = row_keys(torch.arange(64), torch.arange(64) * 7)
    ids = torch.arange(VOCAB, dtype=torch.int32)
    expected = hash_bits(keys, ids)
    actual = hash_bits(keys.to(device), ids.to(device)).cpu()
    section.check("noise has the same bits", torch.equal(expected, actual))
    drawn = [_draw(torch.device("cpu")), _draw(device)]
    equal_count = sum(a == b for a, b in zip(*drawn, strict=True))
    section.figure("tokens drawn as on the cpu", f"{equal_count} of {len(drawn[0])}")
    # The logarithms behind the noise may differ in their last bit, which decides rarely.
    section.check("tokens agree", equal_count >= len(drawn[0]) - 1, f"{equal_count} equal")


def _draw(device: torch.device) -> list[int]:
    kinds = (
        SamplingParams(max_new_tokens=4, seed=0, temperature=0.0),
        SamplingParams(max_new_tokens=4, seed=1),
        SamplingParams(max_new_tokens=4, seed=2, temperature=0.8, top_p=0.9),
        SamplingParams(max_new_tokens=4, seed=3, temperature=1.2, top_k=20, min_p=0.05),
        SamplingParams(max_new_tokens=4, seed=4, repetition_penalty=1.3),
        SamplingParams(max_new_tokens=4, seed=5, logit_bias={7: 3.0}),
    )
    sampler = Sampler(VOCAB, [2], device)
    count = 10 * len(kinds)
    for slot in range(count):
        sampler.add(slot, kinds[slot % len(kinds)], torch.arange(slot % 9 + 1), 1)
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    slots = np.arange(count, dtype=np.int64)
    return sampler.sample(logits.to(device), slots, slots + 10).token_ids


# Speed --------------------------------------------------------------------------------------------


def _time(section: Section, name: str, attention: Attention, shape: AttentionShape) -> None:
    """Kernels and the writing of new rows, planning left out."""
    decode = ((DECODE_TOKENS - 1, 1),) * DECODE_SEQUENCES
    seconds = _seconds_per_layer(attention, decode, shape)
    (kind,) = shape.kinds
    per_token = 2 * kind.kv_head_count * kind.head_dim * shape.dtype.itemsize
    nbytes = DECODE_SEQUENCES * DECODE_TOKENS * per_token
    section.figure(
        f"{name} decode {DECODE_SEQUENCES} x {DECODE_TOKENS} GB/s", nbytes / seconds / 1e9
    )
    seconds = _seconds_per_layer(attention, ((0, PREFILL_TOKENS),), shape)
    operations = 2 * PREFILL_TOKENS**2 * kind.head_count * kind.head_dim
    section.figure(f"{name} prefill {PREFILL_TOKENS} TFLOP/s", operations / seconds / 1e12)


@torch.inference_mode()
def _seconds_per_layer(
    attention: Attention, lengths: tuple[tuple[int, int], ...], shape: AttentionShape
) -> float:
    (kind,) = shape.kinds
    pool, batch = _deal(lengths, shape, layer_count=TIMED_LAYERS)
    attention_pass = attention.start(batch, pool)
    query, key, value = (
        torch.randn(batch.token_count, heads, kind.head_dim, dtype=shape.dtype, device=shape.device)
        for heads in (kind.head_count, kind.kv_head_count, kind.kv_head_count)
    )

    def run() -> None:
        for layer in range(TIMED_LAYERS):
            attention_pass.attend(layer, query, key, value)

    return _timed(run) / TIMED_LAYERS


def _timed(run: Callable[[], None]) -> float:
    """Seconds of one call on the device, the mean of several."""
    run()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(TIMED_REPEATS):
        run()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / TIMED_REPEATS


def _deal(
    lengths: tuple[tuple[int, int], ...], shape: AttentionShape, *, layer_count: int
) -> tuple[KvPool, ForwardBatch]:
    """A batch of (cached, new) tokens per sequence on shuffled pages of random content."""
    (kind,) = shape.kinds
    dtype_name = str(shape.dtype).removeprefix("torch.")
    components = gqa_components(
        layer_count=layer_count,
        kv_head_count=kind.kv_head_count,
        head_dim=kind.head_dim,
        dtype=dtype_name,
    )
    layout = ServerLayout(components, 1, ((0, layer_count),), shape.page_size)
    counts = [-(-(cached + new) // shape.page_size) for cached, new in lengths]
    pool = KvPool.allocate(layout.rank(0, 0), [sum(counts)], shape.device)
    content = pool.buffers[0].view(shape.dtype)
    if shape.device.type == "cpu" or content.numel() < 1 << 24:
        generator = torch.Generator().manual_seed(0)
        content.copy_(torch.randn(content.shape, generator=generator))
    else:
        content.normal_()
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)) + 1
    pages: list[int] = order.tolist()
    chunks = [
        SequenceChunk([0] * new, cached, ([pages.pop() for _ in range(count)],))
        for (cached, new), count in zip(lengths, counts, strict=True)
    ]
    batch = ForwardBatch.build(chunks, groups=pool.groups, device=shape.device)
    return pool, batch
