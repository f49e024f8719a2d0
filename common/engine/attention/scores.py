"""From attention scores to weights: scale, softcap, sinks.

Knows nothing of pages or windows: a mask holds which items are seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """How a layer weighs what its queries see.

    scale: on the scores; None for head dim ** -0.5. softcap: scores become c * tanh(score / c); 0
    for none. sinks: [query heads of this rank], scores of a key that every query sees and whose
    value is nothing; None if there is none.
    """

    scale: float | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None


PLAIN = ScoreRule()


def attend_scores(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rule: ScoreRule,
    *,
    sinks: Tensor | None,
    mask: Tensor | None,
    is_causal: bool = False,
) -> Tensor:
    """Attention of query [B, heads, n, dim] to keys and values [B, KV heads, items, dim].

    Query heads are KV heads times a whole number. sinks: of the rule, broadcastable to
    [heads, n, 1]. mask: bool, broadcastable to [B, heads, n, items], True where a key is seen; with
    is_causal, n = items and the triangle is the mask.
    Returns: [B, heads, n, dim].
    """
    is_grouped = query.shape[1] != keys.shape[1]
    if rule.softcap == 0.0 and sinks is None:
        return F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            is_causal=is_causal,
            scale=rule.scale,
            enable_gqa=is_grouped,
        )
    if is_grouped:
        repeats = query.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(repeats, dim=1)
        values = values.repeat_interleave(repeats, dim=1)
    scale = rule.scale if rule.scale is not None else query.shape[-1] ** -0.5
    scores = (query @ keys.transpose(-1, -2)).float() * scale
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        column = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return weights.to(query.dtype) @ values
