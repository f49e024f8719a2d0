"""One forward pass as tensors: which tokens, at which positions, into which pages.

Knows nothing of requests, sampling or steps. Sequences lie one after the other ("ragged"): the
tokens of sequence b are rows query_starts[b] .. query_starts[b + 1] of everything indexed by token.

What a page table holds, and where a token goes, follows from how its page group lives:

    full, window   the pages of consecutive tokens         token t: page t // items, row t % items
    tail           one page, a ring                        token t: row t % items
    slot           one page, the state of the sequence     no token has a place; `cache/slots.py`
    block          the pages of the blocks closed by now   no token has a place: blocks have
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.host_copy import upload
from common.layout.cache_layout import PageGroup
from common.layout.component import LiveKind


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """Consecutive new tokens of one sequence.

    start: position of token_ids[0], which is also the number of tokens already in the cache.
    page_ids: per page group, the page of every logical page index from 0 on; 0 stands for a page
        that is not read any more.
    logits_offsets: indexes into token_ids of the tokens whose logits are wanted.
    """

    token_ids: Sequence[int]
    start: int
    page_ids: Sequence[Sequence[int]]
    logits_offsets: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T new tokens of B sequences; every tensor is on the model's device.

    token_ids, positions: int64[T].
    query_starts: int32[B + 1], rows of each sequence; query_lengths is its difference, on the CPU.
    starts: int32[B], tokens in the cache before this pass; start_list: the same on the CPU.
    kv_lengths: int32[B], tokens in the cache after this pass, the new ones included;
        kv_length_list holds the same numbers on the CPU.
    page_tables: one int32[B, pages] per page group, padded with 0, the scratch page. A table has to
        cover kv_lengths of its sequence and may be wider; that of a slot or tail is int32[B, 1].
    token_pages, token_rows: one int64[T] per page group (int32 in a recorded pass): the page id and
        the row in the page that receive what is cached of each token; empty for slots and blocks.
        In a tail, the page of a token that a later token of this pass overwrites is 0, the scratch
        page.
    logits_rows: int64[R], rows of T whose logits are wanted, in the order they are returned; None
        for all of them.
    state_pages: for some b, a page per page group that takes the state of sequence b in place of
        its own; sequence b + 1 goes on from that state in this pass, and has b's pages otherwise.
    """

    token_ids: Tensor
    positions: Tensor
    query_starts: Tensor
    starts: Tensor
    kv_lengths: Tensor
    page_tables: tuple[Tensor, ...]
    token_pages: tuple[Tensor, ...]
    token_rows: tuple[Tensor, ...]
    logits_rows: Tensor | None
    query_lengths: tuple[int, ...]
    start_list: tuple[int, ...]
    kv_length_list: tuple[int, ...]
    state_pages: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @property
    def token_count(self) -> int:
        return self.token_ids.shape[0]

    @property
    def sequence_count(self) -> int:
        return len(self.query_lengths)

    @property
    def is_decode_only(self) -> bool:
        """Whether every sequence has exactly one new token."""
        return self.token_count == self.sequence_count

    def decodes(self, first: int, stop: int, token_ids: Tensor) -> ForwardBatch:
        """Some sequences of a batch that only decodes, with other tokens: int64[stop - first]."""
        assert self.is_decode_only and self.logits_rows is None and not self.state_pages
        own = slice(first, stop)
        return ForwardBatch(
            token_ids=token_ids,
            positions=self.positions[own],
            query_starts=self.query_starts[: stop - first + 1],
            starts=self.starts[own],
            kv_lengths=self.kv_lengths[own],
            page_tables=tuple(table[own] for table in self.page_tables),
            token_pages=tuple(pages[own] for pages in self.token_pages),
            token_rows=tuple(rows[own] for rows in self.token_rows),
            logits_rows=None,
            query_lengths=self.query_lengths[own],
            start_list=self.start_list[own],
            kv_length_list=self.kv_length_list[own],
        )

    @staticmethod
    def build(
        chunks: Sequence[SequenceChunk], *, groups: Sequence[PageGroup], device: torch.device | str
    ) -> ForwardBatch:
        """The batch of some chunks, from plain lists.

        groups: the page groups, in the order of every chunk's `page_ids`.
        Bugs are asserted: an empty batch or chunk, a page list that does not cover the chunk.
        """
        assert chunks, "a forward pass needs at least one sequence"
        query_lengths = [len(chunk.token_ids) for chunk in chunks]
        kv_lengths = [c.start + n for c, n in zip(chunks, query_lengths, strict=True)]
        logits_rows: list[int] = []
        first_row = 0
        for chunk, query_length in zip(chunks, query_lengths, strict=True):
            assert all(0 <= offset < query_length for offset in chunk.logits_offsets), chunk
            logits_rows.extend(first_row + offset for offset in chunk.logits_offsets)
            first_row += query_length
        return ForwardBatch.from_tensors(
            token_ids=_to_device([t for c in chunks for t in c.token_ids], torch.int64, device),
            positions=_to_device(
                [p for c, end in zip(chunks, kv_lengths, strict=True) for p in range(c.start, end)],
                torch.int64,
                device,
            ),
            query_lengths=query_lengths,
            kv_lengths=kv_lengths,
            page_tables=[
                _page_table([chunk.page_ids[index] for chunk in chunks], kv_lengths, group, device)
                for index, group in enumerate(groups)
            ],
            groups=groups,
            logits_rows=_to_device(logits_rows, torch.int64, device),
        )

    @staticmethod
    def from_tensors(
        *,
        token_ids: Tensor,
        positions: Tensor,
        query_lengths: Sequence[int],
        kv_lengths: Sequence[int],
        page_tables: Sequence[Tensor],
        groups: Sequence[PageGroup],
        logits_rows: Tensor | None,
        state_pages: Mapping[int, Sequence[int]] | None = None,
    ) -> ForwardBatch:
        """The batch of tensors that the caller maintains; no Python work per sequence or token.

        token_ids, positions, logits_rows: int64 on the device. page_tables: int32[B, pages] each,
        row b for sequence b. query_lengths, kv_lengths: one number per sequence.
        """
        device = token_ids.device
        sequence_count = len(query_lengths)
        assert len(kv_lengths) == sequence_count, (len(kv_lengths), sequence_count)
        assert sum(query_lengths) == token_ids.shape[0] == positions.shape[0], query_lengths
        lengths = np.array(query_lengths, dtype=np.int64)
        starts = np.array(kv_lengths, dtype=np.int64) - lengths
        query_starts = np.zeros(sequence_count + 1, dtype=np.int32)
        query_starts[1:] = np.cumsum(lengths)
        start_tensor, kv_length_tensor, query_start_tensor, sequence_of_token = upload(
            device,
            starts.astype(np.int32),
            np.array(kv_lengths, dtype=np.int32),
            query_starts,
            np.repeat(np.arange(sequence_count), lengths),
        )
        places: list[tuple[Tensor, Tensor]] = []
        for table, group in zip(page_tables, groups, strict=True):
            assert table.shape[0] == sequence_count and table.dtype == torch.int32, table.shape
            places.append(
                token_places(table, group, positions, sequence_of_token, kv_length_tensor)
            )
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            query_starts=query_start_tensor,
            starts=start_tensor,
            kv_lengths=kv_length_tensor,
            page_tables=tuple(page_tables),
            token_pages=tuple(pages for pages, _ in places),
            token_rows=tuple(rows for _, rows in places),
            logits_rows=logits_rows,
            query_lengths=tuple(query_lengths),
            start_list=tuple(starts.tolist()),
            kv_length_list=tuple(kv_lengths),
            state_pages=state_pages or {},
        )


