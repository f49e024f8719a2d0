"""How much a peer may claim: bounds on every count, length and number that another server sends.

Knows nothing of bytes or of what a message is for. What is checked here is checked so that nothing
behind it can be made to allocate, loop or overflow without bound; whether a value is *right* is
asked later, by the handshake and the schedulers. A field means the same in every message, so the
bounds go by field name, and a field that has none here is held to the bounds of its type.

The sender checks with the same bounds, so that a message of ours is never refused unread. So they
are not annotations of the messages: msgspec checks those only where it decodes, takes none above
int64, and its errors do not name the value.
"""

from __future__ import annotations

import math
import re
from typing import TypeVar, get_args

import msgspec

from common.errors import ProtocolError
from common.prefix_digests import digests_nbytes
from common.protocol.descriptor import RankDescriptor, StagingBufferDescriptor
from common.protocol.peer import DecodeToPrefill, PrefillToDecode
from common.protocol.sampling_bounds import check_sampling_params
from common.protocol.value_checks import (
    Check,
    check_blob,
    check_count,
    check_int,
    check_ints,
    check_text,
    int_in,
    ints_in,
)
from common.request import (
    CHUNK_MARK_COUNT_MAX,
    Claim,
    Origin,
    SamplingParams,
    TransferTrace,
)
from common.request_bounds import (
    CLIENT_LENGTH_MAX,
    INT32_MAX,
    INT64_MAX,
    N_MAX,
    NUMBERED_RID_LENGTH_MAX,
    PRIORITY_MAX,
    PROMPT_LOGPROBS_NBYTES_MAX,
    PROPOSAL_COUNT_MAX,
    REQUEST_TIMEOUT_S_MAX,
    ROOM_MAX,
    SEED_MAX,
    TOKEN_COUNT_MAX,
    TOKEN_ID_MAX,
    TRACE_PARENT,
)

M = TypeVar("M", bound=DecodeToPrefill | PrefillToDecode)

_PUBLIC_KEY = re.compile(r"[0-9a-f]{64}")
NAME_LENGTH_MAX = 128  # incarnation ids, roles, component names: printed in every log line
TEXT_LENGTH_MAX = 8192  # reasons and fingerprint values: shown to people
TEXT_COUNT_MAX = 1024  # entries of a fingerprint, of a list of differences or of transports
SHOWN_TEXTS = ("reason", "message", "trouble")
SHOWN_TEXT_LISTS = ("differences", "transports")
BUDGET_MS_MAX = 1000 * REQUEST_TIMEOUT_S_MAX
RANK_COUNT_MAX = 1024  # tp x pp of one server
GROUP_COUNT_MAX = 64
ADDRESS_NBYTES_MAX = 1 << 16  # a UCX worker address takes some hundred bytes per transport
MEMORY_KEY_NBYTES_MAX = 1 << 16
SLOT_NBYTES_MAX = 1 << 30
RING_SLOT_COUNT_MAX = 4096

DIGESTS_NBYTES_MAX = 8 << 20  # of all ranks; ours stay below a megabyte
PREFIX_DIGESTS_NBYTES_MAX = digests_nbytes(TOKEN_COUNT_MAX)
CACHED_PREFIXES_NBYTES_MAX = 1 << 20  # ours stay below 64 KiB


def check_peer_message(message: DecodeToPrefill | PrefillToDecode) -> None:
    """Raises: ProtocolError naming the first field out of bounds, its value and the bounds."""
    checks = _CHECKS_OF_KIND[type(message)]
    for (name, check), value in zip(checks, msgspec.structs.astuple(message), strict=True):
        check(name, value)


def check_transfer_name(transfer_id: int, incarnation: str) -> None:
    """Of a message of which nothing else can be read. Raises: ProtocolError."""
    check_int("transfer_id", transfer_id, 0, INT64_MAX)
    _check_incarnation("incarnation", incarnation)


