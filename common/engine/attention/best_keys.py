"""Which keys a query attends to if it may attend to a few only: those that score best.

The scores are those of small heads beside the attention's own. Knows nothing of pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KeyChoice:
    """How the new tokens choose keys.

    component: the cached rows that stand for the keys, [element] each.
    query: [T, heads, element], rotated. weights: fp32[T, heads], of the heads' scores. count: of
    the keys that are chosen.
    """

    component: str
    query: Tensor
    weights: Tensor
    count: int


def choice_scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """sum_h w_h relu(q_h . k), fp32[B, n, items].

    query: [B, n, heads, element]. weights: fp32[B, n, heads]. keys: [B, items, element].
    """
    products = query.flatten(1, 2).float() @ keys.transpose(1, 2).float()
    products = products.view(*query.shape[:3], -1).relu_()
    return (products * weights[..., None]).sum(dim=2)


def best_keys(scores: Tensor, count: int) -> Tensor:
    """bool like scores [.., items]: True for the `count` best of each row.

    Of equal ones the first are taken, so that neither padding nor the device decides.
    """
    if count >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    least = scores.topk(count, dim=-1).values[..., -1:]
    is_better, is_equal = scores > least, scores == least
    room = count - is_better.sum(dim=-1, keepdim=True)
    return is_better | (is_equal & (is_equal.cumsum(dim=-1) <= room))
