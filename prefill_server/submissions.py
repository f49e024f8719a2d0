"""New requests from the frontend: refused with a reason, or queued, paired or held by their room.

Knows nothing of pages and steps.
"""

from __future__ import annotations

from common.protocol.frontend import Failed, Submit
from common.scheduling.peers import Outbox
from prefill_server.holds import Holds
from prefill_server.rendezvous import Rendezvous
from prefill_server.requests import RequestTable
from prefill_server.reservations import Reservations


class Submissions:
    """count: requests that came, refused ones included."""

    def __init__(
        self,
        table: RequestTable,
        rendezvous: Rendezvous,
        reservations: Reservations,
        holds: Holds,
        outbox: Outbox,
        *,
        request_token_max: int,
        queue_max: int,
    ) -> None:
        self._table = table
        self._rendezvous = rendezvous
        self._reservations = reservations
        self._holds = holds
        self._outbox = outbox
        self._request_token_max = request_token_max
        self._queue_max = queue_max
        self.count = 0

    def handle(self, submit: Submit, now: float) -> None:
        self.count += 1
        room = submit.bootstrap.room if submit.bootstrap is not None else None
        token_count = len(submit.token_ids)
        if room is None:
            self._refuse(submit, 400, "a prefill server needs bootstrap_room in the request", now)
        elif self._table.of_room(room) is not None:
            self._refuse(submit, 400, f"bootstrap_room={room}: already in use", now)
        elif not 1 <= token_count <= self._request_token_max:
            limit = f"must be 1..{self._request_token_max}"
            self._refuse(submit, 400, f"prompt of {token_count} tokens: {limit}", now)
        elif len(self._table) >= self._queue_max:
            self._refuse(submit, 503, f"queue full: {len(self._table)} requests", now)
        elif (withdrawn := self._rendezvous.take_withdrawn(room, now)) is not None:
            kind, message = withdrawn.kind, withdrawn.message
            self._outbox.to_frontend(Failed(submit.request_id, withdrawn.status, kind, message))
        else:
            self._take(submit, room, now)

    def _refuse(self, submit: Submit, status: int, message: str, now: float) -> None:
        """A reservation of its room would wait in vain, unless that is another request's."""
        kind = "queue_full" if status == 503 else "bad_request"
        self._outbox.to_frontend(Failed(submit.request_id, status, kind, message))
        room = submit.bootstrap.room if submit.bootstrap is not None else None
        if room is not None and self._table.of_room(room) is None:
            self._reservations.refuse_request(room, message, now)

    def _take(self, submit: Submit, room: int, now: float) -> None:
        request = self._table.add(
            client_id=submit.request_id,
            token_ids=submit.token_ids,
            prompt_count=len(submit.token_ids),
            sampling=submit.sampling,
            budget_s=submit.budget_s,
            room=room,
            origin=submit.origin,
            now=now,
            is_ahead=bool(submit.bootstrap and submit.bootstrap.engine),
        )
        if request.is_ahead:
            self._holds.begin(request, now)
            return
        reservation = self._rendezvous.offer(room, request, now)
        if reservation is not None:
            self._reservations.pair(request, reservation, now)
