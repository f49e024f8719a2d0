"""Messages to bytes and back: msgpack, one typed decoder per direction, nothing executable.

Knows nothing of sockets. Whatever the bytes are, a decoder returns a message of its direction or
raises ProtocolError; messages of peers are held to the bounds of `bounds.py` as well.
"""

from __future__ import annotations

from typing import Generic, TypeVar, get_args

import msgspec

from common.errors import LayoutError, ProtocolError
from common.layout.cache_layout import ServerLayout
from common.protocol.bounds import (
    PROMPT_LOGPROBS_NBYTES_MAX,
    check_layout_bounds,
    check_peer_message,
)
from common.protocol.frontend import FrontendToScheduler, SchedulerToFrontend
from common.protocol.landing import (
    LANDING_MESSAGE_NBYTES_MAX,
    Credit,
    Landed,
    LandingMessage,
    check_credit,
    check_landed,
)
from common.protocol.peer import DecodeToPrefill, PrefillToDecode
from common.protocol.worker import SchedulerToWorker, WorkerToScheduler
from common.request import TokenLogprobs

LocalMessage = FrontendToScheduler | SchedulerToFrontend | SchedulerToWorker | WorkerToScheduler
PeerMessage = DecodeToPrefill | PrefillToDecode

# Prompt log-probabilities are the largest thing that travels, see `PROMPT_LOGPROBS_NBYTES_MAX`.
# Between our own processes there is room for those of several requests.
LOCAL_MESSAGE_NBYTES_MAX = 256 << 20
# What a peer may make us hold for one message. A prompt of a million tokens with its page ids fits
# ten times over.
PEER_MESSAGE_NBYTES_MAX = 64 << 20
# A layout lists layers per component; the largest family known takes under 8 KiB.
LAYOUT_NBYTES_MAX = 1 << 20

_PEER_TYPES = frozenset(get_args(PeerMessage))
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


def encode(message: LocalMessage | PeerMessage | LandingMessage) -> bytes:
    """Raises: ProtocolError if the message is larger than its receiver takes."""
    payload = _encoder.encode(message)
    is_peer = type(message) in _PEER_TYPES
    nbytes_max = PEER_MESSAGE_NBYTES_MAX if is_peer else LOCAL_MESSAGE_NBYTES_MAX
    if len(payload) > nbytes_max:
        raise ProtocolError(
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


def decode_decode_to_prefill(payload: bytes) -> DecodeToPrefill:
    """A message of a decode server, within bounds. Raises: ProtocolError."""
    message = _decode_to_prefill.decode(payload)
    check_peer_message(message)
    return message


def decode_prefill_to_decode(payload: bytes) -> PrefillToDecode:
    """A message of a prefill server, within bounds. Raises: ProtocolError."""
    message = _prefill_to_decode.decode(payload)
    check_peer_message(message)
    return message


def decode_landed(payload: bytes) -> Landed:
    """A piece's arrival, within bounds. Raises: ProtocolError."""
    message = _landed.decode(payload)
    check_landed(message)
    return message


def decode_credit(payload: bytes) -> Credit:
    """A slot's return, within bounds. Raises: ProtocolError."""
    message = _credit.decode(payload)
    check_credit(message)
    return message


def encode_layout(layout: ServerLayout) -> bytes:
    """What the `layout` fields of messages carry."""
    return _encoder.encode(layout)


def encode_logprobs(entries: list[TokenLogprobs]) -> bytes:
    """What the `prompt_logprobs` fields of messages carry, chunk by chunk."""
    return _encoder.encode(entries)


def decode_logprobs(payload: bytes) -> list[TokenLogprobs]:
    """Raises: ProtocolError."""
    return _logprobs.decode(payload)


def decode_layout(payload: bytes) -> ServerLayout:
    """A layout that can be laid out: within bounds and consistent.

    Raises: ProtocolError naming what is wrong with it.
    """
    layout = _layout.decode(payload)
    check_layout_bounds(layout)
    try:
        layout.check()
    except LayoutError as exc:
        raise ProtocolError(f"layout: {exc}") from exc
    return layout


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
_decode_to_prefill: _Decoder[DecodeToPrefill] = _Decoder(
    msgspec.msgpack.Decoder(DecodeToPrefill),
    "message of a decode server",
    PEER_MESSAGE_NBYTES_MAX,
)
_prefill_to_decode: _Decoder[PrefillToDecode] = _Decoder(
    msgspec.msgpack.Decoder(PrefillToDecode),
    "message of a prefill server",
    PEER_MESSAGE_NBYTES_MAX,
)
_landed: _Decoder[Landed] = _Decoder(
    msgspec.msgpack.Decoder(Landed), "message of a prefill rank", LANDING_MESSAGE_NBYTES_MAX
)
_credit: _Decoder[Credit] = _Decoder(
    msgspec.msgpack.Decoder(Credit), "message of a decode rank", LANDING_MESSAGE_NBYTES_MAX
)
_layout: _Decoder[ServerLayout] = _Decoder(
    msgspec.msgpack.Decoder(ServerLayout), "layout", LAYOUT_NBYTES_MAX
)
_logprobs: _Decoder[list[TokenLogprobs]] = _Decoder(
    msgspec.msgpack.Decoder(list[TokenLogprobs]), "log-probabilities", PROMPT_LOGPROBS_NBYTES_MAX
)
