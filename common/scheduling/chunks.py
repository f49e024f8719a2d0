"""Which tokens of which prompts a step computes.

Knows nothing of steps in flight or of sequences that decode.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from itertools import groupby

from common.protocol.worker import PrefillChunk
from common.request import logprobs_nbytes
from common.scheduling.page_account import PageAccount
from common.scheduling.sequence import Sequence

# What a step may tell of prompts: far below what a worker's message may have, and as much as a
# worker encodes between two beats.
STEP_LOGPROBS_NBYTES_MAX = 16 << 20


# A prompt passes an older one that has at least so many times as much left. Nearer ones would only
# slow each other down.
PASSING_RATIO = 2


def share_step(left: List[int], most: List[int], budget: int) -> list[int]:
    """Tokens of a step for each of some prompts, which are given in order of arrival.

    Up to half of the budget goes to those that may pass the oldest, shortest first; all else goes
    by age. So the oldest has half of every step at least, and ends after twice its own steps at
    most; and a short prompt waits for neither.

    left: tokens that each lacks. most: those that it can take in this step, 1 or more.
    """
    counts = [0] * len(left)
    passing_budget = budget // 2
    passing = [i for i in range(1, len(left)) if PASSING_RATIO * left[i] <= left[0]]
    for index in sorted(passing, key=left.__getitem__):
        counts[index] = min(passing_budget, left[index], most[index])
        passing_budget -= counts[index]
    budget -= sum(counts)
    for index, limit in enumerate(most):
        more = min(budget, limit - counts[index])
        counts[index] += more
        budget -= more
    return counts


def is_passing(left: List[int], token_count: int, budget: int) -> bool:
    """Whether a prompt of so many tokens would get some of a budget by passing the oldest."""
    shorter_count = sum(count for count in left[1:] if count <= token_count)
    return PASSING_RATIO * token_count <= left[0] and shorter_count < budget // 2


def plan_chunks(
    account: PageAccount, prompts: Iterable[Sequence], budget: int
) -> list[PrefillChunk]:
    """What each prompt gets of a token budget, within the window pages that it has and what a step
    may tell. The less urgent get what the more urgent leave."""
    waiting = [s for s in prompts if s.chunk_start < len(s.token_ids)]  # the rest is in flight
    waiting.sort(key=lambda sequence: -sequence.priority)
    counts: list[int] = []
    for _, level in groupby(waiting, key=lambda sequence: sequence.priority):
        equals = list(level)
        most = [_token_max(account, sequence) for sequence in equals]
        left = [sequence.left_count for sequence in equals]
        counts += share_step(left, most, budget - sum(counts))
    told_budget = STEP_LOGPROBS_NBYTES_MAX
    chunks: list[PrefillChunk] = []
    for sequence, count in zip(waiting, counts, strict=True):
        token_nbytes = _reported_nbytes(sequence)
        if token_nbytes:
            room = told_budget // token_nbytes
            count = min(count, room if chunks else max(1, room))
        if count:
            start = sequence.chunk_start
            stop = start + count
            is_last = stop == len(sequence.token_ids)
            chunks.append(PrefillChunk(sequence.request_id, start, stop, is_last))
            told_budget -= token_nbytes * count
    return chunks


def _token_max(account: PageAccount, sequence: Sequence) -> int:
    """Tokens that a prompt can take in this step, whatever others take."""
    account.recycle(sequence)
    start = sequence.chunk_start
    count = min(account.chunk_stop_max(sequence), account.cached.next_stop(sequence, start)) - start
    assert count > 0, f"request {sequence.request_id}: no page for token {sequence.chunk_start}"
    token_nbytes = _reported_nbytes(sequence)
    return min(count, max(1, STEP_LOGPROBS_NBYTES_MAX // token_nbytes)) if token_nbytes else count


def _reported_nbytes(sequence: Sequence) -> int:
    """What is told of every prompt token of a sequence at most."""
    sampling = sequence.sampling
    return logprobs_nbytes(sampling, 1) if sampling.logprob_start_len >= 0 else 0