def fit_to_peer(message: M) -> M:
    """The message as a peer takes it: texts that only people read are cut, for reasons repeat other
    errors and nothing is to fail for the length of one.

    Raises: ProtocolError as `check_peer_message` does.
    """
    try:
        check_peer_message(message)
    except ProtocolError:
        message = _with_short_texts(message)
        check_peer_message(message)
    return message


def _with_short_texts(message: M) -> M:
    cut: dict[str, object] = {}
    for field, value in msgspec.structs.asdict(message).items():
        if field in SHOWN_TEXTS and isinstance(value, str):
            cut[field] = _cut(value)
        elif field in SHOWN_TEXT_LISTS and isinstance(value, list):
            cut[field] = [_cut(text) for text in value[:TEXT_COUNT_MAX]]
    return msgspec.structs.replace(message, **cut)


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_LENGTH_MAX else f"{text[: TEXT_LENGTH_MAX - 3]}..."


def _check_name(name: str, value: object) -> None:
    check_text(name, value, NAME_LENGTH_MAX)
    if not (isinstance(value, str) and value.isprintable()):
        raise ProtocolError(f"{name}={value!r}: must be printable")


def _check_incarnation(name: str, value: object) -> None:
    _check_name(name, value)
    if not value:
        raise ProtocolError(f"{name}='': must not be empty")


def _check_by_type(name: str, value: object) -> None:
    match value:
        case None | bool():
            return
        case int():
            check_int(name, value, 0, INT64_MAX)
        case float():
            if not math.isfinite(value):
                raise ProtocolError(f"{name}={value}: must be finite")
        case str():
            check_text(name, value, TEXT_LENGTH_MAX)
        case bytes():
            return  # bounded by the message, and by its own decoder
        case list():
            check_count(name, len(value), TOKEN_COUNT_MAX)
        case dict():
            check_count(name, len(value), TEXT_COUNT_MAX)
            for key, entry in value.items():
                _check_by_type(f"{name} key", key)
                _check_by_type(f"{name}[{key!r}]", entry)
        case msgspec.Struct():
            for field, inner in msgspec.structs.asdict(value).items():
                _check_by_type(f"{name}.{field}", inner)
        case _:
            raise ProtocolError(f"{name}: a {type(value).__name__} is not allowed here")


def _check_texts(name: str, values: object) -> None:
    assert isinstance(values, list), f"{name} is decoded as a list"
    check_count(name, len(values), TEXT_COUNT_MAX)
    for value in values:
        check_text(name, value, TEXT_LENGTH_MAX)


def _check_host_ids(name: str, values: object) -> None:
    assert isinstance(values, list), f"{name} is decoded as a list"
    check_count(name, len(values), RANK_COUNT_MAX)
    for value in values:
        _check_name(name, value)


# ---- fields --------------------------------------------------------------------------------------


def _check_pages(name: str, value: object) -> None:
    assert isinstance(value, list), f"{name} is decoded as a list"
    check_count(name, len(value), GROUP_COUNT_MAX)
    for group, (first_index, page_ids) in enumerate(value):
        check_int(f"{name}[{group}] first index", first_index, 0, INT32_MAX)
        check_ints(f"{name}[{group}] page ids", page_ids, 0, INT32_MAX, TOKEN_COUNT_MAX)


def _check_ranks(name: str, value: object) -> None:
    """Descriptors of ranks, each rank once."""
    assert isinstance(value, list), f"{name} is decoded as a list"
    check_count(name, len(value), RANK_COUNT_MAX)
    ranks: set[int] = set()
    for descriptor in value:
        assert isinstance(descriptor, RankDescriptor), f"{name} is decoded as descriptors"
        check_int(f"{name}.rank", descriptor.rank, 0, RANK_COUNT_MAX - 1)
        if descriptor.rank in ranks:
            raise ProtocolError(f"{name}: rank {descriptor.rank} is described twice")
        ranks.add(descriptor.rank)
        here = f"{name}[{descriptor.rank}]"
        check_blob(f"{here}.worker_address", descriptor.worker_address, ADDRESS_NBYTES_MAX)
        check_blob(f"{here}.stream_address", descriptor.stream_address, ADDRESS_NBYTES_MAX)
        check_count(f"{here}.regions", len(descriptor.regions), GROUP_COUNT_MAX)
        for region in (*descriptor.regions, descriptor.probe):
            _check_region(here, region)
        check_ints(f"{here}.page_counts", descriptor.page_counts, 0, INT32_MAX, GROUP_COUNT_MAX)
        if descriptor.staging_buffer is not None:
            _check_staging_buffer(f"{here}.staging_buffer", descriptor.staging_buffer)


