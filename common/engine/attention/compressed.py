"""Attention to a window of tokens and to blocks of all tokens before; runs on every device.

One row is key and value of all heads. A query sees the window's rows and the blocks that were
closed up to its own token, under one softmax with a sink per head; the window and the blocks
overlap. A layer without blocks sees its window only. Blocks are made in `blocks.py`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.engine.attention.attention import CacheWriter
from common.engine.attention.best_keys import KeyChoice, best_keys, choice_scores
from common.engine.attention.blocks import BlockPass
from common.engine.attention.buckets import bucket_by_pages
from common.engine.attention.rows import Rows, picks_of
from common.engine.cache.kv_pool import KvPool, Scratch
from common.engine.forward_batch import ForwardBatch
from common.layout.component import LiveKind

WINDOW = "window"

QUERIES_MAX = 256
PAIRS_MAX = 2**20
"""Tokens of one prompt that are attended together, and pairs of them and cached tokens. 2**20 pairs
of the latter at 64 heads are 64 MiB of fp32 scores where every 4 tokens have a block."""


@dataclass(frozen=True, slots=True)
class SinkRule:
    """scale: on scores. sinks: fp32[heads], scores of a key that every query sees and whose value
    is nothing."""

    scale: float
    sinks: Tensor


class CompressedAttention:
    """See `Attention`; its passes are `CompressedPass`."""

    name = "compressed torch"

    def __init__(self) -> None:
        # One per component: what is read of one is attended together with what is read of others.
        self._scratches: defaultdict[str, Scratch] = defaultdict(Scratch)

    def start(self, batch: ForwardBatch, pool: KvPool) -> CompressedPass:
        return CompressedPass(batch, pool, self._scratches)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Rows of a page group of B sequences, and bool[B, n, items]: those that n queries each see."""

    held: Rows
    is_seen: Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """n consecutive queries of each of B sequences that are attended together.

    rows: int64[B, n] in the batch. sequences: int64[B]. positions: int64[B, n], of the queries.
    stops: cached tokens up to the last query, per sequence, on the CPU. groups: by page group.
    """

    rows: Tensor
    sequences: Tensor
    positions: Tensor
    stops: tuple[int, ...]
    groups: dict[int, _Seen] = field(default_factory=dict)


