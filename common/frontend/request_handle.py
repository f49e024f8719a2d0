"""One open request as its route sees it: an asynchronous iterator that is sure to end.

Knows nothing of sockets: the scheduler client delivers into it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from common.frontend.spans import RequestIds
from common.protocol.frontend import Failed, Tokens


class RequestHandle:
    """One submitted request; iterate over it for its `Tokens`, and for a `Failed` if it fails.

    Messages that pile up while the reader is busy are joined into one, so what is held is bounded
    by the request's own output. Leaving the `with` block before the end cancels the request.
    """

    def __init__(
        self,
        cancel: Callable[[int, str], None],
        request_id: int,
        rid: str,
        *,
        is_streaming: bool,
        is_measured: bool,
    ) -> None:
        self.request_id = request_id
        self.rid = rid
        self.is_streaming = is_streaming
        self.is_measured = is_measured
        self.tokens_at: float | None = None
        self.span_ids: RequestIds | None = None
        self.is_ended = False
        self.is_cancelled = False
        self.is_complete = False
        self._cancel = cancel
        self._pending: list[Tokens] = []
        self._failed: Failed | None = None
        self._wake = asyncio.Event()
        self._on_delivery: Callable[[], None] = self._wake.set

    def tell(self, on_delivery: Callable[[], None]) -> None:
        """Call `on_delivery` whenever `take` has something to give: for one who reads many."""
        self._on_delivery = on_delivery
        if self._pending or self._failed is not None:
            on_delivery()

    def cancel(self, reason: str = "aborted by the client") -> None:
        """Ask the scheduler to stop; the end still comes as a message. Harmless after the end."""
        self._cancel(self.request_id, reason)

    def stop(self, reason: str) -> None:
        """As `cancel`, because the answer is complete: the request counts as one that went well."""
        self.is_complete = True
        self.cancel(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel("the client went away")

    def deliver(self, message: Tokens | Failed) -> None:
        """Called by the client, in order; nothing comes after the end."""
        assert not self.is_ended
        if isinstance(message, Failed):
            self._failed = message
            self.is_ended = True
        else:
            self._pending.append(message)
            self.is_ended = message.finish is not None
        self._on_delivery()

    def take(self) -> list[Tokens | Failed]:
        """What has come since the last call: tokens as one message, and the failure after them."""
        taken: list[Tokens | Failed] = []
        if self._pending:
            taken.append(join_tokens(self._pending))
            self._pending = []
        if self._failed is not None:
            taken.append(self._failed)
            self._failed = None
        return taken

    async def __aiter__(self) -> AsyncIterator[Tokens | Failed]:
        while True:
            self._wake.clear()
            is_ended = self.is_ended
            for message in self.take():
                yield message
            if is_ended:
                return
            await self._wake.wait()


def join_tokens(messages: list[Tokens]) -> Tokens:
    """One message that says what `messages`, consecutive ones of one request, say together."""
    if len(messages) == 1:
        return messages[0]
    last = messages[-1]
    return Tokens(
        request_id=last.request_id,
        token_ids=[token for message in messages for token in message.token_ids],
        logprobs=[entry for message in messages for entry in message.logprobs],
        prompt_logprobs=[entry for message in messages for entry in message.prompt_logprobs],
        cached_token_count=max(message.cached_token_count for message in messages),
        finish=last.finish,
        trace=last.trace,
    )
