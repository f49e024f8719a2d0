"""Who is next, and whether its pages fit.

Knows nothing of what happens to a request after it was admitted.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sized
from operator import le

import msgspec

from common.layout.component import LiveKind
from common.protocol.peer import TransferRequest
from common.scheduling.batcher import Batcher
from common.scheduling.facts import PASSED_OVER_MAX_S
from common.scheduling.peers import Outbox
from common.scheduling.sequence import PageAccount, Sequence
from common.scheduling.transitions import DecodeEvent, DecodeState
from decode_server.choice import Choice
from decode_server.output_lengths import Growing, OutputLengths
from decode_server.prefill_peer import PrefillPeer
from decode_server.receiver import Receiver
from decode_server.request import DecodeRequest, Transfer

# Tokens that the window of every active request is expected to grow by soon.
WINDOW_TOKENS = 64
# Requests whose growth is looked at in vain, until no more are looked at for the moment.
GROWTH_LOOK_COUNT_MAX = 8
TRANSFER_ID_BITS = 63


class Admission:
    """Moves requests out of the waiting queue, as many as find pages beside those that the active
    ones are expected to grow by: then a newcomer seldom pushes somebody out."""

    def __init__(
        self,
        incarnation: str,
        account: PageAccount,
        batcher: Batcher,
        choice: Choice,
        receiver: Receiver,
        lengths: OutputLengths,
        outbox: Outbox,
        *,
        seed: int,
    ) -> None:
        self._incarnation = incarnation
        self._account = account
        self._batcher = batcher
        self._choice = choice
        self._receiver = receiver
        self._lengths = lengths
        self._growth = (-1, 0, 0)
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
            needs = self._account.needs_to_compute(len(tokens) + 1)
            if not self._fits_grown(request, needs, self._room()):
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
        look_count = 0
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
            if fits and look_count < GROWTH_LOOK_COUNT_MAX:
                fits = self._fits_grown(request, needs, room)
                look_count += not fits
            if fits:
                self._reserve(request, peer, now)
                admitted.append(request)
                room, may_ask_any = [], None
            elif is_late:
                break
        return admitted

    def short_count(self, queue: Sized, now: float) -> int:
        """Of those that wait, how many wait for pages or places here: all, unless no prefill server
        can be asked at the moment."""
        return len(queue) if self._choice.may_ask_any(now) else 0

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
        needs = self._account.needs_to_compute(len(first.token_ids) + 1)
        return not all(map(le, needs, self._room()))

    def _fits_grown(self, request: DecodeRequest, needs: list[int], room: list[int]) -> bool:
        """Whether a newcomer's pages fit, and those that it is expected to grow by. Alone, it may
        have what there is."""
        growth = 0
        if self.active_count:
            growth = self._lengths.expected_growth([self._growing(request)])
        return all(
            need + self._pages_of(group, growth) <= available
            for group, (need, available) in enumerate(zip(needs, room, strict=True))
        )

    def _room(self) -> list[int]:
        """Pages per group that a newcomer may take; below 0 if the active ones may need more."""
        return [
            self._account.available_count(group) - self._headroom(group)
            for group in range(len(self._account.groups))
        ]

    def _headroom(self, group: int) -> int:
        """Pages of a group that the active requests are expected to need, and for each one that is
        filled in part. A window stops growing, a slot or a tail is all there from the start."""
        live, page_items = self._account.groups[group].live, self._account.groups[group].page_items
        if live.kind is LiveKind.WINDOW:
            page_max = self.active_count * self._account.decode_page_max(group)
            headroom = self.active_count * -(-WINDOW_TOKENS // page_items)
            return min(headroom, max(0, page_max - self._account.pool.used_count(group)))
        if not live.is_paged:
            return 0
        return self._pages_of(group, self._expected_growth()) + self.active_count

    def _pages_of(self, group: int, growth: int) -> int:
        """Pages of a group for so many tokens more, where it grows with each."""
        page_group = self._account.groups[group]
        if not page_group.live.is_paged or page_group.live.kind is LiveKind.WINDOW:
            return 0
        items = -(-growth // max(1, page_group.live.size))
        return -(-items // page_group.page_items)

    def _expected_growth(self) -> int:
        """Tokens of all active requests; found anew with every step, for it takes a while."""
        step_count, active_count = self._batcher.step_count, self.active_count
        if self._growth[:2] != (step_count, active_count):
            growing = [self._growing(one) for one in self._batcher.sequences()]
            growing += [self._growing(one) for one in self._receiver.waiting()]
            growth = self._lengths.expected_growth(growing)
            self._growth = (step_count, active_count, growth)
        return self._growth[2]

    def _growing(self, one: DecodeRequest | Sequence) -> Growing:
        token_count = len(one.token_ids)
        left_count = one.sampling.max_new_tokens - one.output_count
        left_count = min(left_count, self._batcher.limits.sequence_token_max - token_count)
        return Growing(token_count, one.output_count, max(0, left_count))

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
            mode=peer.transfer_mode,
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
