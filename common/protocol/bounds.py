"""How much a peer may claim: bounds on every count, length and number that another server sends.

Knows nothing of bytes or of what a message is for. What is checked here is checked so that nothing
behind it can be made to allocate, loop or overflow without bound; whether a value is *right* is
asked later, by the handshake and the schedulers. A field means the same in every message, so the
bounds go by field name, and a field that has none here is held to the bounds of its type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import msgspec

from common.errors import ProtocolError
from common.layout.cache_layout import ServerLayout
from common.layout.component import DTYPE_NBYTES, CacheComponent, LiveKind
from common.protocol.descriptor import LandingDescriptor, RankDescriptor
from common.protocol.peer import DecodeToPrefill, PrefillToDecode
from common.request import (
    CHUNK_MARK_COUNT_MAX,
    GRAMMAR_LENGTH_MAX,
    HandOverTrace,
    Origin,
    SamplingParams,
)

_PUBLIC_KEY = re.compile(r"[0-9a-f]{64}")
_TRACE_PARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")  # 55 characters
INT64_MAX = 2**63 - 1  # ids and seeds end up in int64
INT32_MAX = 2**31 - 1  # page tables and process ids are int32
RID_LENGTH_MAX = 300  # the frontend takes 256 and numbers the samples of one body
NAME_LENGTH_MAX = 128  # incarnation ids, roles, component names: printed in every log line
TEXT_LENGTH_MAX = 8192  # reasons and fingerprint values: shown to people
TEXT_COUNT_MAX = 1024  # entries of a fingerprint, of a list of differences or of transports
TOKEN_COUNT_MAX = 2**24  # an order of magnitude above the longest context known
BUDGET_MS_MAX = 7 * 24 * 3600 * 1000  # a week: longer than any request lives
RANK_COUNT_MAX = 1024  # tp x pp of one server
GROUP_COUNT_MAX = 64
ADDRESS_NBYTES_MAX = 1 << 16  # a UCX worker address takes some hundred bytes per transport
MEMORY_KEY_NBYTES_MAX = 1 << 16
SLOT_NBYTES_MAX = 1 << 30
RING_SLOT_COUNT_MAX = 4096

DIGESTS_NBYTES_MAX = 8 << 20  # of all ranks; ours stay below a megabyte
# Of one request: 128 Ki positions with the 20 likeliest tokens take about 40 MiB. A TransferDone
# with them stays below what a peer takes as one message.
PROMPT_LOGPROBS_NBYTES_MAX = 48 << 20

COMPONENT_COUNT_MAX = GROUP_COUNT_MAX  # each may have a live rule of its own
SEGMENT_COUNT_MAX = 16
LAYER_COUNT_MAX = 1024
UNIT_COUNT_MAX = 1 << 16  # one unit per channel of a state-space model
UNIT_NBYTES_MAX = 1 << 24
LIVE_SIZE_MAX = 1 << 24
ELEMENT_NBYTES_MAX = max(DTYPE_NBYTES.values())
PAGE_NBYTES_MAX = 1 << 32  # with a page id below 2**31, every offset stays within int64


def check_peer_message(message: DecodeToPrefill | PrefillToDecode) -> None:
    """Raises: ProtocolError naming the first field out of bounds, its value and the bounds."""
    for field, value in msgspec.structs.asdict(message).items():
        check = _FIELD_CHECKS.get(field, _check_by_type)
        check(f"{type(message).__name__}.{field}", value)


def check_layout_bounds(layout: ServerLayout) -> None:
    """Bounds that keep a consistent layout's geometry small enough to compute with.

    Raises: ProtocolError. `ServerLayout.check` asks whether the values fit together.
    """
    _check_count("layout.components", len(layout.components), COMPONENT_COUNT_MAX)
    _check_count("layout.stages", len(layout.stages), RANK_COUNT_MAX)
    if not layout.components or not layout.stages:
        raise ProtocolError("layout: needs at least one component and one stage")
    check_int("layout.tp_size", layout.tp_size, 1, RANK_COUNT_MAX)
    check_int("layout ranks", layout.tp_size * len(layout.stages), 1, RANK_COUNT_MAX)
    for first, end in layout.stages:
        check_int("layout.stages", first, 0, LAYER_COUNT_MAX)
        check_int("layout.stages", end, 0, LAYER_COUNT_MAX)
    check_int("layout.page_size", layout.page_size, 1, INT32_MAX)
    check_int("layout.layer_group_count", layout.layer_group_count, 1, LAYER_COUNT_MAX)
    page_nbytes = sum(_component_page_nbytes(layout, c) for c in layout.components)
    if page_nbytes > PAGE_NBYTES_MAX:
        raise ProtocolError(
            f"layout: pages of {page_nbytes} bytes: at most {PAGE_NBYTES_MAX} are allowed"
        )


def _component_page_nbytes(layout: ServerLayout, component: CacheComponent) -> int:
    """Check one component; returns what it takes of a page over all ranks."""
    name = f"layout component {component.name[:NAME_LENGTH_MAX]!r}"
    for text in (component.name, component.dtype, component.order):
        _check_text(name, text, NAME_LENGTH_MAX)
    _check_count(f"{name}: layers", len(component.layers), LAYER_COUNT_MAX)
    _check_count(f"{name}: segments", len(component.segments), SEGMENT_COUNT_MAX)
    size_min = 0 if component.live.kind in (LiveKind.FULL, LiveKind.SLOT) else 1
    check_int(f"{name}: live.size", component.live.size, size_min, LIVE_SIZE_MAX)
    check_int(f"{name}: live.back", component.live.back, 0, LIVE_SIZE_MAX)
    total = 0
    for segment in component.segments:
        _check_text(f"{name}: segment", segment.name, NAME_LENGTH_MAX)
        check_int(f"{name}: unit_count", segment.unit_count, 1, UNIT_COUNT_MAX)
        check_int(f"{name}: unit_nbytes", segment.unit_nbytes, 1, UNIT_NBYTES_MAX)
        # A unit may be padded up to the largest element that a page group has.
        nbytes = segment.unit_nbytes * layout.page_items(component.live) + ELEMENT_NBYTES_MAX - 1
        total += segment.unit_count * nbytes
    return total * len(component.layers)


# ---- values --------------------------------------------------------------------------------------


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raises: ProtocolError if `value` is not an integer in low..high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ProtocolError(f"{name}={value!r}: must be in {low}..{high}")


def _check_ints(name: str, values: object, low: int, high: int, count_max: int) -> None:
    """A list of integers, which may be long: bounds are found without a Python loop."""
    assert isinstance(values, list), f"{name} is decoded as a list"
    _check_count(name, len(values), count_max)
    if values:
        check_int(f"smallest of {name}", min(values), low, high)
        check_int(f"largest of {name}", max(values), low, high)


def _check_count(name: str, count: int, count_max: int) -> None:
    if count > count_max:
        raise ProtocolError(f"{name}: {count} entries; at most {count_max} are allowed")


def _check_text(name: str, value: object, length_max: int) -> None:
    assert isinstance(value, str), f"{name} is decoded as a string"
    if len(value) > length_max:
        raise ProtocolError(f"{name}: {len(value)} characters; at most {length_max} are allowed")


def _check_blob(name: str, value: bytes, nbytes_max: int) -> None:
    if len(value) > nbytes_max:
        raise ProtocolError(f"{name}: {len(value)} bytes; at most {nbytes_max} are allowed")


def _check_name(name: str, value: object) -> None:
    _check_text(name, value, NAME_LENGTH_MAX)
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
            _check_text(name, value, TEXT_LENGTH_MAX)
        case bytes():
            return  # bounded by the message, and by its own decoder
        case list():
            _check_count(name, len(value), TOKEN_COUNT_MAX)
        case dict():
            _check_count(name, len(value), TEXT_COUNT_MAX)
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
    _check_count(name, len(values), TEXT_COUNT_MAX)
    for value in values:
        _check_text(name, value, TEXT_LENGTH_MAX)


# ---- fields --------------------------------------------------------------------------------------


def _check_pages(name: str, value: object) -> None:
    assert isinstance(value, list), f"{name} is decoded as a list"
    _check_count(name, len(value), GROUP_COUNT_MAX)
    for group, (first_index, page_ids) in enumerate(value):
        check_int(f"{name}[{group}] first index", first_index, 0, INT32_MAX)
        _check_ints(f"{name}[{group}] page ids", page_ids, 0, INT32_MAX, TOKEN_COUNT_MAX)


def _check_ranks(name: str, value: object) -> None:
    """Descriptors of ranks, each rank once."""
    assert isinstance(value, list), f"{name} is decoded as a list"
    _check_count(name, len(value), RANK_COUNT_MAX)
    ranks: set[int] = set()
    for descriptor in value:
        assert isinstance(descriptor, RankDescriptor), f"{name} is decoded as descriptors"
        check_int(f"{name}.rank", descriptor.rank, 0, RANK_COUNT_MAX - 1)
        if descriptor.rank in ranks:
            raise ProtocolError(f"{name}: rank {descriptor.rank} is described twice")
        ranks.add(descriptor.rank)
        here = f"{name}[{descriptor.rank}]"
        _check_blob(f"{here}.worker_address", descriptor.worker_address, ADDRESS_NBYTES_MAX)
        _check_count(f"{here}.regions", len(descriptor.regions), GROUP_COUNT_MAX)
        for region in (*descriptor.regions, descriptor.probe):
            _check_region(here, region)
        _check_ints(f"{here}.page_counts", descriptor.page_counts, 0, INT32_MAX, GROUP_COUNT_MAX)
        if descriptor.landing is not None:
            _check_landing(f"{here}.landing", descriptor.landing)


def _check_landing(here: str, landing: LandingDescriptor) -> None:
    """Slots that lie in the region, each in one ring, and one ring per source rank."""
    _check_name(f"{here}.address", landing.address)
    if landing.public_key and not _PUBLIC_KEY.fullmatch(landing.public_key):
        raise ProtocolError(f"{here}.public_key: must be 64 hexadecimal digits")
    _check_region(here, landing.region)
    _, _, nbytes, _ = landing.region
    check_int(f"{here}.slot_nbytes", landing.slot_nbytes, 1, SLOT_NBYTES_MAX)
    _check_count(f"{here}.rings", len(landing.rings), RANK_COUNT_MAX)
    slot_count = nbytes // landing.slot_nbytes
    seen_ranks: set[int] = set()
    seen_slots: set[int] = set()
    for ring in landing.rings:
        check_int(f"{here}.source_rank", ring.source_rank, 0, RANK_COUNT_MAX - 1)
        check_int(f"{here}.ring", ring.ring, 0, INT64_MAX)
        _check_ints(f"{here}.slots", ring.slots, 0, slot_count - 1, RING_SLOT_COUNT_MAX)
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
    _check_blob(f"{here} region {name!r} key", memory_key, MEMORY_KEY_NBYTES_MAX)


def _check_blobs(name: str, value: object, count_max: int, nbytes_max: int) -> None:
    assert isinstance(value, list), f"{name} is decoded as a list"
    _check_count(name, len(value), count_max)
    nbytes = sum(map(len, value))
    if nbytes > nbytes_max:
        raise ProtocolError(f"{name}: {nbytes} bytes; at most {nbytes_max} are allowed")


def _check_sampling(name: str, value: object) -> None:
    """Ranges outside which drawing a token would fail or never end; see `SamplingParams`."""
    if value is None:
        return
    assert isinstance(value, SamplingParams), f"{name} is decoded as SamplingParams"
    check_int(f"{name}.seed", value.seed, -(2**63), INT64_MAX)
    check_int(f"{name}.max_new_tokens", value.max_new_tokens, 0, INT32_MAX)
    check_int(f"{name}.min_new_tokens", value.min_new_tokens, 0, INT32_MAX)
    check_int(f"{name}.top_k", value.top_k, -1, INT32_MAX)
    check_int(f"{name}.top_logprobs_num", value.top_logprobs_num, 0, INT32_MAX)
    check_int(f"{name}.logprob_start_len", value.logprob_start_len, -1, TOKEN_COUNT_MAX)
    for field, number, low, high in (
        ("temperature", value.temperature, 0.0, math.inf),
        ("top_p", value.top_p, 0.0, 1.0),
        ("min_p", value.min_p, 0.0, 1.0),
        ("repetition_penalty", value.repetition_penalty, 0.0, math.inf),
        ("presence_penalty", value.presence_penalty, -math.inf, math.inf),
        ("frequency_penalty", value.frequency_penalty, -math.inf, math.inf),
    ):
        if not (math.isfinite(number) and low <= number <= high):
            raise ProtocolError(f"{name}.{field}={number}: must be finite and in {low}..{high}")
    if value.repetition_penalty == 0.0:
        raise ProtocolError(f"{name}.repetition_penalty=0.0: must be above 0")
    for field, ids in (
        ("stop_token_ids", list(value.stop_token_ids)),
        ("token_ids_logprob", list(value.token_ids_logprob)),
        ("logit_bias", list(value.logit_bias)),
    ):
        _check_ints(f"{name}.{field}", ids, 0, INT32_MAX, TEXT_COUNT_MAX)
    for token_id, bias in value.logit_bias.items():
        if not math.isfinite(bias):
            raise ProtocolError(f"{name}.logit_bias[{token_id}]={bias}: must be finite")
    if value.grammar is not None:
        _check_text(f"{name}.grammar", value.grammar.text, GRAMMAR_LENGTH_MAX)


def _check_origin(name: str, value: object) -> None:
    assert isinstance(value, Origin), f"{name} is decoded as Origin"
    _check_text(f"{name}.rid", value.rid, RID_LENGTH_MAX)
    if value.trace_parent and not _TRACE_PARENT.fullmatch(value.trace_parent):
        raise ProtocolError(f"{name}.trace_parent: must be a W3C traceparent of version 00")


def _check_trace(name: str, value: object) -> None:
    assert isinstance(value, HandOverTrace), f"{name} is decoded as HandOverTrace"
    _check_count(f"{name}.chunk_ends_s", len(value.chunk_ends_s), CHUNK_MARK_COUNT_MAX)
    for seconds in value.chunk_ends_s:
        _check_by_type(f"{name}.chunk_ends_s", seconds)
    _check_by_type(name, value)


_FIELD_CHECKS: dict[str, Callable[[str, object], None]] = {
    "role": _check_name,
    "kind": _check_name,
    "host_id": _check_name,
    "incarnation": _check_incarnation,
    "peer_incarnation": _check_incarnation,
    "version": lambda name, value: check_int(name, value, 0, INT32_MAX),
    "version_min": lambda name, value: check_int(name, value, 0, INT32_MAX),
    "version_max": lambda name, value: check_int(name, value, 0, INT32_MAX),
    "status": lambda name, value: check_int(name, value, 400, 599),
    "token_count": lambda name, value: check_int(name, value, 1, TOKEN_COUNT_MAX),
    "prompt_count": lambda name, value: check_int(name, value, 0, TOKEN_COUNT_MAX),
    "first_token": lambda name, value: check_int(name, value, 0, INT32_MAX),
    "budget_ms": lambda name, value: check_int(name, value, 0, BUDGET_MS_MAX),
    "token_ids": lambda name, value: _check_ints(name, value, 0, INT32_MAX, TOKEN_COUNT_MAX),
    "writers": lambda name, value: _check_ints(name, value, 0, RANK_COUNT_MAX - 1, RANK_COUNT_MAX),
    "pids": lambda name, value: _check_ints(name, value, 1, INT32_MAX, RANK_COUNT_MAX),
    "origin": _check_origin,
    "trace": _check_trace,
    "differences": _check_texts,
    "transports": _check_texts,
    "pages": _check_pages,
    "digests": lambda name, value: _check_blobs(name, value, RANK_COUNT_MAX, DIGESTS_NBYTES_MAX),
    "prompt_logprobs": lambda name, value: _check_blobs(
        name, value, TOKEN_COUNT_MAX, PROMPT_LOGPROBS_NBYTES_MAX
    ),
    "ranks": _check_ranks,
    "sampling": _check_sampling,
}
