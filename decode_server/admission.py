"""Who is next, and whether its pages fit.

Knows nothing of what happens to a request after it was admitted.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from operator import le

import msgspec

from common.layout.component import LiveKind
from common.protocol.peer import TransferRequest
from common.scheduling.batcher import Batcher
from common.scheduling.peers import Outbox
from common.scheduling.sequence import PageAccount
from common.scheduling.transitions import DecodeEvent, DecodeState
from decode_server.choice import Choice
from decode_server.prefill_peer import PrefillPeer
from decode_server.receiver import Receiver
from decode_server.request import DecodeRequest, Transfer

# Tokens every active request is expected to grow by soon: admission leaves that much free, so that
# a newcomer does not at once push somebody out.
RESERVED_TOKENS = 64
# A request that does not fit is passed over for smaller ones at most this long; then it is next.
PASSED_OVER_MAX_S = 2.0
TRANSFER_ID_BITS = 63


class Admission:
    """Moves requests out of the waiting queue."""

    def __init__(
        self,
        incarnation: str,
        account: PageAccount,
        batcher: Batcher,
        choice: Choice,
        receiver: Receiver,
        outbox: Outbox,
        *,
        seed: int,
    ) -> None:
        self._incarnation = incarnation
        self._account = account
        self._batcher = batcher
        self._choice = choice
        self._receiver = receiver
        self._outbox = outbox
        self._random = random.Random(seed)

    @property
    def active_count(self) -> int:
        """Requests that have pages, those of transfers under way included."""
        batcher = self._batcher
        computing_count = batcher.running_count + batcher.prompt_count + batcher.ready_count
        return computing_count + self._receiver.under_way_count

    def admit_here(self, queue: Iterable[DecodeRequest], now: float) -> list[DecodeRequest]:
        """Requests whose prompt this server starts to compute itself."""
        admitted: list[DecodeRequest] = []
        for request in queue:
            if self._batcher.is_full:
                break
            tokens = request.token_ids
            if not self._fits(self._account.needs_to_compute(len(tokens) + 1)):
                if now - request.waiting_since > PASSED_OVER_MAX_S:
                    break
                continue
            sequence = self._account.open(
                request.request_id, tokens, request.prompt_count, request.sampling
            )
            if sequence is None:
                continue
            request.sequence = sequence
            request.peer = ""
            request.requested_at = request.requested_at or now
            request.advance(DecodeEvent.SCHEDULED_HERE)
            self._batcher.add(sequence)
            admitted.append(request)
        return admitted

    def admit_remote(self, queue: Iterable[DecodeRequest], now: float) -> list[DecodeRequest]:
        """Requests for which a prefill server has just been asked.

        Pages bound the transfers under way, for how many it takes to keep the batch full depends
        on how long prefill servers take. Nobody is asked for more while caches that have come wait
        for a place in the batch.
        """
        admitted: list[DecodeRequest] = []
        room: list[int] = []  # not known yet; there is always a page group
        may_ask_any: bool | None = None  # not known yet
        for request in queue:
            if self._batcher.ready_count:
                break
            room = room or self._room()
            needs = self._account.needs_of_prompt(len(request.token_ids))
            fits = all(map(le, needs, room))
            is_late = now - request.waiting_since > PASSED_OVER_MAX_S
            if not fits and not is_late and request.bootstrap is None:
                continue  # whichever server would be asked
            if request.bootstrap is None and not request.tested_link:
                if may_ask_any is None:
                    may_ask_any = self._choice.may_ask_any(now)
                if not may_ask_any:
                    continue
            peer = self._choice.choose(request, now)
            if peer is None:
                continue
            if fits:
                self._reserve(request, peer, now)
                admitted.append(request)
                room, may_ask_any = [], None
            elif is_late:
                break
        return admitted

    @property
    def may_starve(self) -> bool:
        """Whether nothing runs, and pages are in quarantine."""
        pool = self._account.pool
        groups = range(len(pool.page_counts))
        return not self.active_count and any(map(pool.quarantined_count, groups))

    def is_starved(self, queue: Iterable[DecodeRequest]) -> bool:
        """Whether quarantined pages alone keep the next request out."""
        first = next(iter(queue), None)
        if first is None or not self.may_starve:
            return False
        return not self._fits(self._account.needs_to_compute(len(first.token_ids) + 1))

    def _fits(self, needs: list[int]) -> bool:
        """Whether a newcomer's pages fit beside what the active requests are about to need."""
        return all(map(le, needs, self._room()))

    def _room(self) -> list[int]:
        """Pages per group that a newcomer may take; below 0 if the active ones may need more."""
        return [
            self._account.available_count(group) - self._headroom(group)
            for group in range(len(self._account.groups))
        ]

    def _headroom(self, group: int) -> int:
        """Pages of a group that the active requests are about to need. A window stops growing, a
        slot or a tail is all there from the start."""
        page_group = self._account.groups[group]
        if not page_group.live.is_paged:
            return 0
        items = RESERVED_TOKENS
        if page_group.live.kind is LiveKind.BLOCK:
            items = -(-RESERVED_TOKENS // page_group.live.size)
        headroom = self.active_count * -(-items // page_group.page_items)
        if page_group.live.kind is LiveKind.WINDOW:
            page_max = self.active_count * self._account.decode_page_max(group)
            headroom = min(headroom, max(0, page_max - self._account.pool.used_count(group)))
        return headroom

    def _reserve(self, request: DecodeRequest, peer: PrefillPeer, now: float) -> None:
        """Reserve pages for the whole cache, which are there, and ask for it."""
        token_count = len(request.token_ids)
        spans = self._account.spans_for_prompt(token_count)
        needs = self._account.needs(spans, token_count)
        for span, pages in zip(spans, self._account.allocate(needs), strict=True):
            span.page_ids.extend(pages)
        transfer = Transfer(
            transfer_id=self._random.getrandbits(TRANSFER_ID_BITS),
            link=peer.link,
            peer=peer.incarnation,
            token_count=token_count,
            spans=spans,
            writers=peer.writers,
            request=request,
            hand_over=peer.hand_over,
            verify=peer.verify,
            source_layout=peer.layout_bytes,
            credit=0 if _is_by_room(request) else peer.attachment,
        )
        self._receiver.add(transfer)
        peer.note_asked(token_count, now)
        if request.state is DecodeState.WAITING:
            request.advance(DecodeEvent.ADMITTED)
        request.advance(DecodeEvent.RESERVED)
        request.transfer = transfer
        request.link = peer.link
        request.peer = peer.name
        request.requested_at = request.requested_at or now
        message = self._transfer_request(request, transfer, peer.attachment, now)
        self._outbox.to_peer(peer.link, message)

    def _transfer_request(
        self, request: DecodeRequest, transfer: Transfer, attachment: int, now: float
    ) -> TransferRequest:
        """A routed request that has produced nothing yet meets its other half by room; any other
        brings its tokens along."""
        is_by_room = _is_by_room(request)
        sampling = request.sampling
        if request.output_count > 0:
            # Its prompt's log-probabilities have been told already.
            sampling = msgspec.structs.replace(sampling, logprob_start_len=-1)
        return TransferRequest(
            transfer_id=transfer.transfer_id,
            incarnation=self._incarnation,
            peer_incarnation=transfer.peer,
            token_count=transfer.token_count,
            pages=[(span.first_index, list(span.page_ids)) for span in transfer.spans],
            budget_ms=max(1, int(1000 * (request.deadline - now))),
            writers=transfer.writers,
            room=request.bootstrap.room if is_by_room and request.bootstrap is not None else None,
            token_ids=[] if is_by_room else list(request.token_ids),
            prompt_count=0 if is_by_room else request.prompt_count,
            sampling=None if is_by_room else sampling,
            is_self_test=bool(request.tested_link),
            is_held=request.is_held,
            origin=request.origin,
            attachment=attachment,
        )


def _is_by_room(request: DecodeRequest) -> bool:
    """Whether the prefill server knows a request already, by the room that its router gave it."""
    return request.bootstrap is not None and request.output_count == 0
