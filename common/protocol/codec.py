"""Messages to bytes and back: msgpack, one typed decoder per direction, nothing executable.

Knows nothing of sockets. For any bytes, a decoder returns a message of its direction or raises
ProtocolError. Messages of peers must keep the bounds of `bounds.py` as well.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from common.errors import LayoutError, MessageTooLarge, ProtocolError
from common.layout.cache_layout import ServerLayout
from common.protocol.bounds import check_peer_message, check_transfer_name, fit_to_peer
from common.protocol.frontend import FrontendToScheduler, SchedulerToFrontend
from common.protocol.layout_bounds import check_layout_bounds
from common.protocol.peer import PeerMessage
from common.protocol.staging import (
    STAGING_MESSAGE_NBYTES_MAX,
    SlotFilled,
    SlotFreed,
    StagingMessage,
    check_slot_filled,
    check_slot_freed,
)
from common.protocol.worker import SchedulerToWorker, WorkerToScheduler
from common.request import TokenLogprobs
from common.request_bounds import PROMPT_LOGPROBS_NBYTES_MAX

LocalMessage = FrontendToScheduler | SchedulerToFrontend | SchedulerToWorker | WorkerToScheduler

# Prompt log-probabilities are the largest part of a message, see `PROMPT_LOGPROBS_NBYTES_MAX`.
# Between our own processes there is room for those of several requests.
LOCAL_MESSAGE_NBYTES_MAX = 256 << 20
# Memory that one message of a peer may take. A prompt of a million tokens with its page ids fits
# ten times over.
PEER_MESSAGE_NBYTES_MAX = 64 << 20
# A layout lists layers per component; the largest family known takes under 8 KiB.
LAYOUT_NBYTES_MAX = 1 << 20

_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


def encode(message: LocalMessage | PeerMessage | StagingMessage) -> bytes:
    """Texts for people are cut to what a peer takes.

    Raises: ProtocolError if a peer would refuse the message, or if it can't be encoded;
        MessageTooLarge if it has more bytes than its receiver takes.
    """
    nbytes_max = LOCAL_MESSAGE_NBYTES_MAX
    if isinstance(message, PeerMessage):
        nbytes_max = PEER_MESSAGE_NBYTES_MAX
        message = fit_to_peer(message)
    try:
        payload = _encoder.encode(message)
    # Text with half a character, as file names may have, and integers above 64 bits.
    except (UnicodeEncodeError, OverflowError) as exc:
        raise ProtocolError(f"{type(message).__name__} can't be encoded: {exc}") from exc
    if len(payload) > nbytes_max:
        raise MessageTooLarge(
            f"{type(message).__name__} of {len(payload)} bytes: at most {nbytes_max} can be sent"
        )
    return payload


def decode_frontend_to_scheduler(payload: bytes) -> FrontendToScheduler:
    """Raises: ProtocolError."""
    return _frontend_to_scheduler.decode(payload)


def decode_scheduler_to_frontend(payload: bytes) -> SchedulerToFrontend:
    """Raises: ProtocolError."""
    return _scheduler_to_frontend.decode(payload)


def decode_scheduler_to_worker(payload: bytes) -> SchedulerToWorker:
    """Raises: ProtocolError."""
    return _scheduler_to_worker.decode(payload)


def decode_worker_to_scheduler(payload: bytes) -> WorkerToScheduler:
    """Raises: ProtocolError."""
    return _worker_to_scheduler.decode(payload)


def decode_peer_message(payload: bytes) -> PeerMessage:
    """A message of another server, within bounds. Raises: ProtocolError."""
    message = _peer_message.decode(payload)
    check_peer_message(message)
    return message


class UnreadTransfer(msgspec.Struct, frozen=True):
    """The transfer of a message that can't be read. incarnation: of the server that asks for it.

    is_request: the message is the reservation, and not the result.
    """

    transfer_id: int
    incarnation: str
    is_request: bool


def find_unread(payload: bytes) -> UnreadTransfer | None:
    """The transfer of a reservation or a result that `decode_peer_message` refuses. None if the
    bytes are neither, or name no transfer."""
    try:
        name = _transfer_name.decode(payload)
        check_transfer_name(name.transfer_id, name.incarnation)
    except ProtocolError:
        return None
    return UnreadTransfer(name.transfer_id, name.incarnation, isinstance(name, _RequestName))


def decode_slot_filled(payload: bytes) -> SlotFilled:
    """A piece's arrival, within bounds. Raises: ProtocolError."""
    message = _slot_filled.decode(payload)
    check_slot_filled(message)
    return message


