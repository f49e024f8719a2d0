"""Log-probabilities of prompt tokens: which rows of a chunk predict them, and what they are.

Knows nothing of steps or of how tokens are drawn.
"""

from __future__ import annotations

from torch import Tensor

from common.engine.host_copy import upload
from common.engine.pending_step import ScoredPrompt
from common.engine.sampling.logprobs import LaunchedLogprobs
from common.engine.sampling.sampler import Sampler
from common.engine.sequence_table import SequenceTable
from common.engine.step_work import StepWork
from common.protocol.worker import PrefillChunk
from common.request import SamplingParams, TokenLogprobs


class PromptScores:
    """What running sequences want to know of their prompts, by slot."""

    def __init__(self, sequences: SequenceTable, sampler: Sampler) -> None:
        self._sequences = sequences
        self._sampler = sampler
        self._wants: dict[int, tuple[int, int]] = {}

    def add(self, slot: int, sampling: SamplingParams, prompt_count: int) -> None:
        if sampling.return_logprob and sampling.logprob_start_len >= 0:
            self._wants[slot] = (sampling.logprob_start_len, prompt_count)

    def remove(self, slot: int) -> None:
        self._wants.pop(slot, None)

    def rows(self, chunk: PrefillChunk, slot: int) -> tuple[PrefillChunk, int, int] | None:
        """Rows of a chunk that predict a wanted prompt token, as `StepWork` has them.

        tokens   0  1  2  3  4  5 | 6        prompt_count 6, wanted from 2 on: tokens 2..5
        rows        1  2  3  4               row i predicts token i + 1
        """
        wants = self._wants.get(slot)
        if wants is None:
            return None
        first, prompt_count = wants
        start = max(chunk.start, first - 1)
        stop = min(chunk.stop, prompt_count - 1)
        has_first_token = first == 0 and chunk.start == 0
        return (chunk, start, max(start, stop)) if start < stop or has_first_token else None

    def score(self, work: StepWork, logits: Tensor) -> list[ScoredPrompt]:
        """Log-probabilities of prompt tokens; logits of all prompt rows in order."""
        scored: list[ScoredPrompt] = []
        first_row = 0
        for chunk, start, stop in work.prompt_rows:
            slot = self._sequences.slot(chunk.request_id)
            tokens = self._sequences.tokens(slot)
            rows = logits[first_row : first_row + stop - start]
            first_row += stop - start
            first: TokenLogprobs | None = None
            rest: LaunchedLogprobs | None = None
            if chunk.start == 0 and self._wants[slot][0] == 0:
                first = TokenLogprobs(token_id=int(tokens[0]), logprob=None)
            if start < stop:
                (targets,) = upload(self._sequences.device, tokens[start + 1 : stop + 1].numpy())
                rest = self._sampler.prompt_logprobs(rows, slot, targets)
            scored.append(ScoredPrompt(chunk.request_id, first, rest))
        return scored
