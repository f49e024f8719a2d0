"""Draws one token per row of logits, for all requests of a step at once.

Order: repetition, frequency and presence penalties, logit bias, stop tokens held back by
min_new_tokens, tokens that are not allowed, ends of bad words, tokens that a grammar forbids; then
either the largest logit (temperature 0) or temperature, top_k, top_p among the kept, min_p, and a
Gumbel draw. Filters run one after the other, each on the tokens that the one before kept.
Log-probabilities are those of the raw logits. Rows without any of these cost one argmax.

On a GPU one kernel takes the largest of some rows and draws the others (`triton_draw.py`), where it
is there and was found to draw what torch draws; rows with top_k, top_p or min_p are torch's.

A draw is launched and not waited for, with one exception: a grammar needs the last token before it
can name the next ones, so a draw with grammars waits for the draw before it.

Knows nothing of pages, models or messages. The noise of a row depends on its request's seed and
its position alone (`noise.py`), and no row's result depends on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.host_copy import upload
from common.engine.logits import is_finite, largest
from common.engine.sampling.choose_draw import Steering, choose_draw
from common.engine.sampling.draw import Draw, Sampled
from common.engine.sampling.grammar_table import GrammarTable
from common.engine.sampling.logprobs import LaunchedLogprobs, launch_logprobs
from common.engine.sampling.noise import gumbel, row_keys
from common.engine.sampling.nucleus import drop_tails
from common.engine.sampling.sampling_table import Feature, SamplingTable
from common.engine.sampling.token_masks import TokenMasks
from common.grammar import GrammarCompiler
from common.request import SamplingParams

CANDIDATE_COUNTS = (64, 1024)
"""Tokens sorted for top_k and top_p, in attempts. Most nuclei end within the first; sorting a large
vocabulary in full, the last resort, costs a hundred times as much."""

NOISE_BLOCK_ELEMENTS = 1 << 22
"""Noise made at a time; bounds the extra memory to 64 MiB at any batch and vocabulary."""

CLOSING = Feature.BIASED | Feature.HELD | Feature.BOUND | Feature.MASKED | Feature.WORDED
"""After which no token may be left to draw."""

SHAPING = CLOSING | Feature.PENALISED
"""After which logits are no more what the model gave."""

FOLLOWING = Feature.PENALISED | Feature.BOUND | Feature.WORDED
"""Which see the token before the one that is drawn."""

Slots = NDArray[np.int64]
NO_ROWS: Slots = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Unfollowed:
    """A draw whose tokens some rows' grammars have not consumed yet: int64[n] rows and slots."""

    draw: Draw
    rows: Slots
    slots: Slots


