"""Where the two halves of a routed request meet: the client's body and the decode server's pages.

A router posts one body to both servers with the same room; either half may come first. Knows
nothing of pages or compute. A room holds at most one request and one reservation.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefill_server.request import PrefillRequest, Reservation

# A half whose other half never comes (a router's retry went elsewhere) is given up after this long.
RENDEZVOUS_TIMEOUT_S = 30.0


@dataclass(slots=True)
class _Room:
    expires_at: float
    request: PrefillRequest | None = None
    reservation: Reservation | None = None


class Rendezvous:
    """Rooms in which one half waits for the other."""

    def __init__(self) -> None:
        self._rooms: dict[int, _Room] = {}

    @property
    def request_count(self) -> int:
        return sum(room.request is not None for room in self._rooms.values())

    @property
    def reservation_count(self) -> int:
        return sum(room.reservation is not None for room in self._rooms.values())

    def holds_request(self, room: int) -> bool:
        return room in self._rooms and self._rooms[room].request is not None

    def holds_reservation(self, room: int) -> bool:
        return room in self._rooms and self._rooms[room].reservation is not None

    def offer(self, room: int, request: PrefillRequest, now: float) -> Reservation | None:
        """Bring the client's half; the other half if it is there, and then the room is empty."""
        waiting = self._rooms.pop(room, None)
        if waiting is not None and waiting.reservation is not None:
            return waiting.reservation
        expires_at = min(request.deadline, now + RENDEZVOUS_TIMEOUT_S)
        self._rooms[room] = _Room(expires_at, request=request)
        return None

    def reserve(self, room: int, reservation: Reservation, now: float) -> PrefillRequest | None:
        """Bring the decode server's half; the other half if it is there."""
        waiting = self._rooms.pop(room, None)
        if waiting is not None and waiting.request is not None:
            return waiting.request
        budget_s = min(RENDEZVOUS_TIMEOUT_S, reservation.message.budget_ms / 1000)
        self._rooms[room] = _Room(now + budget_s, reservation=reservation)
        return None

    def withdraw_request(self, request: PrefillRequest) -> None:
        room = self._rooms.get(request.room) if request.room is not None else None
        if room is not None and room.request is request and request.room is not None:
            del self._rooms[request.room]

    def withdraw_transfer(self, transfer_id: int) -> bool:
        """Forget a reservation; whether it was waiting here."""
        for number, room in self._rooms.items():
            if room.reservation and room.reservation.message.transfer_id == transfer_id:
                del self._rooms[number]
                return True
        return False

    def withdraw_peer(self, peer: str) -> None:
        """Forget the reservations of a peer that is gone."""
        gone = [
            number
            for number, room in self._rooms.items()
            if room.reservation is not None and room.reservation.peer == peer
        ]
        for number in gone:
            del self._rooms[number]

    def take_expired(self, now: float) -> list[PrefillRequest | Reservation]:
        """Halves that waited too long; their rooms are gone."""
        expired = [n for n, room in self._rooms.items() if room.expires_at <= now]
        halves: list[PrefillRequest | Reservation] = []
        for number in expired:
            room = self._rooms.pop(number)
            halves += [half for half in (room.request, room.reservation) if half is not None]
        return halves

    @property
    def next_at(self) -> float | None:
        return min((room.expires_at for room in self._rooms.values()), default=None)
