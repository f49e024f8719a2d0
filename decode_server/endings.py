"""How a request of the decode server ends: who is told what, and where its pages go.

The client is answered at once. Pages that a remote writer may still reach go into quarantine, pages
that a running step may still write are closed after it.
"""

from __future__ import annotations

from common.protocol.frontend import Failed, Tokens
from common.protocol.peer import Withdraw
from common.request import FinishKind, FinishReason, TokenLogprobs
from common.scheduling.batcher import Batcher
from common.scheduling.deadlines import Deadlines
from common.scheduling.peers import Outbox
from common.scheduling.sequence import PageAccount
from common.scheduling.transitions import DecodeEvent, DecodeState
from decode_server.output_lengths import OutputLengths
from decode_server.prefill_peers import PrefillPeers
from decode_server.receiver import Receiver
from decode_server.request import DecodeRequest
from decode_server.waiting import WaitingQueue

# Other kinds of failure are counted as `failed` alone.
COUNTED = (
    *("finished", "failed", "aborted", "timed_out", "transfer_failed", "bootstrap_failed"),
    *("no_prefill_server", "retracted", "retried", "holds_lost"),
)
# Kinds that say that a request's other half never came.
BOOTSTRAP_FAILURES = ("rendezvous_timeout", "other_half_aborted")
ENDED = (DecodeState.DRAINING, DecodeState.FINISHED, DecodeState.FAILED)


class Endings:
    """Owner of the table of live requests, of their deadlines and of the waiting queue.

    tested: self-tests that ended, link and problem if there is one, until somebody takes that in.
    """

    def __init__(
        self,
        incarnation: str,
        account: PageAccount,
        batcher: Batcher,
        receiver: Receiver,
        peers: PrefillPeers,
        lengths: OutputLengths,
        outbox: Outbox,
    ) -> None:
        self._incarnation = incarnation
        self._peers = peers
        self.lengths = lengths
        self._account = account
        self._batcher = batcher
        self._receiver = receiver
        self._outbox = outbox
        self.requests: dict[int, DecodeRequest] = {}
        self.deadlines = Deadlines()
        self.tested: list[tuple[str, str]] = []
        self.queue = WaitingQueue()
        self.counters = dict.fromkeys(COUNTED, 0.0)

    def tell_token(
        self,
        request: DecodeRequest,
        token_id: int,
        logprobs: TokenLogprobs | None,
        finish: FinishReason | None,
        now: float,
    ) -> None:
        """One new token to the client; the last one ends the request."""
        self._note_length(request, finish.kind if finish is not None else None)
        is_first = request.first_token_at == 0.0
        if is_first:
            request.first_token_at = now
        if finish is not None:
            request.advance(DecodeEvent.LAST_TOKEN)
            self._drop_sequence(request, remember=True)
            self._forget(request)
            if request.tested_link:
                self.tested.append((request.tested_link, ""))
                return
            self.counters["finished"] += 1
        self._outbox.to_frontend(
            Tokens(
                request.request_id,
                [token_id],
                logprobs=[logprobs] if logprobs is not None else [],
                prompt_logprobs=request.prompt_logprobs if is_first else [],
                cached_token_count=request.transfer_trace.cached_token_count,
                finish=finish,
                trace=request.trace(now) if finish is not None else None,
                offset=request.output_count - 1,
            )
        )

    def fail(
        self, request: DecodeRequest, kind: str, message: str, status: int, now: float
    ) -> None:
        """Answer a request with one typed error. An ended request is left alone."""
        if request.state in ENDED:
            return
        if request.tested_link:
            # One that found no room here says nothing of the other side.
            is_tried = request.transfer is not None or request.failure_count
            problem = f"self-test: {message}" if is_tried else ""
            self.tested.append((request.tested_link, problem))
        else:
            if kind == "aborted" and request.output_count:
                # Its client has had enough: it gives its pages back like one that ended.
                self.lengths.note_end(request.output_count)
            self.counters["failed"] += 1
            counted = "bootstrap_failed" if kind in BOOTSTRAP_FAILURES else kind
            if counted in self.counters:
                self.counters[counted] += 1
            trace = request.trace(now, status=kind, message=message)
            self._outbox.to_frontend(Failed(request.request_id, status, kind, message, trace))
        self._tell_other_half(request, message)
        request.advance(DecodeEvent.CANCELLED)
        if request.transfer is not None:
            self._receiver.abandon(request.transfer, message)
            request.transfer = None
        self._drop_sequence(request, remember=False)
        self._forget(request)

    @property
    def client_count(self) -> int:
        """Requests that a client waits for."""
        return sum(not request.tested_link for request in self.requests.values())

    def _tell_other_half(self, request: DecodeRequest, reason: str) -> None:
        """A routed request that has reserved nothing yet ends: its other half waits for that."""
        link, bootstrap = request.bootstrap_link, request.bootstrap
        if request.state is DecodeState.WAITING and link is not None and bootstrap is not None:
            link = self._peers.resolve(link, bootstrap.engine)
            self._outbox.to_peer(link, Withdraw(bootstrap.room, self._incarnation, reason))

    def drop_hold(self, request: DecodeRequest) -> None:
        """The cache that was held for a request is lost to it: any server may compute it."""
        request.bootstrap = None
        self.counters["holds_lost"] += 1

    def wait_again(self, request: DecodeRequest, event: DecodeEvent, now: float) -> None:
        """Back to the queue, ahead of those that have not begun."""
        request.advance(event)
        request.transfer = None
        request.sequence = None
        request.waiting_since = now
        if event is DecodeEvent.RETRACTED:
            request.is_computed_here = False
            request.failure_count = 0
            request.tried_links.clear()
            request.retraction_count += 1
            self.counters["retracted"] += 1
        self.queue.add_again(request)

    def _note_length(self, request: DecodeRequest, finish: FinishKind | None) -> None:
        """What is learned from a token of an output, perhaps its last."""
        if request.tested_link:
            return
        self.lengths.note_token(request.output_count)
        if finish is FinishKind.STOP:
            self.lengths.note_end(request.output_count)
        elif finish is FinishKind.LENGTH:
            self.lengths.note_cut(request.output_count)

    def _drop_sequence(self, request: DecodeRequest, *, remember: bool) -> None:
        if request.sequence is not None:
            if remember:
                self._account.remember(request.sequence)
            self._batcher.remove(request.sequence)
            request.sequence = None

    def _forget(self, request: DecodeRequest) -> None:
        self.requests.pop(request.request_id, None)
        self.deadlines.forget(request.request_id)
        self.queue.discard(request.request_id)