def _check_staging_buffer(here: str, staging_buffer: StagingBufferDescriptor) -> None:
    """Slots that lie in the region, each in one ring, and one ring per source rank."""
    _check_name(f"{here}.address", staging_buffer.address)
    if staging_buffer.public_key and not _PUBLIC_KEY.fullmatch(staging_buffer.public_key):
        raise ProtocolError(f"{here}.public_key: must be 64 hexadecimal digits")
    _check_region(here, staging_buffer.region)
    _, _, nbytes, _ = staging_buffer.region
    check_int(f"{here}.slot_nbytes", staging_buffer.slot_nbytes, 1, SLOT_NBYTES_MAX)
    check_count(f"{here}.rings", len(staging_buffer.rings), RANK_COUNT_MAX)
    slot_count = nbytes // staging_buffer.slot_nbytes
    seen_ranks: set[int] = set()
    seen_slots: set[int] = set()
    for ring in staging_buffer.rings:
        check_int(f"{here}.source_rank", ring.source_rank, 0, RANK_COUNT_MAX - 1)
        check_int(f"{here}.ring", ring.ring, 0, INT64_MAX)
        check_ints(f"{here}.slots", ring.slots, 0, slot_count - 1, RING_SLOT_COUNT_MAX)
        if ring.source_rank in seen_ranks or not ring.slots:
            raise ProtocolError(
                f"{here}: source rank {ring.source_rank} must have one ring of at least one slot"
            )
        if not seen_slots.isdisjoint(ring.slots) or len(set(ring.slots)) != len(ring.slots):
            raise ProtocolError(f"{here}: a slot of rank {ring.source_rank} is granted twice")
        seen_ranks.add(ring.source_rank)
        seen_slots.update(ring.slots)


def _check_region(here: str, region: tuple[str, int, int, bytes]) -> None:
    name, address, nbytes, memory_key = region
    _check_name(f"{here} region", name)
    check_int(f"{here} region {name!r} address", address, 0, 2**64 - 1)
    check_int(f"{here} region {name!r} nbytes", nbytes, 0, INT64_MAX)
    if address + nbytes > 2**64:
        raise ProtocolError(f"{here} region {name!r}: wraps around the address space")
    check_blob(f"{here} region {name!r} key", memory_key, MEMORY_KEY_NBYTES_MAX)


def _check_blobs(name: str, value: object, count_max: int, nbytes_max: int) -> None:
    assert isinstance(value, list), f"{name} is decoded as a list"
    check_count(name, len(value), count_max)
    nbytes = sum(map(len, value))
    if nbytes > nbytes_max:
        raise ProtocolError(f"{name}: {nbytes} bytes; at most {nbytes_max} are allowed")


def _check_room(name: str, value: object) -> None:
    if value is not None:
        check_int(name, value, 0, ROOM_MAX)


def _check_sampling(name: str, value: object) -> None:
    if isinstance(value, SamplingParams):
        check_sampling_params(name, value)


def _check_origin(name: str, value: object) -> None:
    assert isinstance(value, Origin), f"{name} is decoded as Origin"
    check_text(f"{name}.rid", value.rid, NUMBERED_RID_LENGTH_MAX)
    if value.trace_parent and not TRACE_PARENT.fullmatch(value.trace_parent):
        raise ProtocolError(f"{name}.trace_parent: must be a W3C traceparent of version 00")


def _check_claim(name: str, value: object) -> None:
    assert isinstance(value, Claim), f"{name} is decoded as Claim"
    check_int(f"{name}.priority", value.priority, -PRIORITY_MAX, PRIORITY_MAX)
    check_text(f"{name}.client", value.client, CLIENT_LENGTH_MAX)


