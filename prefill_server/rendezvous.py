"""Where the two halves of a routed request meet: the client's body and the decode server's pages.

A router posts one body to both servers with the same room; either half may come first. Knows
nothing of pages or compute. A room holds at most one request and one reservation.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.failures import Failure, FailureKind
from common.transfers.outgoing import OutgoingTransfer
from prefill_server.request import PrefillRequest

# Rooms whose request has ended before its reservation came, to tell that one at once: the last so
# many, so that what routers post can't fill the memory.
GIVEN_UP_COUNT_MAX = 4096
NEVER_CAME = Failure(FailureKind.RENDEZVOUS_TIMEOUT, "the other half of the room never came")
CAME_TOO_LATE = Failure(FailureKind.OTHER_HALF_ABORTED, "the decode server had waited too long")


@dataclass(frozen=True, slots=True)
class _GivenUp:
    until: float
    failure: Failure


@dataclass(slots=True)
class _Room:
    expires_at: float
    request: PrefillRequest | None = None
    reservation: OutgoingTransfer | None = None


class Rendezvous:
    """Rooms in which one half waits for the other, whichever came, for timeout_s at most."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._rooms: dict[int, _Room] = {}
        self._given_up: dict[int, _GivenUp] = {}
        self._withdrawn: dict[int, _GivenUp] = {}

    @property
    def request_count(self) -> int:
        return sum(room.request is not None for room in self._rooms.values())

    @property
    def reservation_count(self) -> int:
        return sum(room.reservation is not None for room in self._rooms.values())

    def waits_in(self, room: int) -> PrefillRequest | None:
        """The request that waits in a room, if there is one."""
        found = self._rooms.get(room)
        return found.request if found is not None else None

    def holds(self, reservation: OutgoingTransfer) -> bool:
        """Whether a reservation waits in its room."""
        room = self._rooms.get(reservation.room) if reservation.room is not None else None
        return room is not None and room.reservation is reservation

    def holds_reservation(self, room: int) -> bool:
        return room in self._rooms and self._rooms[room].reservation is not None

    def offer(self, room: int, request: PrefillRequest, now: float) -> OutgoingTransfer | None:
        """Bring the client's half; the other half if it is there, and then the room is empty."""
        self._given_up.pop(room, None)  # a router that uses a room again begins anew
        waiting = self._rooms.pop(room, None)
        if waiting is not None and waiting.reservation is not None:
            return waiting.reservation
        expires_at = min(request.deadline, now + self._timeout_s)
        self._rooms[room] = _Room(expires_at, request=request)
        return None

    def reserve(
        self, room: int, reservation: OutgoingTransfer, now: float
    ) -> PrefillRequest | None:
        """Bring the decode server's half; the other half if it is there."""
        self._withdrawn.pop(room, None)
        waiting = self._rooms.pop(room, None)
        if waiting is not None and waiting.request is not None:
            return waiting.request
        budget_s = min(self._timeout_s, reservation.request.budget_ms / 1000)
        self._rooms[room] = _Room(now + budget_s, reservation=reservation)
        return None

    def give_up(self, request: PrefillRequest, failure: Failure, now: float) -> None:
        """A request has ended; a reservation that comes for it later is to hear of it at once."""
        if request.room is None or request.transfer is not None:
            return
        room = self._rooms.get(request.room)
        if room is not None and room.request is request:
            del self._rooms[request.room]
        self._remember(self._given_up, request.room, failure, now)

    def refuse(self, room: int, failure: Failure, now: float) -> OutgoingTransfer | None:
        """The client's half of a free room was not taken. Returns the reservation that waits there;
        one that comes later is to hear of it at once."""
        waiting = self._rooms.pop(room, None)
        if waiting is not None:
            return waiting.reservation
        self._remember(self._given_up, room, failure, now)
        return None

    def withdraw(self, room: int, failure: Failure, now: float) -> PrefillRequest | None:
        """No reservation will come for a room. Returns the request that waits for one; one that
        comes later is to hear of it at once."""
        waiting = self._rooms.get(room)
        if waiting is not None:
            return waiting.request
        self._remember(self._withdrawn, room, failure, now)
        return None

    def take_withdrawn(self, room: int, now: float) -> Failure | None:
        """Why no reservation will come for a room; told once, so that a room can be used again."""
        ended = self._withdrawn.pop(room, None)
        return ended.failure if ended is not None and now < ended.until else None

    def _remember(
        self, ended: dict[int, _GivenUp], room: int, failure: Failure, now: float
    ) -> None:
        ended.pop(room, None)  # so that the newest are last
        ended[room] = _GivenUp(now + self._timeout_s, failure)
        if len(ended) > GIVEN_UP_COUNT_MAX:
            del ended[next(iter(ended))]

    def why_given_up(self, room: int, now: float) -> Failure | None:
        """How the request of a room ended that no reservation had come for."""
        ended = self._given_up.get(room)
        return ended.failure if ended is not None and now < ended.until else None

    def drop(self, reservation: OutgoingTransfer, failure: Failure, now: float) -> None:
        """The reservation is given up. Harmless if it does not wait here."""
        if reservation.room is not None and self.holds(reservation):
            self._drop_reservation(reservation.room, failure, now)

    def _drop_reservation(self, room: int, failure: Failure, now: float) -> None:
        """A reservation that met no request is gone; a later request is to hear of it."""
        del self._rooms[room]
        self._remember(self._withdrawn, room, failure, now)

    def take_expired(self, now: float) -> list[PrefillRequest | OutgoingTransfer]:
        """Halves that waited too long; their rooms are gone."""
        expired = [n for n, room in self._rooms.items() if room.expires_at <= now]
        halves: list[PrefillRequest | OutgoingTransfer] = []
        for number in expired:
            room = self._rooms[number]
            if room.reservation is not None:
                halves.append(room.reservation)
                self._drop_reservation(number, CAME_TOO_LATE, now)
            elif room.request is not None:
                halves.append(room.request)
                del self._rooms[number]
        return halves

    def postpone(self, seconds: float) -> None:
        """The halves that wait have so much longer: a server stood still, and maybe both."""
        for room in self._rooms.values():
            room.expires_at += seconds

    @property
    def next_at(self) -> float | None:
        return min((room.expires_at for room in self._rooms.values()), default=None)
