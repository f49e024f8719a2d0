"""Sampling state of every running request, as arrays indexed by slot.

Numbers that steer a step lie in numpy arrays on the host, so that a step reads them with one gather
and decides without asking the device. Token counts for penalties lie on the device and exist only
for the requests that asked for a penalty. Knows nothing of pages, logits or messages.
"""

from __future__ import annotations

import math
from enum import IntFlag
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.host_copy import upload
from common.engine.sampling.noise import wrap_seed
from common.engine.sampling.token_masks import has_fixed_mask, has_words
from common.errors import ProtocolError
from common.protocol.sampling_bounds import check_sampling_params
from common.request import SamplingParams

Number = TypeVar("Number", np.float32, np.int64)

SLOT_COUNT_START = 16
"""Slots and penalty rows that exist at first; both double when they run out."""


TEMPERATURE_MIN = 1e-6
"""Below it a draw is the argmax anyway, and dividing by it would leave the range of float32."""


class Feature(IntFlag):
    """Features of a slot beyond an argmax. A step takes the union over its rows."""

    SAMPLED = 1  # temperature from TEMPERATURE_MIN on
    FILTERED = 2  # top_k or top_p
    MIN_P = 4
    PENALISED = 8
    BIASED = 16
    HELD = 32  # min_new_tokens
    LOGPROBS = 64
    BOUND = 128  # by a grammar
    MASKED = 256  # allowed tokens, and bad words of one token
    WORDED = 512  # bad words of several


def check_sampling(params: SamplingParams, vocab_size: int) -> str | None:
    """Why these parameters can't be drawn with, or None: what comes here may be a peer's."""
    try:
        check_sampling_params("sampling", params)
    except ProtocolError as error:
        return str(error)
    for name, token_ids in (
        ("logit_bias", tuple(params.logit_bias)),
        ("token_ids_logprob", params.token_ids_logprob),
        ("allowed_token_ids", params.allowed_token_ids),
        ("bad_words", tuple(token_id for word in params.bad_words for token_id in word)),
    ):
        if token_ids and max(token_ids) >= vocab_size:
            return f"{name}: token id {max(token_ids)}: must be in 0..{vocab_size - 1}"
    return None


def why_refused(
    token_ids: NDArray[np.int64], prompt_count: int, sampling: SamplingParams, vocab_size: int
) -> str | None:
    """A peer's values reach this far; a bad one must fail its own request, not the batch."""
    if len(token_ids) == 0 or not 1 <= prompt_count <= len(token_ids):
        return f"prompt_count={prompt_count}: must be in 1..{len(token_ids)}, the tokens given"
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        return f"token id {bad}: must be in 0..{vocab_size - 1}"
    return check_sampling(sampling, vocab_size)


