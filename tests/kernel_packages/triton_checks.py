"""Our own kernels in Triton's interpreter, against torch. Run by `packages.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from common.engine.config.mla import RouterConfig
from common.engine.config.rope import RopeConfig, RopeKind
from common.engine.layers import choose_fused, expert_trial, triton_experts
from common.engine.layers.choose_fused import FusedShape, check_normed_rotation
from common.engine.layers.conv_step import ConvShape, check_conv, step_fused
from common.engine.layers.expert_trial import check_order, check_router
from common.engine.layers.fused import FusedKernels, NormedRotation, RotationShape
from common.engine.layers.fused_experts import (
    ExpertCounts,
    ExpertKernels,
    GroupedRouter,
    SoftmaxRouter,
)
from common.engine.sampling import sampler, triton_draw
from common.engine.sampling.choose_draw import TOLERANCE, DrawChoice, DrawKernel, check_draw
from common.engine.sampling.noise import gumbel, row_keys
from common.request import SamplingParams
from tests.engine.sampled_steps import draws
from tests.kernel_packages.packages import report_checks

CPU = torch.device("cpu")
VOCAB_SIZE = 700
# The interpreter cuts to bfloat16; torch rounds each product, and what stands beside them.
TWO_ROUNDINGS = 2**-5
KINDS = (
    SamplingParams(max_new_tokens=9, seed=1, temperature=0.0),
    SamplingParams(max_new_tokens=9, seed=2, temperature=1.0),
    SamplingParams(max_new_tokens=9, seed=-3, temperature=0.3, return_logprob=True),
    SamplingParams(max_new_tokens=9, seed=4, temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(max_new_tokens=9, seed=5, temperature=0.8, min_p=0.1),
    SamplingParams(max_new_tokens=9, seed=6, temperature=1.2, logit_bias={7: 30.0}),
    SamplingParams(max_new_tokens=9, seed=7, temperature=1.0, frequency_penalty=0.5),
)


def tokens_are_torch_s(*, vocab_size: int) -> None:
    assert check_draw(DrawKernel(), vocab_size, CPU) <= TOLERANCE


def noise_is_torch_s_to_the_last_bits() -> None:
    """Of one token at a time, so that its score is the noise itself."""
    seeds, positions = torch.arange(40) * 77 - 900, torch.arange(40) * 1000003
    keys = row_keys(seeds, positions)
    noise = gumbel(keys, torch.arange(2, dtype=torch.int32))
    # Which of two is drawn turns where the other one's advantage is what the noise says.
    gap = noise[:, 0] - noise[:, 1]
    for shift, expected in ((1e-4, 1), (-1e-4, 0)):
        logits = torch.stack((torch.zeros(40), gap + shift), dim=1)
        tokens, _, _ = DrawKernel()(logits, (seeds, positions, torch.ones(40)))
        assert (tokens == expected).all(), tokens


def a_sampler_draws_the_same_by_the_kernel() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, len(KINDS), VOCAB_SIZE, generator=generator) * 3.0
    logits[2, 1, 5] = float("inf")
    plain = draws(KINDS, logits)
    sampler.choose_draw = lambda vocab_size, device: DrawChoice(DrawKernel(), "")  # type: ignore[assignment]
    assert draws(KINDS, logits) == plain


def heads_are_normed_and_rotated(*, is_offset: bool, is_interleaved: bool) -> None:
    rope = RopeConfig(RopeKind.DEFAULT, 10000.0, is_interleaved=is_interleaved)
    # The interpreter cuts to bfloat16 instead of rounding.
    for dtype, rounding in ((torch.bfloat16, 2**-7), (torch.float16, 2**-11)):
        shape = FusedShape(256, 512, dtype, CPU, rope)
        for head_dim, rotated_dim in ((64, 64), (128, 32)):
            rotation = RotationShape(head_dim, rotated_dim, is_interleaved)
            kernels = kernels_without_flashinfer()
            normed = NormedRotation(rotation, is_offset)
            found = check_normed_rotation(kernels, normed, shape)
            assert 0.0 < found <= rounding, (normed, dtype, found)


def tokens_are_routed(*, expert_count: int, per_token: int, is_normalized: bool) -> None:
    router = SoftmaxRouter(expert_count, per_token, is_normalized)
    for dtype, rounding in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
        kernels = ExpertKernels()
        assert check_router(kernels, router, dtype, CPU) <= rounding
        assert router in kernels.routers


def tokens_are_routed_by_sigmoids(*, expert_count: int, per_token: int) -> None:
    router = GroupedRouter(expert_count, per_token, True, RouterConfig(True, 1, 1, 2.5))
    kernels = ExpertKernels()
    assert check_router(kernels, router, torch.bfloat16, CPU) <= 1e-6
    assert router in kernels.routers


def channels_are_convolved(*, kernel_size: int, has_bias: bool) -> None:
    for dtype, rounding in ((torch.float32, 1e-6), (torch.bfloat16, TWO_ROUNDINGS)):
        shape = ConvShape(kernel_size, has_bias, dtype, CPU)
        assert check_conv(step_fused, shape) <= rounding, dtype


def the_first_of_equal_experts_is_chosen() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [float("-inf")] * 4 + [0.0]])
    shares, experts = triton_experts.route(logits, 3, is_normalized=True)
    assert experts.tolist() == [[1, 2, 3], [4, 0, 1]]
    assert torch.allclose(shares, torch.tensor([[1 / 3] * 3, [1.0, 0.0, 0.0]]))


def experts_are_ordered(*, expert_count: int, per_token: int) -> None:
    counts = ExpertCounts(expert_count, per_token)
    for dtype, rounding in ((torch.float32, 1e-6), (torch.bfloat16, TWO_ROUNDINGS)):
        kernels = ExpertKernels()
        assert check_order(kernels, counts, dtype, CPU) <= rounding
        assert counts in kernels.counts


def kernels_without_flashinfer() -> FusedKernels:
    kernels = FusedKernels.__new__(FusedKernels)
    kernels.normed_rotations = set()
    return kernels


CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"{per_token} of {expert_count} experts, {check.func.__name__}": check
        for expert_count, per_token in ((5, 1), (60, 4), (512, 10))
        for check in (
            partial(
                tokens_are_routed,
                expert_count=expert_count,
                per_token=per_token,
                is_normalized=expert_count > 60,
            ),
            partial(tokens_are_routed_by_sigmoids, expert_count=expert_count, per_token=per_token),
            partial(experts_are_ordered, expert_count=expert_count, per_token=per_token),
        )
    },
    **{
        f"convolution of {size}, bias {has_bias}": partial(
            channels_are_convolved, kernel_size=size, has_bias=has_bias
        )
        for size, has_bias in ((4, False), (2, True))
    },
    "the_first_of_equal_experts_is_chosen": the_first_of_equal_experts_is_chosen,
    **{f"{size} tokens": partial(tokens_are_torch_s, vocab_size=size) for size in (9, 512, 1300)},
    **{
        f"heads, offset {is_offset}, interleaved {is_interleaved}": partial(
            heads_are_normed_and_rotated, is_offset=is_offset, is_interleaved=is_interleaved
        )
        for is_offset in (False, True)
        for is_interleaved in (False, True)
    },
    "noise_is_torch_s_to_the_last_bits": noise_is_torch_s_to_the_last_bits,
    "a_sampler_draws_the_same_by_the_kernel": a_sampler_draws_the_same_by_the_kernel,
}

if __name__ == "__main__":
    triton_draw.BLOCK = 512
    expert_trial.TOKEN_COUNTS = (1, 3, 30)
    choose_fused._ROW_COUNTS = (1, 2, 17)
    report_checks(CHECKS)