class Sampler:
    """Sampling parameters and penalty counts of the running requests, by slot, and the draw.

    One writer: the thread that runs the model. Slots are small integers chosen by the caller.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: list[int],
        device: torch.device,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._table = SamplingTable(vocab_size, eos_token_ids, device)
        self._grammars = GrammarTable(grammars, vocab_size, device)
        self._masks = TokenMasks(vocab_size, device)
        self.vocab_size = vocab_size
        self._device = device
        self._kernel = choose_draw(vocab_size, device).kernel
        self._vocab_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
        # On the device: a number from the host would be copied there, with a wait.
        self._impossible = torch.full((), -torch.inf, device=device)
        self._unfollowed: _Unfollowed | None = None

    def add(self, slot: int, params: SamplingParams, token_ids: Tensor, prompt_count: int) -> None:
        """Start a request: int64[n] token ids so far on the host, `prompt_count` of them prompt."""
        self._table.add(slot, params, token_ids, prompt_count)
        self._masks.add(slot, params, token_ids[prompt_count:])
        if params.grammar is not None:
            self._grammars.add(slot, params.grammar, token_ids[prompt_count:].tolist())

    def remove(self, slot: int) -> None:
        if self._unfollowed is not None and slot in self._unfollowed.slots:
            self._follow()  # the slot's next owner must not take its token
        self._table.remove(slot)
        self._grammars.remove(slot)
        self._masks.remove(slot)

    def draws_ahead(self, slots: Slots) -> NDArray[np.bool_]:
        """bool[S]: whether a draw depends on nothing but logits and position, so that one call may
        draw several tokens of a slot."""
        sees_none: NDArray[np.bool_] = self._table.features[slots] & FOLLOWING == 0
        return sees_none

    def sample(self, logits: Tensor, slots: Slots, positions: NDArray[np.int64]) -> Sampled:
        """`draw`, and wait for it."""
        return self.draw(logits, slots, positions).finish()

    @torch.inference_mode()
    def draw(self, logits: Tensor, slots: Slots, positions: NDArray[np.int64]) -> Draw:
        """Draw the token at `positions[r]` of the request in `slots[r]` from `logits[r]`.

        Args:
            logits: float32[R, vocab]; overwritten.
            slots: int64[R], distinct but for those of `draws_ahead`.
            positions: int64[R], absolute: how many tokens precede the drawn one.
        """
        assert logits.shape == (len(slots), self.vocab_size), (logits.shape, len(slots))
        features = self._table.features[slots]
        union = Feature(int(np.bitwise_or.reduce(features, initial=0)))
        # The kernel looks at what it draws from, which is what the model gave if nothing shapes it.
        is_usable: Tensor | None = None
        if self._kernel is None or union & SHAPING:
            is_usable = is_finite(logits)
        raw = self._raw_copy(logits, features, union)
        bound = _rows_with(features, Feature.BOUND) if union & Feature.BOUND else NO_ROWS
        if len(bound):
            self._follow()
        self._shape(logits, slots, positions, features, union)
        unbound = self._grammars.forbid(logits, bound, slots[bound]) if len(bound) else {}
        checked = self._choose(logits, slots, positions, features, is_usable)
        tokens = checked[0]
        if union & Feature.PENALISED:
            self._count(tokens, slots, features)
        if union & Feature.WORDED:
            rows = _rows_with(features, Feature.WORDED)
            (index,) = upload(self._device, rows)
            self._masks.append(tokens[index], slots[rows])
        draw = Draw(
            tokens,
            checked,
            unbound,
            _rows_with(features, Feature.LOGPROBS),
            None if raw is None else self._logprobs(raw, tokens, slots, features),
        )
        if len(bound):
            self._unfollowed = _Unfollowed(draw, bound, slots[bound])
        return draw

    def _choose(
        self,
        logits: Tensor,
        slots: Slots,
        positions: NDArray[np.int64],
        features: NDArray[np.uint16],
        is_usable: Tensor | None,
    ) -> Tensor:
        """See `Draw`: tokens, whether the logits were finite, whether any was allowed.

        is_usable: of the logits as the model gave them; None if these are they.
        """
        is_drawn = features & Feature.SAMPLED != 0
        if self._kernel is None:
            assert is_usable is not None
            tokens = largest(logits)
            is_open = torch.ones_like(is_usable)
            if (features & CLOSING).any():
                is_open = logits.gather(1, tokens.unsqueeze(1)).squeeze(1) > -torch.inf
            if is_drawn.any():
                self._draw(logits, slots, positions, features, is_drawn, tokens)
            return torch.stack((tokens, is_usable.long(), is_open.long()))
        is_cut = features & (Feature.FILTERED | Feature.MIN_P) != 0
        in_kernel = is_drawn & ~is_cut
        steering: Steering | None = None
        if in_kernel.any():
            own = self._table.temperature.values[slots]
            temperatures = np.where(in_kernel, own, np.float32(0.0))
            seeds, places, temperature = upload(
                self._device, self._table.seed.values[slots], positions, temperatures
            )
            steering = (seeds, places, temperature)
        checked = self._kernel(logits, steering)
        if is_usable is not None:
            checked[1] = is_usable
        if (is_drawn & is_cut).any():
            self._draw(logits, slots, positions, features, is_drawn & is_cut, checked[0])
        return checked

    def prompt_logprobs(self, logits: Tensor, slot: int, token_ids: Tensor) -> LaunchedLogprobs:
        """Of prompt tokens int64[R] on the device; raw `logits[r]` predicts `token_ids[r]`."""
        top_count = self._table.top_logprobs.values[slot]
        asked = self._table.asked_ids.get(slot)
        row_count = len(token_ids)
        return launch_logprobs(
            logits,
            token_ids,
            np.full(row_count, top_count),
            {} if asked is None else dict.fromkeys(range(row_count), asked),
            has_ranks=True,
        )

    def _follow(self) -> None:
        """Let grammars take what was drawn for them last; waits for that draw."""
        if self._unfollowed is None:
            return
        last, self._unfollowed = self._unfollowed, None
        sampled = last.draw.finish()
        drawn = [i for i, row in enumerate(last.rows.tolist()) if row not in sampled.failed]
        token_ids = [sampled.token_ids[row] for row in last.rows[drawn]]
        self._grammars.advance(last.slots[drawn], token_ids)

    def _shape(
        self,
        logits: Tensor,
        slots: Slots,
        positions: NDArray[np.int64],
        features: NDArray[np.uint16],
        union: Feature,
    ) -> None:
        """Penalties, bias, held-back stop tokens and forbidden ones, in place."""
        if union & Feature.PENALISED:
            self._penalise(logits, slots, _rows_with(features, Feature.PENALISED))
        if union & Feature.BIASED:
            biased = _rows_with(features, Feature.BIASED)
            entries = [(int(row), *self._table.bias[int(slots[row])]) for row in biased]
            rows = np.concatenate([np.full(len(ids), row) for row, ids, _ in entries])
            ids = np.concatenate([ids for _, ids, _ in entries])
            values = np.concatenate([values for _, _, values in entries])
            row_index, id_index, bias = upload(self._device, rows, ids, values)
            logits.index_put_((row_index, id_index), bias, accumulate=True)
        if union & Feature.HELD:
            until = self._table.held_until.values[slots]
            held = np.flatnonzero((features & Feature.HELD != 0) & (positions < until))
            # A grammar that is at its end leaves nothing else to draw.
            is_open = [not self._grammars.is_complete(int(slots[row])) for row in held]
            held = held[np.array(is_open, dtype=np.bool_)]
            if len(held):
                stops = [self._table.stop_ids[slot] for slot in slots[held].tolist()]
                rows = np.repeat(held, [len(ids) for ids in stops])
                row_index, id_index = upload(self._device, rows, np.concatenate(stops))
                logits.index_put_((row_index, id_index), self._impossible)
        if union & Feature.MASKED:
            rows = _rows_with(features, Feature.MASKED)
            self._masks.forbid_fixed(logits, rows, slots[rows])
        if union & Feature.WORDED:
            rows = _rows_with(features, Feature.WORDED)
            self._masks.forbid_words(logits, rows, slots[rows])

    def _penalise(self, logits: Tensor, slots: Slots, rows: NDArray[np.int64]) -> None:
        table, own = self._table, slots[rows]
        index, penalty_rows = upload(self._device, rows, table.penalty_row.values[own])
        x = logits[index]
        repetition = table.repetition.rows(own, self._device)
        punished = torch.where(x < 0, x * repetition, x / repetition)
        x = torch.where(table.seen[penalty_rows], punished, x)
        counts = table.counts[penalty_rows]
        x -= counts * table.frequency.rows(own, self._device)
        x -= (counts > 0) * table.presence.rows(own, self._device)
        logits[index] = x

    def _count(self, tokens: Tensor, slots: Slots, features: NDArray[np.uint16]) -> None:
        rows = _rows_with(features, Feature.PENALISED)
        own = self._table.penalty_row.values[slots[rows]]
        index, penalty_rows = upload(self._device, rows, own)
        self._table.count(penalty_rows, tokens[index])

    def _draw(
        self,
        logits: Tensor,
        slots: Slots,
        positions: NDArray[np.int64],
        features: NDArray[np.uint16],
        is_drawn: NDArray[np.bool_],
        tokens: Tensor,
    ) -> None:
        """Replace the argmax in `tokens` where `is_drawn`, of rows with a temperature above 0."""
        is_filtered = features & Feature.FILTERED != 0
        # Whether enough candidates were sorted only the device knows, and only a CPU may be asked.
        is_nucleus = is_filtered & (self._table.top_k.values[slots] == self.vocab_size)
        is_nucleus &= self._device.type != "cpu"
        for rows, draw in (
            (np.flatnonzero(is_drawn & ~is_filtered), self._draw_from_all),
            (np.flatnonzero(is_filtered & ~is_nucleus), self._draw_from_candidates),
            (np.flatnonzero(is_nucleus), self._draw_from_nucleus),
        ):
            if len(rows) == 0:
                continue
            own = slots[rows]
            index, seeds, places = upload(
                self._device, rows, self._table.seed.values[own], positions[rows]
            )
            x = logits[index] / self._table.temperature.rows(own, self._device)
            keys = row_keys(seeds, places)
            tokens[index] = draw(x, own, keys)

    def _draw_from_all(self, x: Tensor, slots: Slots, keys: Tensor) -> Tensor:
        """Rows without top_k and top_p. x: float32[r, vocab], overwritten; returns int64[r]."""
        min_p = self._table.min_p.values[slots]
        if min_p.any():
            floor = x.amax(dim=-1, keepdim=True) + self._table.min_p.rows(slots, self._device).log()
            x.masked_fill_(x < floor, -torch.inf)
        block = max(1, NOISE_BLOCK_ELEMENTS // self.vocab_size)
        for first in range(0, len(slots), block):
            rows = slice(first, first + block)
            x[rows] += gumbel(keys[rows], self._vocab_ids)
        return x.argmax(dim=-1)

    def _draw_from_nucleus(self, x: Tensor, slots: Slots, keys: Tensor) -> Tensor:
        """Rows with top_p alone. x: float32[r, vocab], overwritten; returns int64[r]."""
        drop_tails(x, self._table.top_p.rows(slots, self._device))
        return self._draw_from_all(x, slots, keys)

    def _draw_from_candidates(self, x: Tensor, slots: Slots, keys: Tensor) -> Tensor:
        """Rows with top_k or top_p. x: float32[r, vocab]; returns int64[r].

        How many candidates a row sorts is its own affair, not the largest need in the batch:
        rounding at the border of a nucleus may depend on it.
        """
        top_k = self._table.top_k.values[slots]
        is_open = top_k == self.vocab_size
        is_drawn = np.zeros(len(slots), dtype=np.bool_)
        tokens = torch.zeros(len(slots), dtype=torch.int64, device=self._device)
        for count in (*CANDIDATE_COUNTS, self.vocab_size):
            count = min(count, self.vocab_size)
            rows = np.flatnonzero(~is_drawn & (is_open | (top_k <= count)))
            if len(rows) == 0:
                continue
            (index,) = upload(self._device, rows)
            drawn, is_contained = self._draw_from_top(x[index], slots[rows], keys[index], count)
            tokens[index] = drawn
            is_drawn[rows] = True
            if count < self.vocab_size and is_open[rows].any():
                is_drawn[rows] = is_contained.cpu().numpy() | ~is_open[rows]
        return tokens

    def _draw_from_top(
        self, x: Tensor, slots: Slots, keys: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """Draw among the `count` largest of each row.

        Returns: int64[r] tokens, and bool[r]: whether the nucleus of a row ends among them.
        """
        table = self._table
        top = x.topk(count, dim=-1, sorted=True)
        values = top.values
        top_k = table.top_k.rows(slots, self._device)
        rank = torch.arange(count, device=self._device)
        is_open = top_k == self.vocab_size
        values.masked_fill_(rank >= top_k, -torch.inf)
        # Over all tokens if the row has no top_k, else over those that top_k left.
        total = torch.where(
            is_open,
            x.logsumexp(dim=-1, keepdim=True),
            values.logsumexp(dim=-1, keepdim=True),
        )
        probs = (values - total).exp()
        cumulative = probs.cumsum(dim=-1)
        top_p = table.top_p.rows(slots, self._device)
        is_cut = (cumulative - probs >= top_p) & (rank > 0)
        floor = values[:, :1] + table.min_p.rows(slots, self._device).log()
        values.masked_fill_(is_cut | (values < floor), -torch.inf)
        noise = gumbel(keys, top.indices.to(torch.int32))
        picked = (values + noise).argmax(dim=-1, keepdim=True)
        tokens = top.indices.gather(1, picked).squeeze(1)
        return tokens, (cumulative[:, -1:] >= top_p).squeeze(1)

    def _logprobs(
        self, raw: Tensor, tokens: Tensor, slots: Slots, features: NDArray[np.uint16]
    ) -> LaunchedLogprobs:
        rows = _rows_with(features, Feature.LOGPROBS)
        asked = self._table.asked_ids
        (index,) = upload(self._device, rows)
        return launch_logprobs(
            raw,
            tokens[index],
            self._table.top_logprobs.values[slots[rows]],
            {i: asked[int(s)] for i, s in enumerate(slots[rows]) if int(s) in asked},
        )

    def _raw_copy(
        self, logits: Tensor, features: NDArray[np.uint16], union: Feature
    ) -> Tensor | None:
        """The rows whose log-probabilities are wanted, before anything changes them."""
        if not union & Feature.LOGPROBS:
            return None
        (index,) = upload(self._device, _rows_with(features, Feature.LOGPROBS))
        return logits[index]


def _rows_with(features: NDArray[np.uint16], feature: Feature) -> NDArray[np.int64]:
    return np.flatnonzero(features & feature != 0)
