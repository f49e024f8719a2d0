"""Our kernels over the real FlashInfer, with what it compiles by definition.

Run by `packages.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from common.engine.attention import flashinfer as pages
from common.engine.attention import flashinfer_kernels, flashinfer_latent
from common.engine.attention.flashinfer import FlashInferAttention
from common.engine.attention.flashinfer_latent import FlashInferLatentAttention
from common.engine.attention.kinds import AttentionKind, LatentKind
from common.engine.attention.trial import (
    TOLERANCE,
    AttentionShape,
    check_attention,
    check_latent,
    check_recorded,
    check_recorded_latent,
)
from common.engine.config.mla import RouterConfig
from common.engine.config.rope import RopeConfig, RopeKind
from common.engine.layers.block_moe import TOLERANCE as BLOCK_TOLERANCE
from common.engine.layers.block_moe import check_block_moe, mix_by_flashinfer
from common.engine.layers.choose_fused import TOLERANCE as FUSED_TOLERANCE
from common.engine.layers.choose_fused import (
    FusedShape,
    check_fused,
    check_offset_norms,
    check_rotation,
)
from common.engine.layers.expert_trial import check_router
from common.engine.layers.fused import FusedKernels, RotationShape
from common.engine.layers.fused_experts import ExpertKernels, GroupedRouter
from tests.engine.flashinfer_by_definition import Kept, Rerun
from tests.kernel_packages import compiled_flashinfer
from tests.kernel_packages.compiled_flashinfer import COMPILED
from tests.kernel_packages.packages import report_checks

CPU = torch.device("cpu")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SHAPE = AttentionShape((), BF16, CPU, 16)

# Groups that decode by tensor cores and by vector units, every head dim, every rule of scores.
KINDS = {
    "groups": AttentionKind(8, 2, 128),
    "no groups": AttentionKind(2, 2, 64),
    "window": AttentionKind(8, 2, 64, window=40),
    "softcap": AttentionKind(2, 1, 256, window=24, scale=0.0625, softcap=50.0),
    "wide": AttentionKind(4, 1, 512, scale=1.0),
    "sinks": AttentionKind(8, 1, 64, has_sinks=True),
    "window and sinks": AttentionKind(8, 1, 64, window=40, has_sinks=True),
}
LATENT = LatentKind(4, 512, 64, 128, 128, scale=192**-0.5)


def pages_are_attended(kind: AttentionKind, shape: AttentionShape) -> None:
    backend = backend_of(kind, shape)
    assert check_attention(backend, kind, shape) < TOLERANCE[shape.dtype]


def recordings_read_the_last_plan(kind: AttentionKind, shape: AttentionShape) -> None:
    backend = backend_of(kind, shape)
    assert check_recorded(backend, kind, shape, Rerun) < TOLERANCE[shape.dtype]
    assert check_recorded(backend, kind, shape, Kept) > 0.1


def backend_of(kind: AttentionKind, shape: AttentionShape) -> FlashInferAttention:
    return FlashInferAttention([kind], dtype=shape.dtype, device=CPU, cache_dtype=shape.cache_dtype)


def latent_rows_are_attended() -> None:
    shape = replace(SHAPE, latent=LATENT)
    backend = FlashInferLatentAttention(LATENT, dtype=BF16, device=CPU)
    assert check_latent(backend, LATENT, shape) < TOLERANCE[BF16]
    assert check_recorded_latent(backend, LATENT, shape, Rerun) < TOLERANCE[BF16]
    assert check_recorded_latent(backend, LATENT, shape, Kept) > 0.1


def small_functions_are_fused() -> None:
    for dtype in (BF16, torch.float16):
        difference = check_fused(FusedKernels(), FusedShape(256, 512, dtype, CPU))
        assert 0.0 < difference <= FUSED_TOLERANCE[dtype]


def heads_are_rotated() -> None:
    rope = RopeConfig(RopeKind.YARN, 10000.0, factor=4.0, original_length=256)
    for dtype in (BF16, torch.float16):
        for is_interleaved in (False, True):
            shape = FusedShape(
                256, 512, dtype, CPU, rope=replace(rope, is_interleaved=is_interleaved)
            )
            for head_dim, rotated_dim in ((64, 64), (128, 128), (256, 64)):
                rotation = RotationShape(head_dim, rotated_dim, is_interleaved)
                kernels = FusedKernels()
                difference = check_rotation(kernels, rotation, shape)
                assert 0.0 < difference <= FUSED_TOLERANCE[dtype], (rotation, dtype, difference)
                assert rotation in kernels.rotations


def norms_by_offsets_are_fused() -> None:
    for dtype in (BF16, torch.float16):
        difference = check_offset_norms(FusedKernels(), FusedShape(256, 512, dtype, CPU))
        assert difference <= FUSED_TOLERANCE[dtype]


def tokens_are_routed_in_groups() -> None:
    """As a released model of 256 experts does; what the kernel refuses is a ValueError."""
    rule = RouterConfig(True, 8, 4, 2.5)
    router, kernels = GroupedRouter(256, 8, True, rule), ExpertKernels()
    assert check_router(kernels, router, BF16, CPU) < 1e-5
    assert router in kernels.routers
    for counts in ((512, 8), (256, 9)):
        try:
            check_router(ExpertKernels(), GroupedRouter(*counts, True, rule), BF16, CPU)
        except ValueError:
            continue
        raise AssertionError(f"{counts} should have been refused")


def experts_of_blocks_are_mixed() -> None:
    assert check_block_moe(mix_by_flashinfer, CPU) < BLOCK_TOLERANCE
    assert any(name.startswith("fused_moe_90") for name in COMPILED.names)


def what_is_compiled_is_of_the_kind() -> None:
    """By the names under which its sources were generated."""
    expected = {
        "head_dim_qk_512_head_dim_vo_512": "wide",
        "use_swa_True_use_logits_cap_True": "softcap",
        "dtype_kv_e4m3": "a cache of fp8",
        "batch_prefill_attention_sink_bf16_swa_True": "window and sinks",
        "batch_prefill_attention_sink_bf16_swa_False": "sinks",
        "batch_mla_attention": "latent rows",
    }
    for part, what in expected.items():
        assert any(part in name for name in COMPILED.names), (what, COMPILED.names)


def options_are_those_of_the_wrappers() -> None:
    """What a call names must be a parameter: some take the rest and ignore it."""
    import flashinfer
    import flashinfer.page
    import flashinfer.rope

    no_rest = inspect.Parameter.VAR_KEYWORD
    for function in (
        flashinfer.BatchDecodeWithPagedKVCacheWrapper.__init__,
        flashinfer.BatchDecodeWithPagedKVCacheWrapper._plan_impl,
        flashinfer.BatchPrefillWithPagedKVCacheWrapper.__init__,
        flashinfer.BatchAttentionWithAttentionSinkWrapper.__init__,
        flashinfer.mla.BatchMLAPagedAttentionWrapper.__init__,
        flashinfer.mla.BatchMLAPagedAttentionWrapper.plan,
        flashinfer.mla.BatchMLAPagedAttentionWrapper.run,
        flashinfer.fast_decode_plan,
        flashinfer.page.append_paged_kv_cache,
        flashinfer.rope.apply_rope_with_cos_sin_cache,
        flashinfer.fused_moe.fused_topk_deepseek,
        flashinfer.fused_moe.cutlass_fused_moe,
    ):
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        assert no_rest not in kinds, function


CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"{name}: {check.__name__}": partial(check, kind, SHAPE)
        for name, kind in KINDS.items()
        for check in (pages_are_attended, recordings_read_the_last_plan)
    },
    **{
        f"{name} over fp8: {check.__name__}": partial(
            check, KINDS[name], replace(SHAPE, cache_dtype=FP8)
        )
        for name in ("groups", "no groups", "window")
        for check in (pages_are_attended, recordings_read_the_last_plan)
    },
    "latent_rows_are_attended": latent_rows_are_attended,
    "small_functions_are_fused": small_functions_are_fused,
    "heads_are_rotated": heads_are_rotated,
    "norms_by_offsets_are_fused": norms_by_offsets_are_fused,
    "experts_of_blocks_are_mixed": experts_of_blocks_are_mixed,
    "tokens_are_routed_in_groups": tokens_are_routed_in_groups,
    "what_is_compiled_is_of_the_kind": what_is_compiled_is_of_the_kind,
    "options_are_those_of_the_wrappers": options_are_those_of_the_wrappers,
}

if __name__ == "__main__":
    # The memory of a card is not at hand.
    pages.WORKSPACE_NBYTES = flashinfer_latent.WORKSPACE_NBYTES = 1 << 16
    flashinfer_kernels.PLAN_NBYTES = 1 << 16
    compiled_flashinfer.install()
    report_checks(CHECKS)
