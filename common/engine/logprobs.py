"""Log-probabilities of chosen tokens, the most likely ones and asked-for ones, from raw logits.

Raw means: as the model gave them, before penalties, biases and temperature, so that what is
reported says what the model believes, not how a token was drawn. Knows nothing of requests.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.request import TokenLogprobs

ROW_BLOCK_ELEMENTS = 1 << 24
"""Logits that are normalised at a time: bounds the extra memory to 64 MiB whatever the prompt."""


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    top_counts: NDArray[np.int64],
    asked_ids: dict[int, NDArray[np.int64]],
) -> list[TokenLogprobs]:
    """One entry per row.

    Args:
        logits: float32[R, vocab], not changed.
        token_ids: int64[R], the token of each row.
        top_counts: int64[R], how many of the most likely tokens each row wants.
        asked_ids: row -> ids whose log-probability is wanted.
    """
    row_count, vocab_size = logits.shape
    block = max(1, ROW_BLOCK_ELEMENTS // vocab_size)
    entries: list[TokenLogprobs] = []
    for first in range(0, row_count, block):
        rows = slice(first, first + block)
        asked = {row - first: asked_ids[row] for row in asked_ids if first <= row < first + block}
        entries.extend(_block_logprobs(logits[rows], token_ids[rows], top_counts[rows], asked))
    return entries


def _block_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    top_counts: NDArray[np.int64],
    asked_ids: dict[int, NDArray[np.int64]],
) -> list[TokenLogprobs]:
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1).tolist()
    top_max = int(top_counts.max(initial=0))
    top = [[] for _ in chosen] if top_max == 0 else _top_pairs(logprobs, top_max)
    asked: dict[int, list[tuple[int, float]]] = {}
    for row, ids in asked_ids.items():
        values = logprobs[row, torch.from_numpy(ids).to(logits.device)].tolist()
        asked[row] = list(zip(ids.tolist(), values, strict=True))
    return [
        TokenLogprobs(
            token_id=token_id,
            logprob=chosen[row],
            top=top[row][: int(top_counts[row])],
            asked=asked.get(row, []),
        )
        for row, token_id in enumerate(token_ids.tolist())
    ]


def _top_pairs(logprobs: Tensor, top_max: int) -> list[list[tuple[int, float]]]:
    top = logprobs.topk(top_max, dim=-1)
    rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [list(zip(ids, values, strict=True)) for ids, values in rows]
