"""Attention over a cache of latent rows that all heads share, by torch; runs on every device.

Per head, a key is [W_k c | rotated part] and a value W_v c, where a row of the cache is
[c | rotated part]. Two ways give the same numbers:

- *absorbed*, for sequences with one new token: W_k goes into the query and W_v behind the sum, so
  that all heads read the rows as they lie, and no key or value is ever made;
- *expanded*, for chunks of a prompt: keys and values are made of the rows, which takes less
  arithmetic as soon as they are used by many queries.

A layer may restrict both to a `Selection` of the cached tokens; who makes one is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.attention.attention import CacheWriter
from common.engine.attention.buckets import bucket_by_pages
from common.engine.attention.rows import Picks, Rows
from common.engine.cache.kv_pool import KvPool, Plane, Scratch
from common.engine.forward_batch import ForwardBatch
from common.engine.widened import linear

LATENT = "latent"

EXPANDED_ELEMENTS_MAX = 2**24
"""Keys and values that are made at a time for one chunk; heads take turns beyond it. 64 MiB in
fp32: a prefix of 128k tokens would be 16 GB for 128 heads at once."""


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """A layer's projections of the rows, for this rank's heads.

    key: [heads, nope dim, latent dim]. value: [heads, value dim, latent dim].
    scale: factor on scores.
    """

    key: Tensor
    value: Tensor
    scale: float


class LatentAttention:
    """See `Attention`; its passes are `LatentPass`."""

    name = "latent torch"

    def __init__(self) -> None:
        self._scratch = Scratch()

    def start(self, batch: ForwardBatch, pool: KvPool) -> LatentPass:
        return LatentPass(batch, pool, self._scratch)


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences with one new token each, of similar length.

    rows: int64[B] in the batch. kv_length: of the longest.
    """

    rows: Tensor
    kv_length: int
    cached: Rows


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence with several new tokens. mask: bool[new tokens, kv_length], None if the new
    tokens are all there are."""

    rows: slice
    kv_length: int
    cached: Rows
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Selection:
    """The cached tokens that each new token sees, None where it sees all before it and itself.

    decodes: of each of the pass's `decodes`. chunks: of each of its `chunks`, bool[new tokens,
    kv_length].
    """

    decodes: tuple[Picks | None, ...]
    chunks: tuple[Tensor | None, ...]


class LatentPass:
    """One forward pass over latent rows; what all layers share is prepared once.

    decodes, chunks: the batch, by how it is attended. selection: of the last layer that made one,
    for those behind it that share it.
    """

    def __init__(self, batch: ForwardBatch, pool: KvPool, scratch: Scratch) -> None:
        self._pool = pool
        self._scratch = scratch
        self._writer = CacheWriter(batch, pool)
        group = pool.group_of(LATENT)
        self._batch = batch
        self._page_items = pool.page_items[group]
        self.selection: Selection | None = None

    @cached_property
    def _page_table(self) -> Tensor:
        return self._batch.page_tables[self._pool.group_of(LATENT)].to(torch.int64)

    @cached_property
    def decodes(self) -> list[Decodes]:
        return self._plan_decodes()

    @cached_property
    def chunks(self) -> list[Chunk]:
        return self._plan_chunks()

    def append(self, component: str, layer: int, rows: Tensor) -> None:
        """Write the new tokens' rows [T, row dim] of a component that is paged as the latent is."""
        self._writer.write(component, layer, rows[:, None])

    def read(self, cached: Rows, component: str, layer: int, dtype: torch.dtype) -> Tensor:
        """[B, items, row dim] of such a component, good until the next read."""
        return cached.read(self._pool.plane(component, layer), self._scratch, dtype)

    def attend_latent(
        self,
        layer: int,
        query: Tensor,
        row: Tensor,
        projection: LatentProjection,
        selection: Selection | None = None,
    ) -> Tensor:
        """Append the new tokens' rows to the cache and attend to it, causally.

        query: [T, heads, nope dim + rope dim], rotated. row: [T, latent dim + rope dim], likewise.
        selection: None for all of the cache.
        Returns: [T, heads, value dim] in the dtype of `query`.
        """
        self.append(LATENT, layer, row)
        plane = self._pool.plane(LATENT, layer)
        if selection is None:
            selection = Selection((None,) * len(self.decodes), (None,) * len(self.chunks))
        output = query.new_empty(*query.shape[:2], projection.value.shape[1])
        for decodes, picks in zip(self.decodes, selection.decodes, strict=True):
            if picks is None:
                seen = decodes.cached.is_token
                cached = decodes.cached.read(plane, self._scratch, query.dtype)
            else:
                seen = picks.is_picked
                cached = decodes.cached.pick(plane, picks.items, query.dtype)
            output[decodes.rows] = attend_absorbed(query[decodes.rows], cached, seen, projection)
        for chunk, mask in zip(self.chunks, selection.chunks, strict=True):
            output[chunk.rows] = self._attend_chunk(chunk, plane, query, row, projection, mask)
        return output

    def _attend_chunk(
        self,
        chunk: Chunk,
        plane: Plane,
        query: Tensor,
        row: Tensor,
        projection: LatentProjection,
        mask: Tensor | None = None,
    ) -> Tensor:
        """query, row: of the whole batch. mask: instead of the chunk's own."""
        if chunk.mask is None and plane.view.dtype == row.dtype:
            # The cache holds the rows just computed, unless it stores a narrower type.
            rows = row[chunk.rows]
        else:
            cached = chunk.cached.read(plane, self._scratch, query.dtype)
            rows = cached[0, : chunk.kv_length]
        mask = chunk.mask if mask is None else mask
        if mask is not None and absorbing_pays(query.shape[-1], projection, len(mask)):
            return attend_absorbed_chunk(query[chunk.rows], rows, mask, projection)
        return attend_expanded(query[chunk.rows], rows, mask, projection)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionPass`: the row is the one key, and its latent part the one value.

        For a caller that has absorbed its projections already; `value` must be key's first part.
        """
        heads, latent_dim = query.shape[1], value.shape[-1]
        rope_dim = query.shape[-1] - latent_dim
        same = torch.eye(latent_dim, dtype=query.dtype, device=query.device)
        same = same.expand(heads, latent_dim, latent_dim)
        scale = (latent_dim + rope_dim) ** -0.5
        return self.attend_latent(layer, query, key[:, 0], LatentProjection(same, same, scale))

    def _plan_chunks(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        first = 0
        for index, length in enumerate(self._batch.query_lengths):
            if length > 1:
                rows = slice(first, first + length)
                chunks.append(self._plan_chunk(index, rows, self._batch.kv_length_list[index]))
            first += length
        return chunks

    def _plan_decodes(self) -> list[Decodes]:
        batch = self._batch
        device = batch.token_ids.device
        found: list[Decodes] = []
        rows = [0, *accumulate(batch.query_lengths)]
        decodes = [(i, rows[i]) for i, length in enumerate(batch.query_lengths) if length == 1]
        page_counts = [-(-batch.kv_length_list[i] // self._page_items) for i, _ in decodes]
        for bucket in bucket_by_pages(page_counts) if decodes else []:
            indexes = torch.tensor([decodes[i][0] for i in bucket], device=device)
            width = max(page_counts[i] for i in bucket)
            lengths = batch.kv_lengths[indexes]
            items = torch.arange(width * self._page_items, device=device)
            found.append(
                Decodes(
                    torch.tensor([decodes[i][1] for i in bucket], device=device),
                    max(batch.kv_length_list[decodes[i][0]] for i in bucket),
                    Rows(self._page_table[indexes, :width], items < lengths[:, None]),
                )
            )
        return found

    def _plan_chunk(self, index: int, rows: slice, kv_length: int) -> Chunk:
        page_count = -(-kv_length // self._page_items)
        cached = Rows(self._page_table[index : index + 1, :page_count], None)
        length = rows.stop - rows.start
        if length == kv_length:
            return Chunk(rows, kv_length, cached, None)
        # New token i stands at position kv_length - length + i and sees itself and all before.
        positions = torch.arange(kv_length, device=self._page_table.device)
        mask = positions[None] <= positions[kv_length - length :, None]
        return Chunk(rows, kv_length, cached, mask)


def attend_absorbed(
    query: Tensor, rows: Tensor, is_token: Tensor | None, projection: LatentProjection
) -> Tensor:
    """One query token per sequence, over rows as they lie in the cache.

    query: [B, heads, nope dim + rope dim]. rows: [B, items, latent dim + rope dim].
    Returns: [B, heads, value dim].
    """
    nope_dim = projection.key.shape[1]
    latent_dim = projection.key.shape[2]
    query_row = torch.cat((absorb_query(query, projection), query[..., nope_dim:]), dim=-1)
    mask = None if is_token is None else is_token[:, None, None]
    # All heads read the same rows, so they are the queries of one head. Summing whole rows and
    # dropping the rotated part is less work than a copy of the latent part of every row.
    keys = rows[:, None]
    summed = F.scaled_dot_product_attention(
        query_row[:, None], keys, keys, attn_mask=mask, scale=projection.scale
    )
    return project_sums(summed[:, 0, :, :latent_dim], projection)


def attend_absorbed_chunk(
    query: Tensor, rows: Tensor, mask: Tensor, projection: LatentProjection
) -> Tensor:
    """A few query tokens of one sequence, over rows as they lie in the cache.

    query: [T, heads, nope dim + rope dim]. rows: [items, latent dim + rope dim].
    mask: bool[T, items]. Returns: [T, heads, value dim].
    """
    nope_dim = projection.key.shape[1]
    latent_dim = projection.key.shape[2]
    query_row = torch.cat((absorb_query(query, projection), query[..., nope_dim:]), dim=-1)
    keys = rows[None, None]
    summed = F.scaled_dot_product_attention(
        query_row.flatten(0, 1)[None, None],
        keys,
        keys,
        attn_mask=mask.repeat_interleave(query.shape[1], dim=0)[None, None],
        scale=projection.scale,
    )
    return project_sums(summed[0, 0].view(query_row.shape)[..., :latent_dim], projection)


def absorbing_pays(query_dim: int, projection: LatentProjection, token_count: int) -> bool:
    """Whether so many query tokens of one sequence are attended over its rows with fewer products
    than over keys and values that are made of them: the latter take as many for any number."""
    nope_dim, latent_dim = projection.key.shape[1:]
    value_dim = projection.value.shape[1]
    absorbed = token_count * (2 * latent_dim + query_dim - nope_dim)
    expanded = latent_dim * (nope_dim + value_dim) + token_count * (query_dim + value_dim)
    return absorbed < expanded


def absorb_query(query: Tensor, projection: LatentProjection) -> Tensor:
    """Queries against latent rows: [T, heads, nope dim + rope dim] to [T, heads, latent]."""
    plain = query[..., : projection.key.shape[1]]
    return torch.bmm(plain.transpose(0, 1), projection.key).transpose(0, 1)


def project_sums(latent: Tensor, projection: LatentProjection) -> Tensor:
    """Weighted sums of rows [T, heads, latent dim] to [T, heads, value dim], without gaps."""
    output = latent.new_empty(*latent.shape[:2], projection.value.shape[1])
    torch.bmm(latent.transpose(0, 1), projection.value.transpose(1, 2), out=output.transpose(0, 1))
    return output


def attend_expanded(
    query: Tensor, rows: Tensor, mask: Tensor | None, projection: LatentProjection
) -> Tensor:
    """Several query tokens of one sequence, over keys and values made of its rows.

    query: [T, heads, nope dim + rope dim]. rows: [items, latent dim + rope dim].
    mask: bool[T, items], None for a causal square. Returns: [T, heads, value dim].
    """
    head_count, value_dim, latent_dim = projection.value.shape
    latent, rotated = rows[:, :latent_dim], rows[:, latent_dim:]
    per_head = len(rows) * (query.shape[-1] + value_dim)
    step = max(1, EXPANDED_ELEMENTS_MAX // per_head)
    output = query.new_empty(*query.shape[:2], value_dim)
    for first in range(0, head_count, step):
        heads = slice(first, min(first + step, head_count))
        plain_keys, values = (
            linear(latent, part[heads].flatten(0, 1)).view(len(rows), -1, part.shape[1])
            for part in (projection.key, projection.value)
        )
        turned = rotated[:, None].expand(-1, plain_keys.shape[1], -1)
        keys = torch.cat((plain_keys, turned), dim=-1).transpose(0, 1)
        # Fused kernels want values as wide as keys (measured on CPU, 192 and 128: 2 times faster in
        # fp32 and 6 times in bf16).
        padding = max(0, query.shape[-1] - value_dim)
        values = F.pad(values, (0, padding)).transpose(0, 1)
        attended = F.scaled_dot_product_attention(
            query[:, heads].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=projection.scale,
        )
        output[:, heads] = attended[0, :, :, :value_dim].transpose(0, 1)
    return output
