"""All requests of the prefill server, findable by every id they are known under.

Knows nothing of what happens to them.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from common.request import Origin, SamplingParams
from common.scheduling.deadlines import Deadlines
from prefill_server.queue import WaitingQueue
from prefill_server.request import PrefillRequest, Reservation


class RequestTable:
    """Owner of the indexes. A request is in `queue` while it waits to be computed."""

    def __init__(self) -> None:
        self._by_id: dict[int, PrefillRequest] = {}
        self._by_client: dict[int, PrefillRequest] = {}
        self._by_transfer: dict[int, PrefillRequest] = {}
        self._by_room: dict[int, PrefillRequest] = {}
        self._next_id = 1
        self.queue = WaitingQueue()
        self.deadlines = Deadlines()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[PrefillRequest]:
        return iter(list(self._by_id.values()))

    def add(
        self,
        *,
        client_id: int | None,
        token_ids: list[int],
        prompt_count: int,
        sampling: SamplingParams,
        budget_s: float,
        room: int | None,
        origin: Origin,
        now: float,
        is_ahead: bool = False,
    ) -> PrefillRequest:
        request = PrefillRequest(
            request_id=self._next_id,
            client_id=client_id,
            token_ids=token_ids,
            prompt_count=prompt_count,
            sampling=sampling,
            arrived_at=now,
            deadline=now + budget_s,
            room=room,
            is_ahead=is_ahead,
            origin=origin,
        )
        self._next_id += 1
        self._by_id[request.request_id] = request
        if client_id is not None:
            self._by_client[client_id] = request
        if room is not None:
            self._by_room[room] = request
        self.deadlines.add(request.request_id, request.deadline)
        return request

    def attach(self, request: PrefillRequest, reservation: Reservation, now: float) -> None:
        """From now on the request is known by its transfer id and bound by the peer's budget. Where
        the other half is traced, this one is part of that."""
        request.reservation = reservation
        parent = reservation.message.origin.trace_parent or request.origin.trace_parent
        request.origin = msgspec.structs.replace(request.origin, trace_parent=parent)
        self._by_transfer[reservation.message.transfer_id] = request
        request.deadline = min(request.deadline, now + reservation.message.budget_ms / 1000)
        self.deadlines.add(request.request_id, request.deadline)

    def release_client(self, request: PrefillRequest) -> None:
        """Its client has been answered; the request goes on without one."""
        assert request.client_id is not None
        del self._by_client[request.client_id]
        request.client_id = None

    def get(self, request_id: int) -> PrefillRequest | None:
        return self._by_id.get(request_id)

    def of_client(self, client_id: int) -> PrefillRequest | None:
        return self._by_client.get(client_id)

    def of_transfer(self, transfer_id: int) -> PrefillRequest | None:
        return self._by_transfer.get(transfer_id)

    def of_room(self, room: int) -> PrefillRequest | None:
        return self._by_room.get(room)

    def forget(self, request: PrefillRequest) -> None:
        del self._by_id[request.request_id]
        self.deadlines.forget(request.request_id)
        self.queue.discard(request)
        if request.client_id is not None:
            del self._by_client[request.client_id]
        if request.room is not None:
            del self._by_room[request.room]
        if request.reservation is not None:
            del self._by_transfer[request.reservation.message.transfer_id]
