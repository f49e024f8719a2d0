"""Log-probabilities of chosen tokens, the most likely ones and asked-for ones, from raw logits.

Raw means: as the model gave them, before penalties, biases and temperature, so that what is
reported says what the model believes, not how a token was drawn. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.host_copy import upload
from common.request import TokenLogprobs

ROW_BLOCK_ELEMENTS = 1 << 24
"""Logits that are normalised at a time: bounds the extra memory to 64 MiB whatever the prompt."""


@dataclass(frozen=True, slots=True)
class LaunchedLogprobs:
    """One entry per row, as tensors; `entries` spells them out once they are on the host.

    tensors: int64[R] token ids, float32[R] of them, int64[R, K] the most likely ids, float32[R, K]
        of them, float32[A] of the asked ids, row after row, int64[R] ranks of the token ids, or
        int64[0] if they are not told.
    """

    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
    top_counts: NDArray[np.int64]
    asked_ids: Mapping[int, NDArray[np.int64]]

    def entries(self, host: Sequence[Tensor]) -> list[TokenLogprobs]:
        """host: `tensors`, copied."""
        token_ids, chosen, top_ids, top_values, asked_values, ranks = (t.tolist() for t in host)
        asked: dict[int, list[tuple[int, float]]] = {}
        first = 0
        for row in sorted(self.asked_ids):
            ids = self.asked_ids[row].tolist()
            asked[row] = list(zip(ids, asked_values[first : first + len(ids)], strict=True))
            first += len(ids)
        return [
            TokenLogprobs(
                token_id=token_id,
                logprob=chosen[row],
                top=list(zip(top_ids[row], top_values[row], strict=True))[:count],
                asked=asked.get(row, []),
                rank=ranks[row] if ranks else 0,
            )
            for row, (token_id, count) in enumerate(
                zip(token_ids, self.top_counts.tolist(), strict=True)
            )
        ]


def launch_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    top_counts: NDArray[np.int64],
    asked_ids: Mapping[int, NDArray[np.int64]],
    *,
    has_ranks: bool = False,
) -> LaunchedLogprobs:
    """One entry per row; the device is not waited for.

    Args:
        logits: float32[R, vocab], not changed.
        token_ids: int64[R], the token of each row.
        top_counts: int64[R], how many of the most likely tokens each row wants.
        asked_ids: row -> ids whose log-probability is wanted.
        has_ranks: the place of each row's token among all is told too.
    """
    row_count, vocab_size = logits.shape
    top_max = int(top_counts.max(initial=0))
    block = max(1, ROW_BLOCK_ELEMENTS // vocab_size)
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
    for first in range(0, row_count, block):
        rows = slice(first, first + block)
        logprobs = torch.log_softmax(logits[rows], dim=-1)
        chosen = logprobs.gather(1, token_ids[rows].unsqueeze(1)).squeeze(1)
        top = logprobs.topk(top_max, dim=-1)
        asked = {row - first: asked_ids[row] for row in asked_ids if first <= row < first + block}
        ranks = token_ids.new_empty(0)
        if has_ranks:
            ranks = (logprobs >= chosen.unsqueeze(1)).sum(dim=-1)
        parts.append((chosen, top.indices, top.values, _asked(logprobs, asked), ranks))
    chosen, top_ids, top_values, asked_values, ranks = (
        torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True)
    )
    return LaunchedLogprobs(
        (token_ids, chosen, top_ids, top_values, asked_values, ranks), top_counts, asked_ids
    )


def _asked(logprobs: Tensor, asked_ids: Mapping[int, NDArray[np.int64]]) -> Tensor:
    if not asked_ids:
        return logprobs.new_empty(0)
    rows = np.concatenate([np.full(len(asked_ids[row]), row) for row in sorted(asked_ids)])
    ids = np.concatenate([asked_ids[row] for row in sorted(asked_ids)])
    row_index, id_index = upload(logprobs.device, rows, ids)
    return logprobs[row_index, id_index]
