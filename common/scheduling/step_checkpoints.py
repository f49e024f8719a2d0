"""Checkpoints of the prefix cache that a step makes: copied before it computes, or kept inside it.

Knows nothing of which sequences a step has, and why.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.protocol.worker import PrefillChunk
from common.scheduling.page_account import PageAccount
from common.scheduling.prefix_tree import Checkpoint
from common.scheduling.sequence import Sequence


class StepCheckpoints:
    """prompts, in each call: those whose chunks the step computes, by request id."""

    def __init__(self, account: PageAccount) -> None:
        self._account = account

    def begin(
        self, chunks: list[PrefillChunk], prompts: Mapping[int, Sequence], decoding: list[Sequence]
    ) -> list[tuple[Sequence, Checkpoint]]:
        """Those that the step of these copies before it computes."""
        at = [(prompts[chunk.request_id], chunk.start) for chunk in chunks]
        at += [(sequence, sequence.token_count - 1) for sequence in decoding if sequence.cuts]
        begun = [(one, self._account.cached.begin_checkpoint(one, start)) for one, start in at]
        return [(one, checkpoint) for one, checkpoint in begun if checkpoint is not None]

    def keep_inside(
        self,
        chunks: list[PrefillChunk],
        prompts: Mapping[int, Sequence],
        checkpoints: list[tuple[Sequence, Checkpoint]],
    ) -> list[PrefillChunk]:
        """Each chunk cut where checkpoints are made inside it; adds these to `checkpoints`."""
        parts: list[PrefillChunk] = []
        for chunk in chunks:
            sequence, start = prompts[chunk.request_id], chunk.start
            for kept in self._account.cached.begin_inside(sequence, start, chunk.stop):
                checkpoints.append((sequence, kept))
                pages = [of_group[0] if of_group else 0 for of_group in kept.pages]
                stop = kept.token_count
                parts.append(PrefillChunk(chunk.request_id, start, stop, False, pages))
                start = stop
            samples = list(sequence.samples) if chunk.is_last else []
            rest = PrefillChunk(chunk.request_id, start, chunk.stop, chunk.is_last, samples=samples)
            parts.append(rest)
        return parts