def decode_slot_freed(payload: bytes) -> SlotFreed:
    """A slot's return, within bounds. Raises: ProtocolError."""
    message = _slot_freed.decode(payload)
    check_slot_freed(message)
    return message


def encode_layout(layout: ServerLayout) -> bytes:
    """The value of the `layout` fields of messages."""
    return _encoder.encode(layout)


def encode_logprobs(entries: list[TokenLogprobs]) -> bytes:
    """The value of the `prompt_logprobs` fields of messages, chunk by chunk."""
    return _encoder.encode(entries)


def decode_logprobs(payload: bytes) -> list[TokenLogprobs]:
    """Raises: ProtocolError."""
    return _logprobs.decode(payload)


def decode_layout(payload: bytes) -> ServerLayout:
    """A layout that can be laid out: within bounds and consistent.

    Raises: ProtocolError naming the fault.
    """
    layout = _layout.decode(payload)
    check_layout_bounds(layout)
    try:
        layout.check()
    except LayoutError as exc:
        raise ProtocolError(f"layout: {exc}") from exc
    return layout


class _RequestName(msgspec.Struct, frozen=True, tag="TransferRequest"):
    transfer_id: int
    incarnation: str


class _DoneName(msgspec.Struct, frozen=True, tag="TransferDone"):
    transfer_id: int
    incarnation: str = msgspec.field(name="peer_incarnation")


class _FailedName(msgspec.Struct, frozen=True, tag="TransferFailed"):
    transfer_id: int
    incarnation: str = msgspec.field(name="peer_incarnation")


class _Decoder(Generic[T]):
    """A msgspec decoder whose every failure is a ProtocolError."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], name: str, nbytes_max: int) -> None:
        self._decoder = decoder
        self._name = name
        self._nbytes_max = nbytes_max

    def decode(self, payload: bytes) -> T:
        if len(payload) > self._nbytes_max:
            raise ProtocolError(
                f"{self._name} of {len(payload)} bytes: at most {self._nbytes_max} are allowed"
            )
        try:
            return self._decoder.decode(payload)
        # msgspec lets three foreign errors out: text that is not UTF-8, nesting deeper than the
        # interpreter's stack, and keys that can't be hashed.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as exc:
            raise ProtocolError(f"{self._name} can't be read: {exc}") from exc


_frontend_to_scheduler: _Decoder[FrontendToScheduler] = _Decoder(
    msgspec.msgpack.Decoder(FrontendToScheduler),
    "message of the frontend",
    LOCAL_MESSAGE_NBYTES_MAX,
)
_scheduler_to_frontend: _Decoder[SchedulerToFrontend] = _Decoder(
    msgspec.msgpack.Decoder(SchedulerToFrontend),
    "message to the frontend",
    LOCAL_MESSAGE_NBYTES_MAX,
)
_scheduler_to_worker: _Decoder[SchedulerToWorker] = _Decoder(
    msgspec.msgpack.Decoder(SchedulerToWorker), "message to a worker", LOCAL_MESSAGE_NBYTES_MAX
)
_worker_to_scheduler: _Decoder[WorkerToScheduler] = _Decoder(
    msgspec.msgpack.Decoder(WorkerToScheduler), "message of a worker", LOCAL_MESSAGE_NBYTES_MAX
)
_peer_message: _Decoder[PeerMessage] = _Decoder(
    msgspec.msgpack.Decoder(PeerMessage), "message of another server", PEER_MESSAGE_NBYTES_MAX
)
_transfer_name: _Decoder[_RequestName | _DoneName | _FailedName] = _Decoder(
    msgspec.msgpack.Decoder(_RequestName | _DoneName | _FailedName),
    "message of a transfer",
    PEER_MESSAGE_NBYTES_MAX,
)
_slot_filled: _Decoder[SlotFilled] = _Decoder(
    msgspec.msgpack.Decoder(SlotFilled), "message of a prefill rank", STAGING_MESSAGE_NBYTES_MAX
)
_slot_freed: _Decoder[SlotFreed] = _Decoder(
    msgspec.msgpack.Decoder(SlotFreed), "message of a decode rank", STAGING_MESSAGE_NBYTES_MAX
)
_layout: _Decoder[ServerLayout] = _Decoder(
    msgspec.msgpack.Decoder(ServerLayout), "layout", LAYOUT_NBYTES_MAX
)
_logprobs: _Decoder[list[TokenLogprobs]] = _Decoder(
    msgspec.msgpack.Decoder(list[TokenLogprobs]), "log-probabilities", PROMPT_LOGPROBS_NBYTES_MAX
)
