"""Which tokens the grammars of running requests allow, by slot, and what they forbid in logits.

A request's grammar is compiled on another thread while its first forward pass runs. Requests
without one cost nothing here. Knows nothing of pages, sampling or messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.host_copy import upload
from common.errors import GrammarError
from common.grammar import GrammarCompiler, GrammarState
from common.request import Grammar

MASK_BLOCK_ELEMENTS = 1 << 24
"""Logits masked at a time: bounds the extra memory to a few times 16 MiB at any batch."""

Rows = NDArray[np.int64]


class GrammarTable:
    """One writer: the thread that runs the model.

    compiler: None where no tokens are drawn; then masks are never asked for.
    """

    def __init__(
        self, compiler: GrammarCompiler | None, vocab_size: int, device: torch.device
    ) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._device = device
        self._bits = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=device)
        self._thread: ThreadPoolExecutor | None = None  # most servers never see a grammar
        self._starting: dict[int, Future[GrammarState]] = {}
        self._states: dict[int, GrammarState] = {}
        self._broken: dict[int, str] = {}

    def add(self, slot: int, grammar: Grammar, output_ids: Sequence[int]) -> None:
        """Start a request in a slot. output_ids: what was generated elsewhere."""
        if self._compiler is None:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar")
        self._starting[slot] = self._thread.submit(self._compiler.start, grammar, output_ids)

    def remove(self, slot: int) -> None:
        starting = self._starting.pop(slot, None)
        if starting is not None:
            starting.cancel()  # else later compilations wait for an unused one
        self._states.pop(slot, None)
        self._broken.pop(slot, None)

    def forbid(self, logits: Tensor, rows: Rows, slots: Rows) -> dict[int, str]:
        """Make what is not allowed next impossible in float32[R, vocab] `logits[rows]`, in place.

        slots: int64[len(rows)], each with a grammar. Returns: row -> why it has no token; its
        logits mean nothing then.
        """
        failed: dict[int, str] = {}
        states: list[GrammarState] = []
        bound: list[int] = []
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            state = self._find(slot)
            if state is None:
                failed[row] = self._broken[slot]
            else:
                states.append(state)
                bound.append(row)
        if not states:
            return failed
        assert self._compiler is not None, "there are states"
        masks = self._compiler.masks(states)
        for row, state in zip(bound, states, strict=True):
            if trouble := state.trouble:
                failed[row] = f"the grammar can't be followed: {trouble}"
        block = max(1, MASK_BLOCK_ELEMENTS // self._vocab_size)
        for first in range(0, len(bound), block):
            self._fill(logits, bound[first : first + block], masks[first : first + block])
        return failed

    def advance(self, slots: Rows, token_ids: Sequence[int]) -> None:
        """Take what was drawn; int64[n] slots with grammars that did not fail."""
        for slot, token_id in zip(slots.tolist(), token_ids, strict=True):
            try:
                self._states[slot].advance(token_id)
            except GrammarError as error:
                del self._states[slot]
                self._broken[slot] = f"the grammar does not allow the token {token_id}: {error}"

    def is_complete(self, slot: int) -> bool:
        """Nothing but the end may follow."""
        state = self._find(slot)
        return state is not None and state.is_complete

    def _find(self, slot: int) -> GrammarState | None:
        """Waits for the compiler if the slot is new; None if it failed; see `_broken`."""
        starting = self._starting.pop(slot, None)
        if starting is not None:
            try:
                self._states[slot] = starting.result()
            except GrammarError as error:
                self._broken[slot] = f"the grammar can't be followed: {error}"
        return self._states.get(slot)

    def _fill(self, logits: Tensor, rows: list[int], masks: NDArray[np.int32]) -> None:
        """Masks travel packed and are spread on the device."""
        (packed,) = upload(self._device, masks.view(np.uint8))
        is_forbidden = ((packed.unsqueeze(-1) & self._bits) == 0).flatten(1)[:, : self._vocab_size]
        if rows[-1] - rows[0] + 1 == len(rows):  # neighbours need no copy
            logits[rows[0] : rows[-1] + 1].masked_fill_(is_forbidden, -torch.inf)
        else:
            (index,) = upload(self._device, np.array(rows, dtype=np.int64))
            logits[index] = logits[index].masked_fill_(is_forbidden, -torch.inf)
