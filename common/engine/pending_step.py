"""A launched step, and its answer once the device has computed it.

Knows nothing of the computation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.clock import Clock
from common.engine.host_copy import HostCopy
from common.engine.sampling.draw import Draw
from common.engine.sampling.logprobs import LaunchedLogprobs
from common.protocol.codec import encode_logprobs
from common.protocol.worker import Accepted, StepDone
from common.request import TokenLogprobs

NO_TOKEN = 0
"""Stands in `StepDone.token_ids` for the token of a failed sequence; it is never read."""


class ScoredPrompt:
    """Log-probabilities of some prompt tokens of one request, on their way to the host.

    first: of a token that has none, the first one of the prompt; None if it is not wanted here.
    """

    def __init__(
        self, request_id: int, first: TokenLogprobs | None, rest: LaunchedLogprobs | None
    ) -> None:
        self.request_id = request_id
        self._first = first
        self._rest = rest
        self._copy = HostCopy(rest.tensors if rest is not None else ())

    def encode(self) -> bytes:
        """Waits for them."""
        entries = [] if self._first is None else [self._first]
        if self._rest is not None:
            entries += self._rest.entries(self._copy.wait())
        return encode_logprobs(entries)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """The future answer of a launched step.

    due: requests that were due a token. refused: those of them that can't be run, with the reason.
    ran: the requests of `draw`, row by row. draw: None if nothing was drawn. accepted: what was
    drawn behind that, of proposals. guesses: as `StepDone` has them.
    """

    step_id: int
    clock: Clock
    started_at: float
    due: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    ran: list[int] = field(default_factory=list)
    draw: Draw | None = None
    scored: list[ScoredPrompt] = field(default_factory=list)
    accepted: dict[int, Accepted] = field(default_factory=dict)
    guesses: dict[int, list[int]] = field(default_factory=dict)

    def finish(self) -> StepDone:
        """Waits for what was drawn, not for what was launched after it. Safe on any thread."""
        failed = dict(self.refused)
        unfit = set(self.refused)
        drawn: dict[int, int] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        if self.draw is not None:
            sampled = self.draw.finish()
            drawn = dict(zip(self.ran, sampled.token_ids, strict=True))
            failed |= {self.ran[row]: reason for row, reason in sampled.failed.items()}
            unfit |= {self.ran[row] for row in sampled.unfit}
            logprobs = {self.ran[row]: entry for row, entry in sampled.logprobs.items()}
        return StepDone(
            step_id=self.step_id,
            request_ids=self.due,
            token_ids=[NO_TOKEN if r in failed else drawn[r] for r in self.due],
            logprobs=logprobs,
            prompt_logprobs={scored.request_id: scored.encode() for scored in self.scored},
            failed=failed,
            seconds=self.clock.now() - self.started_at,
            unfit=sorted(unfit),
            accepted=self.accepted,
            guesses=self.guesses,
        )
