"""Our own kernels in Triton's interpreter, against torch. Run by `packages.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from common.engine.config.rope import RopeConfig, RopeKind
from common.engine.layers.choose_fused import FusedShape, check_normed_rotation
from common.engine.layers.fused import FusedKernels, NormedRotation, RotationShape
from common.engine.sampling import sampler, triton_draw
from common.engine.sampling.choose_draw import TOLERANCE, DrawChoice, DrawKernel, check_draw
from common.engine.sampling.noise import gumbel, row_keys
from common.request import SamplingParams
from tests.engine.sampled_steps import draws
from tests.kernel_packages.packages import report_checks

CPU = torch.device("cpu")
VOCAB_SIZE = 700
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


def kernels_without_flashinfer() -> FusedKernels:
    kernels = FusedKernels.__new__(FusedKernels)
    kernels.normed_rotations = set()
    return kernels


CHECKS: dict[str, Callable[[], None]] = {
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
    report_checks(CHECKS)
