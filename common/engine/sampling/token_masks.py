"""Tokens that a request never draws: all but those it allows, and the last tokens of bad words.

A word is a sequence of tokens. Its last one is forbidden where the output ends with the others, so
the ends of outputs lie on the device too: the token before may not be on the host yet. Requests
without such rules cost nothing here. Knows nothing of pages, messages or text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from common.engine.host_copy import upload
from common.request import SamplingParams
from common.request_bounds import BAD_WORD_LENGTH_MAX

ROW_COUNT_START = 4
"""Rows that each table has when it is first needed; they double when they run out."""

TAIL_LENGTH = BAD_WORD_LENGTH_MAX - 1
NO_TOKEN = -2  # before an output's first one
ANY_TOKEN = -1  # in front of a word that is shorter than others

Slots = NDArray[np.int64]


class TokenMasks:
    """By slot. One writer: the thread that runs the model.

    A rule that looks at nothing, as allowed tokens and words of one token are, is a row of bool.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._forbidden = _Rows(vocab_size, torch.bool, device)
        self._tails = _Rows(TAIL_LENGTH, torch.int64, device)
        self._words: dict[int, tuple[Tensor, Tensor]] = {}
        # On the device: a number from the host would be copied there, with a wait.
        self._impossible = torch.full((), -torch.inf, device=device)
        self._nothing = torch.zeros((), device=device)

    def add(self, slot: int, params: SamplingParams, output_ids: Tensor) -> None:
        """output_ids: int64[n] on the host, what was generated so far."""
        if has_fixed_mask(params):
            row = self._forbidden.take(slot)
            row.fill_(bool(params.allowed_token_ids))
            if params.allowed_token_ids:
                self._mark(row, params.allowed_token_ids, is_forbidden=False)
            single = [word[0] for word in params.bad_words if len(word) == 1]
            if single:
                self._mark(row, single, is_forbidden=True)
        if has_words(params):
            self._add_words(slot, [word for word in params.bad_words if len(word) > 1], output_ids)

    def remove(self, slot: int) -> None:
        self._forbidden.give_back(slot)
        self._tails.give_back(slot)
        self._words.pop(slot, None)

    def forbid_fixed(self, logits: Tensor, rows: Slots, slots: Slots) -> None:
        """Make what these slots never draw impossible in float32[R, vocab] `logits[rows]`."""
        index, masks = upload(self._device, rows, self._forbidden.of(slots))
        forbidden = self._forbidden.values[masks]
        logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)

    def forbid_words(self, logits: Tensor, rows: Slots, slots: Slots) -> None:
        """Make the last tokens of words impossible whose others the outputs end with."""
        words = [self._words[slot] for slot in slots.tolist()]
        counts = [len(lasts) for _, lasts in words]
        length = max(beginnings.shape[1] for beginnings, _ in words)
        beginnings = torch.cat(
            [pad(one, (length - one.shape[1], 0), value=ANY_TOKEN) for one, _ in words]
        )
        lasts = torch.cat([lasts for _, lasts in words])
        index, tails = upload(
            self._device, np.repeat(rows, counts), np.repeat(self._tails.of(slots), counts)
        )
        ends = self._tails.values[tails, TAIL_LENGTH - length :]
        is_begun = ((beginnings == ends) | (beginnings == ANY_TOKEN)).all(dim=1)
        change = torch.where(is_begun, self._impossible, self._nothing)
        logits.index_put_((index, lasts), change, accumulate=True)

    def append(self, tokens: Tensor, slots: Slots) -> None:
        """Take what was drawn for slots with words; int64[len(slots)] tokens on the device."""
        (index,) = upload(self._device, self._tails.of(slots))
        rest = self._tails.values[index, 1:]
        self._tails.values[index] = torch.cat((rest, tokens.unsqueeze(1)), dim=1)

    def _mark(self, row: Tensor, token_ids: Sequence[int], *, is_forbidden: bool) -> None:
        (ids,) = upload(self._device, np.array(token_ids, dtype=np.int64))
        row.index_fill_(0, ids, is_forbidden)

    def _add_words(self, slot: int, words: list[tuple[int, ...]], output_ids: Tensor) -> None:
        length = max(len(word) for word in words) - 1
        beginnings = np.full((len(words), length), ANY_TOKEN, dtype=np.int64)
        for place, word in enumerate(words):
            beginnings[place, length - len(word) + 1 :] = word[:-1]
        lasts = np.array([word[-1] for word in words], dtype=np.int64)
        tail = np.full(TAIL_LENGTH, NO_TOKEN, dtype=np.int64)
        output = output_ids[-TAIL_LENGTH:].numpy()
        tail[TAIL_LENGTH - len(output) :] = output
        begun_there, lasts_there, tail_there = upload(self._device, beginnings, lasts, tail)
        self._words[slot] = (begun_there, lasts_there)
        self._tails.take(slot).copy_(tail_there)


class _Rows:
    """A table of rows on the device, of which slots have one each while they need it."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros((0, width), dtype=dtype, device=device)
        self._row_of: dict[int, int] = {}  # by slot
        self._free: list[int] = []

    def take(self, slot: int) -> Tensor:
        """The slot's row from now on, whatever it holds."""
        if not self._free:
            old = len(self.values)
            grown = self.values.new_zeros((max(2 * old, ROW_COUNT_START), self.values.shape[1]))
            grown[:old] = self.values
            self.values = grown
            self._free.extend(range(len(grown) - 1, old - 1, -1))
        self._row_of[slot] = self._free.pop()
        return self.values[self._row_of[slot]]

    def give_back(self, slot: int) -> None:
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def of(self, slots: Slots) -> Slots:
        return np.array([self._row_of[slot] for slot in slots.tolist()], dtype=np.int64)


def has_fixed_mask(params: SamplingParams) -> bool:
    return bool(params.allowed_token_ids) or any(len(word) == 1 for word in params.bad_words)


def has_words(params: SamplingParams) -> bool:
    """Words of more than one token."""
    return any(len(word) > 1 for word in params.bad_words)
