"""What a session has said so far, and the next request that goes on with it. Knows nothing of time.

Tokens are kept as tokens: prompts and the server's own answers, id for id. A chat is text, so its
answers are kept as text, and the server's own count of tokens says how long it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from bench.serve.outcome import Outcome
from bench.serve.sessions import PromptSource, Session
from bench.serve.workload import Ask

Decode = Callable[[tuple[int, ...]], str]


class Conversation(Protocol):
    """One session that goes on. `ask` and `hear` are called in turns."""

    def ask(self, number: int, due_s: float) -> Ask:
        """The request of turn `number`."""

    def hear(self, outcome: Outcome) -> str:
        """Keep an answer that went well; why it can't be continued, or nothing."""


class TokenConversation:
    """Of token ids, for the APIs that take and give them."""

    def __init__(self, session: Session, source: PromptSource, first_index: int) -> None:
        self._session = session
        self._source = source
        self._first_index = first_index
        self._said: list[int] = []

    def ask(self, number: int, due_s: float) -> Ask:
        turn = self._session.turns[number]
        said = self._said[: turn.kept_max]
        said += self._source.tokens(self._session, number, len(said), turn.input_length)
        self._said = said
        return Ask(self._first_index + number, due_s, tuple(said), turn.output_count, number)

    def hear(self, outcome: Outcome) -> str:
        if len(outcome.output_ids) != outcome.output_count:
            return (
                f"{len(outcome.output_ids)} token ids for {outcome.output_count} tokens: a session "
                "goes on with the server's own tokens, so the server must give their ids"
            )
        self._said += outcome.output_ids
        return ""


class ChatConversation:
    """Of messages. A turn that keeps only a part of what was said begins anew."""

    def __init__(
        self, session: Session, source: PromptSource, first_index: int, decode: Decode
    ) -> None:
        self._session = session
        self._source = source
        self._first_index = first_index
        self._decode = decode
        self._messages: tuple[tuple[str, str], ...] = ()
        self._said_count = 0
        self._asked = ""

    def ask(self, number: int, due_s: float) -> Ask:
        turn = self._session.turns[number]
        if not turn.is_append_only:
            self._messages, self._said_count = (), 0
        # Only a message without a token can't be sent.
        start = min(self._said_count, turn.input_length - 1)
        new = tuple(self._source.tokens(self._session, number, start, turn.input_length))
        self._asked = self._decode(new)
        index = self._first_index + number
        return Ask(index, due_s, new, turn.output_count, number, self._messages)

    def hear(self, outcome: Outcome) -> str:
        self._messages += (("user", self._asked), ("assistant", outcome.text))
        self._said_count = outcome.prompt_count + outcome.output_count
        return ""
