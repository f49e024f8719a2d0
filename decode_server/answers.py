"""What the clients of a decode server are told, and what is learned and counted from that.

Knows nothing of pages, transfers or the queue.
"""

from __future__ import annotations

from common.failures import Failure, FailureKind
from common.protocol.frontend import Failed, Tokens
from common.request import FinishKind, FinishReason, TokenLogprobs
from common.scheduling.peers import Outbox
from decode_server.output_lengths import OutputLengths
from decode_server.request import DecodeRequest

# Other kinds of failure are counted as `failed` alone.
COUNTED = (
    *("finished", "failed", "aborted", "moved", "timed_out", "transfer_failed"),
    *("bootstrap_failed", "no_prefill_server"),
)


class Answers:
    """lengths: of the outputs that have ended. counters: of how requests of clients ended."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.lengths = OutputLengths()
        self.counters = dict.fromkeys(COUNTED, 0.0)

    def send_tokens(
        self,
        request: DecodeRequest,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        finish: FinishReason | None,
        now: float,
        *,
        is_first: bool,
    ) -> None:
        """New tokens, the last one of an output with why it is that."""
        if not request.has_client:
            return
        first = request.output_count - len(token_ids)
        for count in range(first + 1, request.output_count + 1):
            self.lengths.note_token(count)
        self._note_end(request, finish.kind if finish is not None else None)
        self.counters["finished"] += finish is not None
        self._outbox.to_frontend(
            Tokens(
                request.request_id,
                token_ids,
                logprobs=logprobs,
                prompt_logprobs=request.prompt_logprobs if is_first else [],
                cached=request.cached,
                finish=finish,
                trace=request.trace(now) if finish is not None else None,
                offset=first,
            )
        )

    def _note_end(self, request: DecodeRequest, finish: FinishKind | None) -> None:
        """What is learned from the end of an output, if it has ended."""
        if finish is FinishKind.STOP:
            self.lengths.note_end(request.output_count)
        elif finish is FinishKind.LENGTH:
            self.lengths.note_cut(request.output_count)

    def send_failure(self, request: DecodeRequest, failure: Failure, now: float) -> None:
        """One error is the answer, or the end of it."""
        if not request.has_client:
            return
        kind = failure.kind
        if kind is FailureKind.ABORTED and request.output_count:
            # Its client has had enough: it gives its pages back like one that ended.
            self.lengths.note_end(request.output_count)
        elif kind is FailureKind.MOVED and request.output_count:
            self.lengths.note_cut(request.output_count)
        self.counters["failed"] += kind is not FailureKind.MOVED
        counted = "bootstrap_failed" if kind.is_bootstrap else kind
        if counted in self.counters:
            self.counters[counted] += 1
        trace = request.trace(now, status=kind, message=failure.message)
        self._outbox.to_frontend(Failed.of(request.request_id, failure, trace))
