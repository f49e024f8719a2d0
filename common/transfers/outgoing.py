"""Caches that this server's ranks write into other servers, from the request to the last message.

    asked -> sending, chunk by chunk -> settled and digested -> TransferDone
          -> cancelled: what is out still settles          -> TransferFailed | Quiesced

The last message of a transfer goes out when no put of it is outstanding, because the other server
takes it as proof. A transfer is begun once: what comes again under its id is another's by then.

A transfer belongs to an owner, a number that means nothing here. Knows nothing of requests; which
bytes a Send means is the worker's to plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from common.config import Verify
from common.failures import Failure, FailureKind
from common.layout.component import LiveKind
from common.planner.digests import add_digests
from common.protocol.digests import Digest, Digested
from common.protocol.handshake import check_transfer_request
from common.protocol.peer import Abort, Quiesced, TransferDone, TransferFailed, TransferRequest
from common.protocol.worker import CancelSends, CloseTransfer, OpenTransfer, Send, SendSettled
from common.request import TokenLogprobs, TransferTrace
from common.scheduling.events import UnreadableRequest
from common.scheduling.facts import ServerFacts
from common.scheduling.peers import Outbox
from common.transfers.links import Links
from common.transfers.transfer_health import TransferHealth

PageLists = list[tuple[int, list[int]]]

# Transfers that are not begun again, the last so many: what comes late was sent within seconds.
KNOWN_COUNT_MAX = 1 << 14
# The step of a Send that waits for none.
ALL_COMPUTED = 0


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """One cache that a peer waits for. owner: the request that computes it, if there is one.

    link, peer: where it was asked for, and the incarnation that asked. request: its pages.
    verify: how much of it that server compares; target_layout: its own, msgpack. version: of the
        protocol, as both speak it.
    is_opened: our workers know its pages. sent_token_count: tokens that the target has or that a
        Send is of.
    sends_open: send id -> ranks of ours that have not settled it yet.
    digests_open: ranks of ours that have not digested the cache yet; digests: sums of those that
        have, per rank of the peer.
    failure: the first put that failed.
    is_quiet: what has settled changes nothing at the target any more. False for good once the
        connection broke with bytes under way: then only the target's own fence proves it, and any
        message of ours would be taken for proof.
    """

    request: TransferRequest
    link: str
    peer: str
    peer_name: str
    verify: Verify
    target_layout: bytes
    version: int
    owner: int | None = None
    sends_open: dict[int, set[int]] = field(default_factory=dict)
    digests_open: set[int] = field(default_factory=set)
    digests: list[bytes] = field(default_factory=list)
    settled_ranks: set[int] = field(default_factory=set)
    is_opened: bool = False
    sent_token_count: int = field(init=False)
    failure: Failure | None = None
    is_quiet: bool = True
    is_abort_asked: bool = False
    wire_s: float = 0.0
    nbytes: int = 0
    exposed_nbytes: int = 0
    run_count: int = 0

    def __post_init__(self) -> None:
        self.sent_token_count = self.request.token_start

    @property
    def transfer_id(self) -> int:
        return self.request.transfer_id

    @property
    def token_count(self) -> int:
        return self.request.token_count

    @property
    def room(self) -> int | None:
        return self.request.room

    @property
    def is_on_its_way(self) -> bool:
        """Whether puts or digests of it are outstanding."""
        return bool(self.sends_open or self.digests_open)


@dataclass(frozen=True, slots=True)
class CacheAsked:
    """A peer asks for a cache, and its pages fit."""

    transfer: OutgoingTransfer


@dataclass(frozen=True, slots=True)
class AskRefused:
    """A peer asked for a cache with pages or tokens that don't fit. It has been answered."""

    room: int | None
    failure: Failure


