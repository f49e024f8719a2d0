"""Consecutive `Tokens` of one request as one message: for output that waits for its reader.

Used by the scheduler for a frontend that lags, and by the frontend for clients that lag.
"""

from __future__ import annotations

from common.protocol.frontend import Tokens


class JoinedTokens:
    """Messages added since the last `take`. The cost of joining is linear in their size."""

    def __init__(self) -> None:
        self._tokens: Tokens | None = None
        self._is_own = False  # whether the lists of `_tokens` were made here

    @property
    def is_empty(self) -> bool:
        return self._tokens is None

    def add(self, message: Tokens) -> None:
        if self._tokens is None:
            self._tokens = message
            return
        known = self._tokens
        if not self._is_own:
            self._is_own = True
            token_ids, logprobs = list(known.token_ids), list(known.logprobs)
            prompt_logprobs = list(known.prompt_logprobs)
        else:
            token_ids, logprobs = known.token_ids, known.logprobs
            prompt_logprobs = known.prompt_logprobs
        token_ids += message.token_ids
        logprobs += message.logprobs
        prompt_logprobs += message.prompt_logprobs
        self._tokens = Tokens(
            known.request_id,
            token_ids,
            logprobs,
            prompt_logprobs,
            max(known.cached, message.cached, key=lambda cached: cached.count),
            message.finish,
            message.trace,
            known.offset,
        )

    def take(self) -> Tokens | None:
        """One message for all that were added; None if there were none."""
        taken, self._tokens, self._is_own = self._tokens, None, False
        return taken