@dataclass(frozen=True, slots=True)
class HostRows:
    """B sequences as the host knows them; those of a pass that is recorded have one new token each.

    lengths: int64[B], tokens of each, the new ones included.
    page_tables: one int32[B, pages] per page group, as those of a `ForwardBatch`.
    """

    lengths: NDArray[np.int64]
    page_tables: tuple[NDArray[np.int32], ...]

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def of(batch: ForwardBatch) -> HostRows:
        """Of a batch that only decodes; asks the device for its tables, and waits for it."""
        assert batch.is_decode_only
        return HostRows(
            np.array(batch.kv_length_list, dtype=np.int64),
            tuple(table.cpu().numpy() for table in batch.page_tables),
        )

    def first(self, count: int) -> HostRows:
        return HostRows(self.lengths[:count], tuple(table[:count] for table in self.page_tables))

    def filled(self, count: int, length: int, groups: Sequence[PageGroup]) -> HostRows:
        """The same, with as many sequences of a length on the scratch page as make `count`."""
        missing = count - len(self)
        tables = [
            np.pad(table, ((0, missing), (0, max(0, group.page_end(length) - table.shape[1]))))
            for table, group in zip(self.page_tables, groups, strict=True)
        ]
        lengths = np.concatenate((self.lengths, np.full(missing, length, dtype=np.int64)))
        return HostRows(lengths, tuple(tables))

    def places(self, index: int, group: PageGroup) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """What `token_places` finds for the new tokens in the page group of an index."""
        table, positions = self.page_tables[index], self.lengths - 1
        match group.live.kind:
            case LiveKind.FULL | LiveKind.WINDOW:
                pages = table[np.arange(len(self)), positions // group.page_items]
            case LiveKind.TAIL:
                pages = table[:, 0]
            case LiveKind.SLOT | LiveKind.BLOCK:
                nowhere = np.zeros(0, dtype=np.int32)
                return nowhere, nowhere
            case _:
                assert_never(group.live.kind)
        return pages, (positions % group.page_items).astype(np.int32)


def token_places(
    table: Tensor,
    group: PageGroup,
    positions: Tensor,
    sequence_of_token: Tensor,
    kv_lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """The page and the row of each token in one page group; both int64[T], or int64[0]."""
    match group.live.kind:
        case LiveKind.FULL | LiveKind.WINDOW:
            page_index = torch.div(positions, group.page_items, rounding_mode="floor")
            pages = table[sequence_of_token, page_index].to(torch.int64)
            return pages, positions - page_index * group.page_items
        case LiveKind.TAIL:
            # Two tokens of one pass must not race for a row: the later one has it.
            is_lost = positions < kv_lengths[sequence_of_token] - group.page_items
            pages = table[sequence_of_token, 0].to(torch.int64).masked_fill(is_lost, 0)
            return pages, positions % group.page_items
        case LiveKind.SLOT | LiveKind.BLOCK:
            nowhere = positions.new_empty(0)
            return nowhere, nowhere
        case _:
            assert_never(group.live.kind)


def _to_device(values: list[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(device)


def _page_table(
    page_ids: list[Sequence[int]],
    kv_lengths: list[int],
    group: PageGroup,
    device: torch.device | str,
) -> Tensor:
    """int32[B, pages], rows padded with the scratch page."""
    for pages, kv_length in zip(page_ids, kv_lengths, strict=True):
        assert len(pages) >= group.page_end(kv_length), (len(pages), group, kv_length)
        assert group.live.is_paged or len(pages) == 1, (pages, group)
    width = max(len(pages) for pages in page_ids)
    rows = [[*pages, *[0] * (width - len(pages))] for pages in page_ids]
    return torch.tensor(rows, dtype=torch.int32).to(device)
