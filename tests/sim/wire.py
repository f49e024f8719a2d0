"""The real codec between all parts of the simulation: bytes leave the sender, a new object arrives.

A message is encoded once, when it is sent, and decoded wherever it is heard, so no list is shared
between processes and a later change of one can't reach the other. A message that its receiver would
refuse is a fault of the sender or of a bound. `releases` has what earlier releases leave out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from common.errors import ProtocolError
from common.protocol import codec
from common.protocol.frontend import FrontendToScheduler, SchedulerToFrontend
from common.protocol.peer import PeerMessage
from common.protocol.worker import SchedulerToWorker, WorkerToScheduler

Message = TypeVar("Message")


def sent(message: codec.LocalMessage | PeerMessage) -> bytes:
    """Raises: AssertionError if the message is too large to be sent."""
    try:
        return codec.encode(message)
    except ProtocolError as error:
        raise AssertionError(f"can't be sent: {error}") from error


def heard_by_peer(payload: bytes) -> PeerMessage:
    """What a server reads. Raises: AssertionError if it would refuse it."""
    return _read(codec.decode_peer_message, payload)


def to_worker(message: SchedulerToWorker) -> SchedulerToWorker:
    return _read(codec.decode_scheduler_to_worker, sent(message))


def from_worker(message: WorkerToScheduler) -> WorkerToScheduler:
    return _read(codec.decode_worker_to_scheduler, sent(message))


def to_frontend(message: SchedulerToFrontend) -> SchedulerToFrontend:
    return _read(codec.decode_scheduler_to_frontend, sent(message))


def from_frontend(message: FrontendToScheduler) -> FrontendToScheduler:
    return _read(codec.decode_frontend_to_scheduler, sent(message))


def _read(decode: Callable[[bytes], Message], payload: bytes) -> Message:
    try:
        return decode(payload)
    except ProtocolError as error:
        raise AssertionError(f"its receiver refuses it: {error}") from error
