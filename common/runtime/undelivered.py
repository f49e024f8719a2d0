"""Messages to the frontend that wait to be sent. Pure: knows no sockets.

Output is joined per request as it comes. So all output of a step leaves in one message, and the
output that waits for a stopped frontend is no larger than the answers themselves.
"""

from __future__ import annotations

from collections import deque

from common.protocol.frontend import (
    Failed,
    Notice,
    Outputs,
    SchedulerToFrontend,
    Tokens,
    ToldFrontend,
    Traced,
)
from common.protocol.joined_tokens import JoinedTokens
from common.request import ENTRY_NBYTES, POSITION_NBYTES

TOKEN_NBYTES = 5
"""Size of a token id in a message, at most."""
TRACE_COUNT_MAX = 4096
"""Transfer traces that may wait. They serve metrics only, and peers cause any number of them, so
the oldest are dropped first."""


class Undelivered:
    """Messages in order, those of one request as one.

    nbytes: size in messages of the waiting tokens and log-probabilities, roughly. Other messages
        are few: one failure for each request, one answer for each question of the frontend.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._dropped_count = 0
        self._tokens: dict[int, JoinedTokens] = {}
        self._failed: dict[int, Failed] = {}
        self._notices: deque[Notice] = deque()
        self._traces: deque[Traced] = deque()

    def add(self, message: ToldFrontend) -> None:
        if isinstance(message, Tokens):
            joined = self._tokens.get(message.request_id)
            if joined is None:
                joined = self._tokens[message.request_id] = JoinedTokens()
            joined.add(message)
            self.nbytes += tokens_nbytes(message)
        elif isinstance(message, Failed):
            self._failed[message.request_id] = message
        elif isinstance(message, Traced):
            self._traces.append(message)
            if len(self._traces) > TRACE_COUNT_MAX:
                self._traces.popleft()
                self._dropped_count += 1
        else:
            self._notices.append(message)

    def take(self) -> SchedulerToFrontend | None:
        """The next message to send; None if no message waits."""
        if self._tokens or self._failed:
            joined = [one.take() for one in self._tokens.values()]
            items: list[Tokens | Failed] = [tokens for tokens in joined if tokens is not None]
            items += self._failed.values()
            self._tokens, self._failed, self.nbytes = {}, {}, 0
            return Outputs(items)
        if self._notices:
            return self._notices.popleft()
        return self._traces.popleft() if self._traces else None

    def take_dropped_count(self) -> int:
        """Traces dropped since the last call."""
        count, self._dropped_count = self._dropped_count, 0
        return count


def tokens_nbytes(message: Tokens) -> int:
    """Size of a message, roughly."""
    nbytes = TOKEN_NBYTES * len(message.token_ids) + sum(map(len, message.prompt_logprobs))
    for entry in message.logprobs:
        nbytes += POSITION_NBYTES + ENTRY_NBYTES * (len(entry.top) + len(entry.asked))
    return nbytes
