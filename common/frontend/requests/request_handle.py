"""One open request as its route sees it: an asynchronous iterator that is sure to end.

Knows nothing of sockets: the scheduler client delivers into it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from common.frontend.requests.spans import RequestIds
from common.frontend.requests.weight_spans import WeightSpans
from common.protocol.frontend import Failed, Tokens
from common.protocol.joined_tokens import JoinedTokens
from common.request import NO_CLAIM, Bootstrap, Claim, Origin, SamplingParams


@dataclass(frozen=True, slots=True)
class SampleId:
    """What one sample of a prompt has for itself."""

    rid: str
    seed: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for the samples of one prompt, which differ by their seeds.

    budget_s: seconds they may take. bootstrap: where its halves meet, None for a plain one.
    prefix_digests: of the prompt's beginnings; none if nothing of it is to be kept. trace_parent:
    the client's span, "" for none. claim: what decides whose turn it is.
    """

    token_ids: list[int]
    sampling: SamplingParams
    budget_s: float
    bootstrap: Bootstrap | None = None
    prefix_digests: bytes = b""
    trace_parent: str = ""
    claim: Claim = NO_CLAIM


class RequestHandle:
    """One submitted request; iterate over it for its `Tokens`, and for a `Failed` if it fails.

    Messages that pile up while the reader is busy are joined into one, so what is held is bounded
    by the request's own output. Leaving the `with` block before the end cancels the request.
    output_ids: what was delivered of the output; weight_spans: what made it. is_relayed: not this
    server's scheduler answers it, but another server; then `on_cancel` ends that.
    """

    def __init__(
        self,
        cancel: Callable[[int, str], None],
        request_id: int,
        asked: Asked,
        seed: int,
        origin: Origin,
        *,
        started_at: float,
        output_ids: Sequence[int] = (),
        is_streaming: bool,
        is_measured: bool,
    ) -> None:
        self.request_id = request_id
        self.asked = asked
        self.seed = seed
        self.origin = origin
        self.started_at = started_at
        self.is_streaming = is_streaming
        self.is_measured = is_measured
        self.tokens_at: float | None = None
        self.span_ids: RequestIds | None = None
        self.is_ended = False
        self.is_complete = False
        self.is_relayed = False
        self.on_cancel: Callable[[], object] = lambda: None
        self.cancel_reason = ""
        self.output_ids = array("i", output_ids)
        self.weight_spans = WeightSpans()
        self._cancel = cancel
        self._pending = JoinedTokens()
        self._failed: Failed | None = None
        self._wake = asyncio.Event()
        self._on_delivery: Callable[[], None] = self._wake.set

    @property
    def rid(self) -> str:
        return self.origin.rid

    @property
    def is_cancelled(self) -> bool:
        return self.cancel_reason != ""

    def left_s(self, now: float) -> float:
        """What is left of its time, in seconds; 0.0 if it is over."""
        return max(0.0, self.asked.budget_s - (now - self.started_at))

    def tell(self, on_delivery: Callable[[], None]) -> None:
        """Call `on_delivery` whenever `take` has something to give: for one who reads many."""
        self._on_delivery = on_delivery
        if not self._pending.is_empty or self._failed is not None:
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
        # Who was told keeps this handle: neither would be freed without the collector.
        self._on_delivery = self._wake.set

    def deliver(self, message: Tokens | Failed) -> None:
        """Called by the client, in order; nothing comes after the end."""
        assert not self.is_ended
        if isinstance(message, Failed):
            self._failed = message
            self.is_ended = True
        else:
            self._pending.add(message)
            self.output_ids.extend(message.token_ids)
            self.is_ended = message.finish is not None
        self._on_delivery()

    def take(self) -> list[Tokens | Failed]:
        """What has come since the last call: tokens as one message, and the failure after them."""
        taken: list[Tokens | Failed] = []
        tokens = self._pending.take()
        if tokens is not None:
            taken.append(tokens)
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
