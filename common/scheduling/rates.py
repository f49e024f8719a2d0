"""How long steps take on this server, learned from those that have returned.

A step takes about so long for what it decodes, and so much longer for every token of a prompt.
Both are averages that forget: the load changes, and so do contexts.
"""

from __future__ import annotations

from common.protocol.worker_values import PassTimes

# Of an average, what one more step replaces.
FORGOTTEN_SHARE = 0.1


class StepRates:
    """decode_s: of a step without prompts; token_s: per prompt token; None before one has run."""

    def __init__(self, times: PassTimes | None = None) -> None:
        """times: what was measured at the start. It counts like one token."""
        times = times or PassTimes()
        self.decode_s = times.decode_s or None
        self._weight = 1.0 if times.prompt_token_s else 0.0
        self._sum = times.prompt_token_s

    @property
    def token_s(self) -> float | None:
        return self._sum / self._weight if self._weight else None

    def note(self, prompt_token_count: int, decode_count: int, seconds: float) -> None:
        """A step has returned."""
        if not prompt_token_count:
            before = seconds if self.decode_s is None else self.decode_s
            self.decode_s = before + FORGOTTEN_SHARE * (seconds - before)
            return
        # Least squares through the time of a step without prompts: large chunks tell most.
        base = (self.decode_s or 0.0) if decode_count else 0.0
        kept = 1 - FORGOTTEN_SHARE
        weight = float(prompt_token_count**2)
        self._weight = kept * self._weight + weight
        self._sum = kept * self._sum + prompt_token_count * max(0.0, seconds - base)

    def prompt_s(self, token_count: int) -> float | None:
        """Seconds to compute so many tokens of a prompt with nothing beside, no less than a step
        takes; None if not known."""
        token_s = self.token_s
        return None if token_s is None else max(token_count * token_s, self.decode_s or 0.0)

    def tokens_within(self, share: float) -> int | None:
        """Prompt tokens that make a step that decodes longer by this share; None if not known."""
        token_s = self.token_s
        if self.decode_s is None or token_s is None:
            return None
        return int(share * self.decode_s / token_s) if token_s > 0 else None
