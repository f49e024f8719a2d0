"""Prompts whose log-probabilities are asked for are computed in chunks that a message can tell."""

from __future__ import annotations

import pytest

from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, CacheComponent, Segment, Shard
from common.protocol.codec import encode_logprobs
from common.protocol.worker import StepDone
from common.request import SamplingParams, TokenLogprobs, logprobs_nbytes
from common.request_bounds import TOKEN_ID_MAX, TOP_LOGPROB_COUNT_MAX
from common.scheduling.batch_limits import BatchLimits
from common.scheduling.batcher import Batcher
from common.scheduling.chunks import STEP_LOGPROBS_NBYTES_MAX
from common.scheduling.page_account import PageAccount

PROMPT_COUNT = 20_000
TOLD = SamplingParams(
    1, 0, return_logprob=True, top_logprobs_num=128, logprob_start_len=0, ignore_eos=True
)
SILENT = SamplingParams(1, 0, ignore_eos=True)


def test_what_a_step_tells_is_bounded_whatever_its_token_budget() -> None:
    component = CacheComponent("c", (0,), (Segment("head", 1, 8),), FULL, Shard.SPLIT, "float32")
    layout = ServerLayout((component,), 1, ((0, 1),), 256)
    account = PageAccount(layout.groups, (400,), has_prefix_cache=False)
    batcher = Batcher(account, BatchLimits(1 << 20, 8, 1 << 20, frozenset()))
    for request_id, sampling in enumerate((TOLD, TOLD, SILENT)):
        sequence = account.open(request_id, [5] * PROMPT_COUNT, PROMPT_COUNT, sampling)
        assert sequence is not None
        batcher.add(sequence)
    computed = [0, 0, 0]
    while batcher.prompt_count:
        step = batcher.plan_step().step
        assert step is not None
        counts = {chunk.request_id: chunk.stop - chunk.start for chunk in step.chunks}
        told = sum(logprobs_nbytes(TOLD, counts.get(request_id, 0)) for request_id in (0, 1))
        assert told <= STEP_LOGPROBS_NBYTES_MAX
        for request_id, count in counts.items():
            computed[request_id] += count
        ids = [chunk.request_id for chunk in step.chunks if chunk.is_last] + step.decode
        for token in batcher.apply_done(StepDone(step.step_id, ids, [5] * len(ids))).tokens:
            batcher.remove(token.sequence)
    assert computed == [PROMPT_COUNT] * 3


@pytest.mark.parametrize("position_count", [1, 15, 16, 1 << 16])
@pytest.mark.parametrize("top_count", [0, 20, TOP_LOGPROB_COUNT_MAX])
def test_no_chunk_takes_more_than_is_reckoned_with(top_count: int, position_count: int) -> None:
    """With the header of its bytes in the message that carries it."""
    pair = (TOKEN_ID_MAX, -1.5)
    ids = tuple(range(20))
    entry = TokenLogprobs(TOKEN_ID_MAX, -1.5, [pair] * top_count, [pair] * len(ids), TOKEN_ID_MAX)
    sampling = SamplingParams(
        1, 0, return_logprob=True, top_logprobs_num=top_count, token_ids_logprob=ids
    )
    one, two = len(encode_logprobs([entry])), len(encode_logprobs([entry] * 2))
    head_nbytes = 5 + 5  # of the list, and of the bytes that hold it, at most
    nbytes = head_nbytes + (two - one) * position_count
    assert nbytes <= logprobs_nbytes(sampling, position_count)
