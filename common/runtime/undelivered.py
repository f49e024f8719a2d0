"""What a scheduler has said to its frontend and has not been sent yet. Pure: knows no sockets.

Output is joined per request as it comes. So all of a step leaves in one message, and what waits for
a frontend that reads nothing is no more than the answers themselves.
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
"""What a token id takes in a message at most."""
TRACE_COUNT_MAX = 4096
"""Accounts of transfers that may wait. They are for metrics alone and come as often as peers ask,
so those that are too many are dropped, the oldest first."""


class Undelivered:
    """Messages in order, those of one request as one.

    nbytes: about what the tokens and log-probabilities that wait take in messages. All else is one
    failure for each request and one answer for each question of the frontend.
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
        """The next message to send, None if there is nothing left to say."""
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
        """Accounts that were too many since the last call."""
        count, self._dropped_count = self._dropped_count, 0
        return count


def tokens_nbytes(message: Tokens) -> int:
    """About what a message takes."""
    nbytes = TOKEN_NBYTES * len(message.token_ids) + sum(map(len, message.prompt_logprobs))
    for entry in message.logprobs:
        nbytes += POSITION_NBYTES + ENTRY_NBYTES * (len(entry.top) + len(entry.asked))
    return nbytes
