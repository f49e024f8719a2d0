"""Which cached tokens a query sees, where a small indexer chooses the ones that matter to it.

Every token leaves one index key in the cache, by which `best_keys` chooses. While there are no more
tokens than are chosen, nothing is left out and nothing is scored.

Index keys are kept in the cache's own dtype. Published engines keep them rotated by a Hadamard
matrix, in float8 with a scale per key: the same products but for rounding, other bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.attention.best_keys import KeyChoice, best_keys, choice_scores
from common.engine.attention.latent import Chunk, Decodes, LatentPass, Selection
from common.engine.attention.rows import Picks, picks_of

INDEX_KEY = "index_k"

SCORES_MAX = 2**24
"""Scores of single heads that are made at a time, 64 MiB; queries take turns beyond it."""


def select(attention: LatentPass, layer: int, key: Tensor, choice: KeyChoice) -> Selection:
    """Append the new tokens' index keys [T, dim], rotated, to the cache, and choose."""
    attention.append(choice.component, layer, key)
    return Selection(
        tuple(_pick(attention, layer, decodes, choice) for decodes in attention.decodes),
        tuple(_mask(attention, layer, chunk, choice) for chunk in attention.chunks),
    )


def _pick(attention: LatentPass, layer: int, decodes: Decodes, choice: KeyChoice) -> Picks | None:
    count = choice.count
    if decodes.kv_length <= count:
        return None
    keys = attention.read(decodes.cached, choice.component, layer, torch.float32)
    is_token = decodes.cached.is_token
    assert is_token is not None, "decodes are padded"
    sequence_count, item_count = keys.shape[:2]
    found: list[Picks] = []
    step = max(1, SCORES_MAX // (item_count * choice.query.shape[1]))
    for first in range(0, sequence_count, step):
        some = slice(first, first + step)
        rows = decodes.rows[some]
        queries, weights = choice.query[rows, None], choice.weights[rows, None]
        scores = choice_scores(queries, weights, keys[some])[:, 0]
        scores.masked_fill_(~is_token[some], float("-inf"))
        found.append(picks_of(best_keys(scores, count) & is_token[some], count))
    return Picks(
        torch.cat([picks.items for picks in found]), torch.cat([p.is_picked for p in found])
    )


def _mask(attention: LatentPass, layer: int, chunk: Chunk, choice: KeyChoice) -> Tensor | None:
    count = choice.count
    if chunk.kv_length <= count:
        return None
    keys = attention.read(chunk.cached, choice.component, layer, torch.float32)
    keys = keys[:, : chunk.kv_length]
    length = chunk.rows.stop - chunk.rows.start
    if chunk.mask is not None:
        seen = chunk.mask.clone()
    else:
        seen = torch.ones(length, length, dtype=torch.bool, device=keys.device).tril()
    # Token i sees kv_length - length + i + 1 tokens, itself included; the first ones see all.
    first = max(0, count - (chunk.kv_length - length))
    step = max(1, SCORES_MAX // (chunk.kv_length * choice.query.shape[1]))
    for start in range(first, length, step):
        some = slice(start, min(length, start + step))
        rows = slice(chunk.rows.start + some.start, chunk.rows.start + some.stop)
        scores = choice_scores(choice.query[None, rows], choice.weights[None, rows], keys)[0]
        seen[some] = best_keys(scores.masked_fill_(~seen[some], float("-inf")), count)
    return seen