class CompressedPass:
    """One forward pass; what all layers share is prepared once.

    blocks: where layers leave and find the rows of blocks. `attend` sees the ones put there.
    """

    def __init__(
        self, batch: ForwardBatch, pool: KvPool, scratches: defaultdict[str, Scratch]
    ) -> None:
        self.blocks = BlockPass(batch, pool)
        self._batch = batch
        self._pool = pool
        self._scratches = scratches
        self._writer = CacheWriter(batch, pool)
        self._parts = _plan_parts(batch, pool.layout.server.page_size)

    def attend_compressed(
        self,
        layer: int,
        query: Tensor,
        row: Tensor,
        rule: SinkRule,
        *,
        blocks: str | None,
        choice: KeyChoice | None = None,
    ) -> Tensor:
        """Append the new tokens' rows to the window, and attend.

        query: [T, heads, element]. row: [T, element]. blocks: the component of this layer's
        blocks. choice: which of the visible ones are attended to, if not all.
        Returns: [T, heads, element] in the dtype of `query`.
        """
        self._writer.write(WINDOW, layer, row[:, None])
        output = torch.empty_like(query)
        for part in self._parts:
            keys, is_seen = self._read(part, WINDOW, layer, query.dtype)
            if blocks is not None:
                more, is_more_seen = self._read_blocks(part, blocks, layer, query.dtype, choice)
                keys = torch.cat((keys, more), dim=1)
                is_seen = torch.cat((is_seen, is_more_seen), dim=2)
            output[part.rows] = attend_shared(query[part.rows], keys, is_seen, rule)
        return output

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionPass`: of a layer with a window and no sinks. `value` must be `key`."""
        rule = SinkRule(query.shape[-1] ** -0.5, query.new_full((query.shape[1],), float("-inf")))
        return self.attend_compressed(layer, query, key[:, 0], rule, blocks=None)

    def _read_blocks(
        self, part: _Part, blocks: str, layer: int, dtype: torch.dtype, choice: KeyChoice | None
    ) -> tuple[Tensor, Tensor]:
        """As `_read`, of the blocks that are attended to."""
        plane = self._pool.plane(blocks, layer)
        seen = self._seen(part, plane.geometry.group)
        if choice is None or choice.count >= seen.is_seen.shape[2]:
            return self._read(part, blocks, layer, dtype)
        index, _ = self._read(part, choice.component, layer, choice.query.dtype)
        scores = choice_scores(choice.query[part.rows], choice.weights[part.rows], index)
        scores.masked_fill_(~seen.is_seen, float("-inf"))
        is_chosen = best_keys(scores, choice.count) & seen.is_seen
        if part.rows.shape[1] > 1:
            # Many queries choose most of the blocks between them.
            rows, _ = self._read(part, blocks, layer, dtype)
            return rows, is_chosen
        picks = picks_of(is_chosen[:, 0], choice.count)
        rows = seen.held.pick(plane, picks.items, dtype)
        # The padding of a sequence with fewer blocks may be NaN.
        return rows.masked_fill_(~picks.is_picked[:, :, None], 0), picks.is_picked[:, None]

    def _read(
        self, part: _Part, component: str, layer: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """([B, items, element], bool[B, n, items] of what is seen)."""
        plane = self._pool.plane(component, layer)
        seen = self._seen(part, plane.geometry.group)
        if not seen.is_seen.shape[2]:
            shape = (len(part.sequences), 0, plane.view.shape[-1])
            return plane.view.new_empty(shape, dtype=dtype), seen.is_seen
        return seen.held.read(plane, self._scratches[component], dtype), seen.is_seen

    def _seen(self, part: _Part, group: int) -> _Seen:
        if group not in part.groups:
            part.groups[group] = self._plan_rows(part, group)
        return part.groups[group]

    def _plan_rows(self, part: _Part, group: int) -> _Seen:
        live, page_items = self._pool.groups[group].live, self._pool.page_items[group]
        table = self._batch.page_tables[group]
        device = table.device
        query_count = part.rows.shape[1]
        stops = torch.tensor(part.stops)
        starts = torch.zeros_like(stops)
        if live.kind is LiveKind.WINDOW:
            starts = (stops - query_count - live.size + 1).clamp(min=0)
        else:
            assert live.kind is LiveKind.BLOCK, live
            stops = stops // live.size
        first_pages = starts // page_items
        width = int((-(-stops // page_items) - first_pages).max())
        pages = (first_pages[:, None] + torch.arange(width)).to(device)
        # A shorter sequence reads pages behind its own; no item of them counts.
        known = pages.clamp(max=max(0, table.shape[1] - 1))
        items = (pages[:, :, None] * page_items + torch.arange(page_items, device=device)).flatten(
            1
        )
        starts, stops = starts.to(device)[:, None], stops.to(device)[:, None]
        if live.kind is LiveKind.WINDOW:
            distance = part.positions[:, :, None] - items[:, None]
            is_seen = (distance >= 0) & (distance < live.size)
        else:
            is_seen = items[:, None] < ((part.positions + 1) // live.size)[:, :, None]
        held = Rows(
            page_table=table[part.sequences[:, None], known].to(torch.int64),
            is_token=(items >= starts) & (items < stops),
        )
        return _Seen(held, is_seen)


def attend_shared(query: Tensor, keys: Tensor, is_seen: Tensor, rule: SinkRule) -> Tensor:
    """All heads' attention to the same rows, which are keys and values.

    query: [B, n, heads, element]. keys: [B, items, element]. is_seen: bool[B, n, items].
    Returns: as query.
    """
    scores = (query.flatten(1, 2) @ keys.transpose(1, 2)).view(*query.shape[:3], -1)
    scores = scores.float() * rule.scale
    scores.masked_fill_(~is_seen[:, :, None], float("-inf"))
    column = rule.sinks.float()[:, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    return (weights.to(query.dtype).flatten(1, 2) @ keys).view(query.shape)


def _plan_parts(batch: ForwardBatch, page_size: int) -> list[_Part]:
    """Decodes in buckets of similar length, prompts alone and in pieces."""
    device = batch.token_ids.device
    parts: list[_Part] = []
    decodes: list[tuple[int, int]] = []
    first = 0
    for index, (length, stop) in enumerate(
        zip(batch.query_lengths, batch.kv_length_list, strict=True)
    ):
        if length == 1:
            decodes.append((index, first))
        else:
            step = max(1, min(QUERIES_MAX, PAIRS_MAX // stop))
            for offset in range(0, length, step):
                count = min(step, length - offset)
                rows = torch.arange(first + offset, first + offset + count, device=device)[None]
                sequence = torch.tensor([index], device=device)
                part_stop = stop - length + offset + count
                parts.append(_Part(rows, sequence, batch.positions[rows], (part_stop,)))
        first += length
    page_counts = [-(-batch.kv_length_list[index] // page_size) for index, _ in decodes]
    for bucket in bucket_by_pages(page_counts) if decodes else []:
        rows = torch.tensor([[decodes[i][1]] for i in bucket], device=device)
        sequences = [decodes[i][0] for i in bucket]
        stops = tuple(batch.kv_length_list[sequence] for sequence in sequences)
        parts.append(
            _Part(rows, torch.tensor(sequences, device=device), batch.positions[rows], stops)
        )
    return parts