class Outgoing:
    """Owner of every `OutgoingTransfer`. health: how the last ones to each peer went.

    stale_count: messages for another process, or from one that has no say here.
    """

    def __init__(self, facts: ServerFacts, links: Links, outbox: Outbox, *, token_max: int) -> None:
        self._facts = facts
        self._links = links
        self._outbox = outbox
        self._token_max = token_max
        self._is_window = [group.live.kind is LiveKind.WINDOW for group in facts.layout.groups]
        self._transfers: dict[int, OutgoingTransfer] = {}
        self._of_send: dict[int, OutgoingTransfer] = {}
        self._known: dict[tuple[str, int], None] = {}
        self._next_send_id = 1
        self.health = TransferHealth()
        self.stale_count = 0

    def __iter__(self) -> Iterator[OutgoingTransfer]:
        return iter(list(self._transfers.values()))

    def get(self, transfer_id: int) -> OutgoingTransfer | None:
        return self._transfers.get(transfer_id)

    @property
    def open_count(self) -> int:
        """Sends that have not settled."""
        return len(self._of_send)

    def in_flight(self) -> Counter[str]:
        """Transfers that something is computed for, by the incarnation that asked."""
        return Counter(one.peer for one in self._transfers.values() if one.owner is not None)

    # ---- asked -----------------------------------------------------------------------------------

    def handle_request(
        self, link: str, message: TransferRequest, now: float
    ) -> CacheAsked | AskRefused | None:
        """Check what is asked. One that does not fit is answered here."""
        is_new = self._note(link, message.transfer_id)
        target = self._links.connections.target(message.incarnation, link)
        if target is None or message.peer_incarnation != self._facts.incarnation:
            self.stale_count += 1
            self._links.handshakes.detach_unknown(link, message.incarnation)
            return None
        assert target.outbound is not None
        # One of an earlier attachment was on its way while the two lost each other and met anew.
        if not is_new or message.attachment != target.outbound.attachment:
            self.stale_count += 1
            return None
        remote = target.remote
        transfer = OutgoingTransfer(
            message,
            link,
            target.incarnation,
            target.name,
            remote.verify,
            remote.layout_bytes,
            remote.version,
        )
        counts = target.outbound.page_counts
        problem = check_transfer_request(
            self._facts.layout,
            remote.layout,
            counts,
            message,
            self._facts.digest_tokens,
            self._facts.digest_lookahead,
        )
        if problem is None and message.token_count > self._token_max:
            problem = f"token_count={message.token_count}: at most {self._token_max} here"
        self._transfers[message.transfer_id] = transfer
        if problem is not None:
            failure = Failure(FailureKind.BAD_RESERVATION, problem)
            self.refuse(transfer, failure, now)
            return AskRefused(message.room, failure)
        return CacheAsked(transfer)

    def refuse_unreadable(self, event: UnreadableRequest) -> None:
        """Answer a request that can't be read, so that the peer does not wait in vain."""
        is_new = self._note(event.link, event.transfer_id)
        if self._links.connections.target(event.incarnation, event.link) is None:
            self.stale_count += 1
            self._links.handshakes.detach_unknown(event.link, event.incarnation)
        elif not is_new:
            # What was begun under this id has an end of its own, and only that proves it quiet.
            self.stale_count += 1
        else:
            # A server of another version may be able to read it.
            failure = Failure(FailureKind.BAD_RESERVATION, event.problem, is_retryable=True)
            self._send_failed(event.link, event.transfer_id, event.incarnation, failure)

    def _note(self, link: str, transfer_id: int) -> bool:
        """Whether a transfer is new. Messages keep their order on a connection and no longer: the
        pages of one that comes again, or after its own Abort, may be another request's by now. So
        may those of one that first came while its peer was lost."""
        is_new = (link, transfer_id) not in self._known
        self._known[link, transfer_id] = None
        if len(self._known) > KNOWN_COUNT_MAX:
            del self._known[next(iter(self._known))]
        return is_new

    def handle_abort(self, link: str, message: Abort) -> OutgoingTransfer | None:
        """The transfer that a peer gives up, which its owner ends; None if nothing is to end."""
        if message.peer_incarnation != self._facts.incarnation:
            self.stale_count += 1
            return None
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None:
            self._note(link, message.transfer_id)
            # A transfer whose connection broke with bytes under way has lost its peer. That peer
            # fences them before it says so, and before it attaches anew.
            is_connected = self._links.connections.target(message.incarnation, link) is not None
            if message.is_closed or is_connected:
                quiesced = Quiesced(message.transfer_id, message.incarnation)
                self._outbox.to_peer(link, quiesced)
            return None
        if (transfer.peer, transfer.link) != (message.incarnation, link):
            self.stale_count += 1
            return None
        transfer.is_abort_asked = True
        return transfer

    # ---- sent ------------------------------------------------------------------------------------

    def send(
        self,
        transfer: OutgoingTransfer,
        pages: PageLists,
        token_stop: int,
        step_id: int,
        *,
        is_final: bool,
    ) -> None:
        """Send what a step makes final, as its layer groups are computed: one Send for all ranks.

        pages: all of the cache's, per group. step_id: of the step that computes the tokens before
            token_stop, or copies them; ALL_COMPUTED if their pages hold them by now, such as those
            of cached blocks before the first chunk is planned.
        The first Send takes along what was there before. Tokens that the target has are skipped,
        and so is the Send if no others are left. Only the final one always goes: it brings windows,
        tails and slots, and every rank's last word.
        """
        token_stop = max(token_stop, transfer.sent_token_count)
        assert token_stop <= transfer.token_count
        if token_stop == transfer.sent_token_count and not is_final:
            return
        if not transfer.is_opened:
            transfer.is_opened = True
            self._outbox.to_workers(
                OpenTransfer(
                    transfer_id=transfer.transfer_id,
                    peer=transfer.peer,
                    source_pages=_chosen(pages, [not found for found in self._is_window]),
                    target_pages=transfer.request.pages,
                )
            )
        send_id = self._next_send_id
        self._next_send_id += 1
        transfer.sends_open[send_id] = set(range(self._facts.rank_count))
        self._of_send[send_id] = transfer
        has_windows = is_final and any(self._is_window)
        self._outbox.to_workers(
            Send(
                send_id=send_id,
                step_id=step_id,
                transfer_id=transfer.transfer_id,
                token_start=transfer.sent_token_count,
                token_stop=token_stop,
                is_final=is_final,
                window_pages=_chosen(pages, self._is_window) if has_windows else [],
            )
        )
        transfer.sent_token_count = token_stop

    def ask_digests(self, transfer: OutgoingTransfer, pages: PageLists) -> None:
        """If they are wanted: the whole cache is computed, and its pages hold what is sent."""
        if transfer.verify is Verify.OFF:
            return
        transfer.digests_open = set(range(self._facts.rank_count))
        self._outbox.to_workers(
            Digest(
                transfer_id=transfer.transfer_id,
                layout=transfer.target_layout,
                is_source=True,
                token_count=transfer.token_count,
                pages=pages,
                verify=transfer.verify,
                token_start=transfer.request.token_start,
            )
        )

    def apply_settled(self, settled: SendSettled) -> OutgoingTransfer | None:
        """Count one rank's report; the transfer that it is of, None if it is of none."""
        transfer = self._of_send.get(settled.send_id)
        if transfer is None or settled.rank not in transfer.sends_open[settled.send_id]:
            return None
        ranks = transfer.sends_open[settled.send_id]
        ranks.remove(settled.rank)
        if not ranks:
            del transfer.sends_open[settled.send_id]
            del self._of_send[settled.send_id]
        transfer.nbytes += settled.nbytes
        transfer.exposed_nbytes += settled.exposed_nbytes
        transfer.run_count += settled.run_count
        transfer.wire_s += settled.seconds
        transfer.settled_ranks.add(settled.rank)
        transfer.is_quiet = transfer.is_quiet and settled.is_quiet
        if settled.error and transfer.failure is None:
            message = f"transfer from rank {settled.rank} failed: {settled.error}"
            kind = FailureKind.TRANSFER_FAILED
            transfer.failure = Failure(kind, message, is_retryable=True)
        return transfer

    def apply_digested(self, digested: Digested) -> OutgoingTransfer | None:
        """Add one rank's digests; the transfer that they are of, None if they are of none."""
        transfer = self._transfers.get(digested.transfer_id)
        if transfer is None or digested.rank not in transfer.digests_open:
            return None
        transfer.digests_open.remove(digested.rank)
        known = transfer.digests
        transfer.digests = add_digests(known, digested.digests) if known else digested.digests
        return transfer

    def cancel(self, transfer: OutgoingTransfer) -> None:
        """Ask the workers to stop issuing puts; what is out still settles."""
        if transfer.sends_open:
            self._outbox.to_workers(CancelSends(transfer.transfer_id))

    # ---- ended -----------------------------------------------------------------------------------

    def finish(
        self,
        transfer: OutgoingTransfer,
        first_tokens: Sequence[int],
        trace: TransferTrace,
        logprobs: list[TokenLogprobs],
        prompt_logprobs: list[bytes],
        proposals: Sequence[int] = (),
    ) -> None:
        """Everything is flushed at the target: the last message says so.

        first_tokens: of every sample. proposals: of tokens that may follow the only one.
        """
        assert not transfer.is_on_its_way
        self.health.note_success(transfer.peer)
        self._outbox.to_peer(
            transfer.link,
            TransferDone(
                transfer_id=transfer.transfer_id,
                peer_incarnation=transfer.peer,
                token_count=transfer.token_count,
                first_token=first_tokens[0],
                first_tokens=list(first_tokens) if len(first_tokens) > 1 else [],
                # Every rank settles; those with nothing that is cached there are no writers.
                writers=sorted(transfer.settled_ranks.intersection(transfer.request.writers)),
                trace=trace,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                digests=transfer.digests,
                proposals=list(proposals),
            ),
        )
        self._forget(transfer)

    def refuse(self, transfer: OutgoingTransfer, failure: Failure, now: float) -> None:
        """End a transfer that brought nothing. Only the target's own fence proves one quiet whose
        connection broke with bytes under way, so nothing is said of that."""
        assert not transfer.sends_open
        if failure.kind is FailureKind.TRANSFER_FAILED:
            self.health.note_failure(transfer.peer, now)
        if transfer.is_quiet and transfer.is_abort_asked:
            self._outbox.to_peer(transfer.link, Quiesced(transfer.transfer_id, transfer.peer))
        elif transfer.is_quiet:
            self._send_failed(transfer.link, transfer.transfer_id, transfer.peer, failure)
        self._forget(transfer)

    def _send_failed(self, link: str, transfer_id: int, peer: str, failure: Failure) -> None:
        self._outbox.to_peer(link, TransferFailed.of(transfer_id, peer, failure))

    def _forget(self, transfer: OutgoingTransfer) -> None:
        """If workers know pages of it, they can forget them."""
        if transfer.is_opened:
            self._outbox.to_workers(CloseTransfer(transfer.transfer_id))
        del self._transfers[transfer.transfer_id]


def _chosen(pages: PageLists, is_chosen: list[bool]) -> PageLists:
    """Those of some groups; of the others none."""
    return [
        found if is_wanted else (0, []) for found, is_wanted in zip(pages, is_chosen, strict=True)
    ]
