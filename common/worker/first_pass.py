"""The pass before the first request: it pays for first use, and proves that passes find memory."""

from __future__ import annotations

import torch

from common.config import ServerConfig
from common.engine.distributed import ParallelContext
from common.engine.model_runner import ModelRunner
from common.errors import ConfigError
from common.layout.cache_layout import RankLayout
from common.protocol.worker import NewSequence, PageGrant, PrefillChunk, Step
from common.protocol.worker_values import PassTimes
from common.request import SamplingParams

REQUEST = 0
"""Id of the computed request. It is retired at the end, so the id stays free."""


def first_pass_tokens(
    config: ServerConfig,
    context_length: int,
    layout: RankLayout,
    page_counts: list[int],
    device: torch.device,
    parallel: ParallelContext,
) -> int:
    """How many tokens to compute, of which all but one are one chunk: the same on every rank.

    On a GPU the largest chunk that a prompt may have. Torch's allocator keeps the memory of its
    kernels for later chunks, so a lack of memory shows now and not in a request. A CPU may take
    minutes for so many tokens, so there it is a page of tokens.
    """
    wanted = config.page_size
    if device.type == "cuda":
        wanted = min(config.chunked_prefill_size + 1, context_length)
    return parallel.least(fitting_tokens(layout, page_counts, wanted), device)


def fitting_tokens(layout: RankLayout, page_counts: list[int], wanted: int) -> int:
    """`wanted`, halved until one sequence of so many tokens fits into the pages; at least 1.

    One token always has a page.
    """
    count = max(2, wanted)
    while count > 1 and not _fits(layout, page_counts, count):
        count //= 2
    return count


def _fits(layout: RankLayout, page_counts: list[int], token_count: int) -> bool:
    groups = (group.group for group in layout.groups)
    return all(
        group.page_end(token_count) <= count
        for group, count in zip(groups, page_counts, strict=True)
    )


def warm_up(
    runner: ModelRunner, layout: RankLayout, vocab_size: int, token_count: int
) -> PassTimes:
    """Compute a chunk of all but the last token, then decode; without a decode for one token. Then
    the same again, which pays for nothing else and so can be timed.

    Writes only to the first pages of each group, which belong to no request yet.
    Raises: ConfigError if the model's numbers are not finite.
    """
    _run_once(runner, layout, vocab_size, token_count)
    return _run_once(runner, layout, vocab_size, token_count)


def _run_once(
    runner: ModelRunner, layout: RankLayout, vocab_size: int, token_count: int
) -> PassTimes:
    count = max(1, token_count - 1)
    tokens = [index % vocab_size for index in range(count)]
    sampling = SamplingParams(max_new_tokens=2, seed=0, temperature=1.0, top_p=0.9)
    grants = [
        PageGrant(REQUEST, index, 0, list(range(1, 1 + max(1, group.group.page_end(token_count)))))
        for index, group in enumerate(layout.groups)
    ]
    done = runner.run(
        Step(
            step_id=0,
            new=[NewSequence(REQUEST, tokens, count, sampling)],
            grants=grants,
            chunks=[PrefillChunk(REQUEST, 0, count, is_last=True)],
        )
    )
    failed, decode_s = done.failed, 0.0
    if not failed and token_count > 1:
        step = Step(step_id=0, decode=[REQUEST], decode_tokens=[tokens[0]])
        decoded = runner.run(step)
        failed, decode_s = decoded.failed, decoded.seconds
    runner.run(Step(step_id=0, retired=[REQUEST]))
    if failed:
        raise ConfigError(f"a first pass failed: {failed[REQUEST]}; check the weights")
    return PassTimes(done.seconds / count, decode_s)