class SamplingTable:
    """Sampling state of the running requests. One writer: the thread that runs the model.

    features: uint16[S], a union of `Feature` per slot; the columns hold one number per slot.
    counts: int32[P, vocab] of output tokens; seen: bool[P, vocab] of prompt and output tokens; of
    P penalty rows, given to slots by `penalty_row`.
    """

    def __init__(self, vocab_size: int, eos_token_ids: list[int], device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._eos_token_ids = eos_token_ids
        self.features: NDArray[np.uint16] = np.zeros(0, dtype=np.uint16)
        self.temperature = _Column(np.float32)
        self.top_p = _Column(np.float32)
        self.min_p = _Column(np.float32)
        self.repetition = _Column(np.float32)
        self.presence = _Column(np.float32)
        self.frequency = _Column(np.float32)
        self.top_k = _Column(np.int64)
        self.seed = _Column(np.int64)
        self.held_until = _Column(np.int64)
        self.penalty_row = _Column(np.int64)
        self.top_logprobs = _Column(np.int64)
        self.bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self.stop_ids: dict[int, NDArray[np.int64]] = {}
        self.asked_ids: dict[int, NDArray[np.int64]] = {}
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.seen = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._free_penalty_rows: list[int] = []
        # On the device: a number from the host would be copied there, with a wait.
        self._yes = torch.ones((), dtype=torch.bool, device=device)

    def add(self, slot: int, params: SamplingParams, token_ids: Tensor, prompt_count: int) -> None:
        """Start a request in a slot.

        token_ids: int64[n] on the host: the prompt, then what was generated elsewhere.
        The caller checked `params` with `check_sampling` and the ids against the vocabulary.
        """
        self._grow(slot)
        features = _features_of(params, self.vocab_size)
        self.features[slot] = features
        self.temperature.values[slot] = params.temperature
        # Rounding must not let top_p 1 cut a tail: a sum of probabilities can reach 1 early.
        self.top_p.values[slot] = params.top_p if params.top_p < 1.0 else math.inf
        self.min_p.values[slot] = params.min_p
        self.repetition.values[slot] = params.repetition_penalty
        self.presence.values[slot] = params.presence_penalty
        self.frequency.values[slot] = params.frequency_penalty
        has_top_k = 0 < params.top_k < self.vocab_size
        self.top_k.values[slot] = params.top_k if has_top_k else self.vocab_size
        self.seed.values[slot] = wrap_seed(params.seed)
        self.held_until.values[slot] = prompt_count + params.min_new_tokens
        self.top_logprobs.values[slot] = min(params.top_logprobs_num, self.vocab_size)
        if features & Feature.BIASED:
            ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
            values = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
            self.bias[slot] = (ids, values)
        if features & Feature.HELD:
            stops = sorted({*self._eos_token_ids, *params.stop_token_ids})
            inside = [token_id for token_id in stops if 0 <= token_id < self.vocab_size]
            self.stop_ids[slot] = np.array(inside, dtype=np.int64)
        if params.token_ids_logprob:
            self.asked_ids[slot] = np.array(params.token_ids_logprob, dtype=np.int64)
        if features & Feature.PENALISED:
            self._count_tokens(slot, token_ids, prompt_count)

    def remove(self, slot: int) -> None:
        if self.features[slot] & Feature.PENALISED:
            self._free_penalty_rows.append(int(self.penalty_row.values[slot]))
        self.features[slot] = 0
        self.bias.pop(slot, None)
        self.stop_ids.pop(slot, None)
        self.asked_ids.pop(slot, None)

    def count(self, penalty_rows: Tensor, token_ids: Tensor) -> None:
        """One more token of the output of each of these distinct rows; int64[R] both."""
        self.counts[penalty_rows, token_ids] += 1
        self.seen.index_put_((penalty_rows, token_ids), self._yes)

    def _count_tokens(self, slot: int, token_ids: Tensor, prompt_count: int) -> None:
        if not self._free_penalty_rows:
            self._grow_penalty_rows()
        row = self._free_penalty_rows.pop()
        self.penalty_row.values[slot] = row
        (ids,) = upload(self.device, token_ids.numpy())
        self.seen[row] = False
        self.seen[row].index_fill_(0, ids, True)
        output = ids[prompt_count:]
        self.counts[row] = 0
        self.counts[row].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _grow_penalty_rows(self) -> None:
        old = len(self.counts)
        new = max(2 * old, SLOT_COUNT_START)
        counts = torch.zeros((new, self.vocab_size), dtype=torch.int32, device=self.device)
        seen = torch.zeros((new, self.vocab_size), dtype=torch.bool, device=self.device)
        counts[:old], seen[:old] = self.counts, self.seen
        self.counts, self.seen = counts, seen
        self._free_penalty_rows.extend(range(new - 1, old - 1, -1))

    def _grow(self, slot: int) -> None:
        if slot < len(self.features):
            return
        count = max(slot + 1, 2 * len(self.features), SLOT_COUNT_START)
        self.features = np.pad(self.features, (0, count - len(self.features)))
        reals = (self.temperature, self.top_p, self.min_p)
        penalties = (self.repetition, self.presence, self.frequency)
        for real in (*reals, *penalties):
            real.grow(count)
        integers = (self.top_k, self.seed, self.held_until, self.penalty_row, self.top_logprobs)
        for integer in integers:
            integer.grow(count)


class _Column(Generic[Number]):
    """One number per slot on the host, and its gather for a step on the device."""

    def __init__(self, dtype: type[Number]) -> None:
        self.values: NDArray[Number] = np.zeros(0, dtype=dtype)

    def grow(self, count: int) -> None:
        self.values = np.pad(self.values, (0, count - len(self.values)))

    def rows(self, slots: NDArray[np.int64], device: torch.device) -> Tensor:
        """The column at these slots, as a device tensor [len(slots), 1]."""
        (rows,) = upload(device, self.values[slots])
        return rows.unsqueeze(1)


def _features_of(params: SamplingParams, vocab_size: int) -> Feature:
    features = Feature(0)
    if params.temperature >= TEMPERATURE_MIN:
        features |= Feature.SAMPLED
        if 0 < params.top_k < vocab_size or params.top_p < 1.0:
            features |= Feature.FILTERED
        if params.min_p > 0.0:
            features |= Feature.MIN_P
    if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0):
        features |= Feature.PENALISED
    if params.logit_bias:
        features |= Feature.BIASED
    if params.min_new_tokens > 0:
        features |= Feature.HELD
    if params.return_logprob:
        features |= Feature.LOGPROBS
    if params.grammar is not None:
        features |= Feature.BOUND
    if has_fixed_mask(params):
        features |= Feature.MASKED
    if has_words(params):
        features |= Feature.WORDED
    return features