def _check_trace(name: str, value: object) -> None:
    assert isinstance(value, TransferTrace), f"{name} is decoded as TransferTrace"
    check_count(f"{name}.chunk_ends_s", len(value.chunk_ends_s), CHUNK_MARK_COUNT_MAX)
    for seconds in value.chunk_ends_s:
        _check_by_type(f"{name}.chunk_ends_s", seconds)
    _check_by_type(name, value)


def _bytes_to(nbytes_max: int) -> Check:
    """None is left to the field's type."""

    def check(name: str, value: object) -> None:
        if value is not None:
            assert isinstance(value, bytes), f"{name} is decoded as bytes"
            check_blob(name, value, nbytes_max)

    return check


_FIELD_CHECKS: dict[str, Check] = {
    "role": _check_name,
    "kind": _check_name,
    "name": _check_name,
    "http_address": _check_name,
    "host_ids": _check_host_ids,
    "incarnation": _check_incarnation,
    "peer_incarnation": _check_incarnation,
    "version": int_in(0, INT32_MAX),
    "version_min": int_in(0, INT32_MAX),
    "version_max": int_in(0, INT32_MAX),
    "status": int_in(400, 599),
    "token_count": int_in(1, TOKEN_COUNT_MAX),
    "token_start": int_in(0, TOKEN_COUNT_MAX),
    "prompt_count": int_in(0, TOKEN_COUNT_MAX),
    "first_token": int_in(0, TOKEN_ID_MAX),
    "first_tokens": ints_in(0, TOKEN_ID_MAX, N_MAX),
    "proposals": ints_in(0, TOKEN_ID_MAX, PROPOSAL_COUNT_MAX),
    "seeds": ints_in(0, SEED_MAX, N_MAX),
    "budget_ms": int_in(0, BUDGET_MS_MAX),
    "token_ids": ints_in(0, TOKEN_ID_MAX, TOKEN_COUNT_MAX),
    "rest_token_ids": ints_in(0, TOKEN_ID_MAX, TOKEN_COUNT_MAX),
    "next_token_ids": ints_in(0, TOKEN_ID_MAX, TOKEN_COUNT_MAX),
    "writers": ints_in(0, RANK_COUNT_MAX - 1, RANK_COUNT_MAX),
    "pids": ints_in(1, INT32_MAX, RANK_COUNT_MAX),
    "room": _check_room,
    "origin": _check_origin,
    "claim": _check_claim,
    "trace": _check_trace,
    "differences": _check_texts,
    "transports": _check_texts,
    "pages": _check_pages,
    "prefix_digests": _bytes_to(PREFIX_DIGESTS_NBYTES_MAX),
    "cached_prefixes": _bytes_to(CACHED_PREFIXES_NBYTES_MAX),
    "digests": lambda name, value: _check_blobs(name, value, RANK_COUNT_MAX, DIGESTS_NBYTES_MAX),
    "prompt_logprobs": lambda name, value: _check_blobs(
        name, value, TOKEN_COUNT_MAX, PROMPT_LOGPROBS_NBYTES_MAX
    ),
    "ranks": _check_ranks,
    "sampling": _check_sampling,
}


def _checks_of(kind: type[msgspec.Struct]) -> tuple[tuple[str, Check], ...]:
    """What every field of a message is called in errors, and its check."""
    return tuple(
        (f"{kind.__name__}.{field.name}", _FIELD_CHECKS.get(field.name, _check_of_type(field.type)))
        for field in msgspec.structs.fields(kind)
    )


def _check_of_type(kind: object) -> Check:
    """Plain integers and texts are most of what is sent: theirs is found once."""
    if kind is int:
        return int_in(0, INT64_MAX)
    if kind is str:
        return lambda name, value: check_text(name, value, TEXT_LENGTH_MAX)
    return _check_by_type


_CHECKS_OF_KIND: dict[type, tuple[tuple[str, Check], ...]] = {
    kind: _checks_of(kind) for kind in (*get_args(DecodeToPrefill), *get_args(PrefillToDecode))
}
