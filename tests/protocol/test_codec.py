"""Messages survive the wire; whatever else comes over it is a ProtocolError."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ProtocolError
from common.layout.cache_layout import ServerLayout
from common.protocol import bounds, codec, frontend, peer, staging, worker
from common.protocol.codec import decode_logprobs, encode_logprobs
from common.request import TokenLogprobs
from tests.protocol import examples

Decode = Callable[[bytes], object]
Message = codec.LocalMessage | codec.PeerMessage | staging.StagingMessage

Direction = tuple[Decode, object, Sequence[Message]]
DIRECTIONS: list[Direction] = [
    (
        codec.decode_frontend_to_scheduler,
        frontend.FrontendToScheduler,
        examples.FRONTEND_TO_SCHEDULER,
    ),
    (
        codec.decode_scheduler_to_frontend,
        frontend.SchedulerToFrontend,
        examples.SCHEDULER_TO_FRONTEND,
    ),
    (codec.decode_scheduler_to_worker, worker.SchedulerToWorker, examples.SCHEDULER_TO_WORKER),
    (codec.decode_worker_to_scheduler, worker.WorkerToScheduler, examples.WORKER_TO_SCHEDULER),
    (
        codec.decode_peer_message,
        peer.PeerMessage,
        [*examples.DECODE_TO_PREFILL, *examples.PREFILL_TO_DECODE],
    ),
    (codec.decode_slot_filled, staging.SlotFilled, examples.SLOT_FILLED),
    (codec.decode_slot_freed, staging.SlotFreed, examples.SLOT_FREED),
]
DECODERS: list[Decode] = [decode for decode, _, _ in DIRECTIONS] + [codec.decode_layout]
PAYLOADS: list[tuple[Decode, bytes]] = [
    (decode, codec.encode(message)) for decode, _, messages in DIRECTIONS for message in messages
] + [(codec.decode_layout, codec.encode_layout(examples.LAYOUT))]

FUZZ = settings(
    max_examples=500,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def kinds(union: object) -> set[object]:
    """The members of a union; a direction with one message is that message."""
    return set(get_args(union)) or {union}


def decode_or_refuse(decode: Decode, payload: bytes) -> None:
    """Any other exception than ProtocolError fails the test."""
    try:
        decode(payload)
    except ProtocolError as error:
        assert str(error)


@pytest.mark.parametrize(("decode", "union", "messages"), DIRECTIONS)
def test_every_message_of_a_direction_comes_back_equal(
    decode: Decode, union: object, messages: Sequence[Message]
) -> None:
    assert {type(message) for message in messages} == kinds(union), "one example of each"
    for message in messages:
        assert decode(codec.encode(message)) == message


@pytest.mark.parametrize(
    "message", [message for _, _, messages in DIRECTIONS for message in messages]
)
def test_examples_leave_no_field_at_its_default(message: msgspec.Struct) -> None:
    """So that coming back equal says something about every field."""
    for field in msgspec.structs.fields(message):
        value = msgspec.structs.asdict(message)[field.name]
        if field.default is not msgspec.NODEFAULT:
            assert value != field.default, field.name
        if field.default_factory is not msgspec.NODEFAULT:
            assert value != field.default_factory(), field.name


@pytest.mark.parametrize(("decode", "union", "messages"), DIRECTIONS)
def test_a_message_of_another_direction_is_refused(
    decode: Decode, union: object, messages: Sequence[Message]
) -> None:
    for _, _, others in DIRECTIONS:
        for message in others:
            if type(message) not in kinds(union):
                with pytest.raises(ProtocolError, match="can't be read"):
                    decode(codec.encode(message))


def test_a_message_with_a_field_of_a_later_version_is_read() -> None:
    plain = msgspec.msgpack.decode(codec.encode(peer.Quiesced(1, "inc")))
    plain["added_later"] = [1, {"a": 2}]

    payload = msgspec.msgpack.encode(plain)
    assert codec.decode_peer_message(payload) == peer.Quiesced(1, "inc")


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\xc0",
        b"\x90",
        b"\xff" * 100,
        b"\x81" * 100_000,  # nesting
        b"\x91" * 100_000,
        b"\x81\xa1x" + b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",  # four billion entries, says the header
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xffx",
        b"\x82\xa4type\xa6Submit\xa9token_ids\xdd\xff\xff\xff\xff\x01",
        b"\x81\xa4type\xa6\xff\xfe\xfd\xfc\xfb\xfa",  # not UTF-8
        b"\x81\x91\x01\x02",  # a key that can't be hashed
        b"cos\nsystem\n(S'true'\ntR.",  # a pickle
        b'{"type": "GetState", "call_id": 1}',
    ],
)
def test_what_is_no_message_is_refused(decode: Decode, payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="can't be read"):
        decode(payload)


@pytest.mark.parametrize(("decode", "payload"), PAYLOADS)
def test_a_message_cut_short_or_continued_is_refused(decode: Decode, payload: bytes) -> None:
    for length in range(len(payload)):
        with pytest.raises(ProtocolError):
            decode(payload[:length])
    with pytest.raises(ProtocolError, match="trailing"):
        decode(payload + b"\x00")


@FUZZ
@given(st.sampled_from(DECODERS), st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(decode: Decode, payload: bytes) -> None:
    decode_or_refuse(decode, payload)


@FUZZ
@given(
    st.sampled_from(PAYLOADS),
    st.lists(st.tuples(st.integers(0, 10_000), st.binary(min_size=1, max_size=4)), max_size=4),
)
def test_mutated_bytes_never_raise_anything_else(
    valid: tuple[Decode, bytes], changes: list[tuple[int, bytes]]
) -> None:
    decode, payload = valid
    mutated = bytearray(payload)
    for position, change in changes:
        start = position % len(payload)
        mutated[start : start + len(change)] = change
    decode_or_refuse(decode, bytes(mutated))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


def replace_at(value: object, path: list[int], new: object) -> object:
    """`value` with one thing inside it replaced; the path picks an entry at every level."""
    if not path:
        return new
    step, rest = path[0], path[1:]
    if isinstance(value, dict) and value:
        key = list(value)[step % len(value)]
        return {**value, key: replace_at(value[key], rest, new)}
    if isinstance(value, list) and value:
        index = step % len(value)
        return [*value[:index], replace_at(value[index], rest, new), *value[index + 1 :]]
    return new


@settings(parent=FUZZ, max_examples=600)
@given(st.sampled_from(PAYLOADS), st.lists(st.integers(0, 40), min_size=1, max_size=6), VALUES)
def test_mutated_values_never_raise_anything_else(
    valid: tuple[Decode, bytes], path: list[int], new: object
) -> None:
    decode, payload = valid
    plain = msgspec.msgpack.decode(payload)
    decode_or_refuse(decode, msgspec.msgpack.encode(replace_at(plain, path, new)))


def test_a_message_that_its_receiver_refuses_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match=r"Heartbeat\.progress=-1: must be in 0"):
        codec.encode(peer.Heartbeat("inc", 1, -1, is_busy=False))


@pytest.mark.parametrize(
    "message",
    [frontend.Cancel(2**64), peer.Abort(1, "d", "p", "\ud800"), frontend.Cancel(1, "\ud800")],
)
def test_what_has_no_encoding_is_not_sent(message: codec.LocalMessage | codec.PeerMessage) -> None:
    with pytest.raises(ProtocolError, match=type(message).__name__):
        codec.encode(message)


LONG = "x" * (2 * bounds.TEXT_LENGTH_MAX)


@pytest.mark.parametrize(
    "message",
    [
        peer.Abort(1, "d", "p", LONG),
        peer.Withdraw(1, "d", LONG),
        peer.Detached("d", "p", LONG),
        peer.Heartbeat("d", 1, 1, False, trouble=LONG),
        peer.TransferFailed(1, "d", "transfer_failed", LONG, 500, True),
        peer.Refuse("p", [LONG] * (2 * bounds.TEXT_COUNT_MAX)),
        peer.Attached("p", "d", [LONG]),
    ],
)
def test_what_people_read_is_cut_to_what_a_peer_takes(message: codec.PeerMessage) -> None:
    payload = codec.encode(message)
    heard = codec.decode_peer_message(payload)
    assert type(heard) is type(message)
    assert "x" * 8000 in str(heard) and "..." in str(heard)


def test_a_message_too_large_for_its_receiver_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "PEER_MESSAGE_NBYTES_MAX", 1000)
    monkeypatch.setattr(codec, "LOCAL_MESSAGE_NBYTES_MAX", 2000)

    assert codec.encode(peer.Refuse("inc", ["x" * 900]))
    with pytest.raises(ProtocolError, match=r"Refuse of \d+ bytes: at most 1000"):
        codec.encode(peer.Refuse("inc", ["x" * 1000]))
    assert codec.encode(frontend.Cancel(1, "x" * 1900))
    with pytest.raises(ProtocolError, match=r"Cancel of \d+ bytes: at most 2000"):
        codec.encode(frontend.Cancel(1, "x" * 2000))


def changed_bytes(message: codec.PeerMessage, change: dict[str, object]) -> bytes:
    """A message with other values, whatever its bounds and types."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=dict[str, object])
    return msgspec.msgpack.encode(fields | change)


(REQUEST,) = (m for m in examples.DECODE_TO_PREFILL if isinstance(m, peer.TransferRequest))
(DONE,) = (m for m in examples.PREFILL_TO_DECODE if isinstance(m, peer.TransferDone))
(FAILED,) = (m for m in examples.PREFILL_TO_DECODE if isinstance(m, peer.TransferFailed))


@pytest.mark.parametrize(
    "change",
    [
        {"sampling": {"max_new_tokens": 1, "seed": 0, "temperature": -1.0}},
        {"sampling": {"max_new_tokens": 1, "seed": 0, "grammar": {"kind": "new", "text": "a"}}},
        {"pages": "all", "later": {"a": [1, 2]}},
        {"budget_ms": 2**63},
    ],
)
def test_an_unreadable_reservation_says_which_it_is(change: dict[str, object]) -> None:
    payload = changed_bytes(REQUEST, change)
    with pytest.raises(ProtocolError):
        codec.decode_peer_message(payload)
    unread = codec.find_unread(payload)
    assert unread == codec.UnreadTransfer(REQUEST.transfer_id, REQUEST.incarnation, True)


@pytest.mark.parametrize(
    ("message", "change"),
    [(DONE, {"first_token": -1}), (DONE, {"logprobs": 7}), (FAILED, {"status": 200})],
)
def test_an_unreadable_result_says_whose_it_is(
    message: peer.TransferDone | peer.TransferFailed, change: dict[str, object]
) -> None:
    payload = changed_bytes(message, change)
    with pytest.raises(ProtocolError):
        codec.decode_peer_message(payload)
    unread = codec.find_unread(payload)
    assert unread == codec.UnreadTransfer(message.transfer_id, message.peer_incarnation, False)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x81" * 100_000,
        changed_bytes(REQUEST, {"transfer_id": -1}),
        changed_bytes(REQUEST, {"transfer_id": "5"}),
        changed_bytes(REQUEST, {"incarnation": "a\n"}),
        changed_bytes(REQUEST, {"type": "Request"}),
        codec.encode(REQUEST)[:-1],
        codec.encode(examples.DECODE_TO_PREFILL[0]),
    ],
)
def test_of_anything_else_nothing_is_known(payload: bytes) -> None:
    assert codec.find_unread(payload) is None


@pytest.mark.slow
def test_a_payload_above_the_limit_is_not_looked_at() -> None:
    with pytest.raises(ProtocolError, match="at most 67108864 are allowed"):
        codec.decode_peer_message(bytes(codec.PEER_MESSAGE_NBYTES_MAX + 1))
    with pytest.raises(ProtocolError, match="at most 1048576 are allowed"):
        codec.decode_layout(bytes(codec.LAYOUT_NBYTES_MAX + 1))


def test_a_layout_comes_back_equal() -> None:
    assert codec.decode_layout(codec.encode_layout(examples.LAYOUT)) == examples.LAYOUT


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tp_size": 0}, "layout.tp_size=0: must be in 1..1024"),
        ({"tp_size": 1024}, "layout ranks=2048: must be in 1..1024"),
        ({"tp_size": 3}, "tp_size=3: 4 units of 'head' can neither be divided"),
        ({"page_size": 48}, "page_size=48: must be a power of two"),
        ({"page_size": 0}, "layout.page_size=0"),
        ({"page_size": 512}, "page_size=512: must be a power of two in 1..256"),
        ({"stages": ()}, "at least one component and one stage"),
        ({"components": ()}, "at least one component and one stage"),
        ({"stages": ((0, 4), (5, 6))}, "must be consecutive"),
        ({"stages": ((0, 4), (4, 2000))}, "layout.stages=2000: must be in 0..1024"),
        ({"stages": ((0, 3),)}, "must be ascending in 0..2"),
        ({"stages": ((-1, 3),)}, "layout.stages=-1"),
        ({"stages": tuple((i, i + 1) for i in range(1025))}, "1025 entries"),
        ({"layer_group_count": 0}, "layout.layer_group_count=0"),
        ({"layer_group_count": 10**9}, "layout.layer_group_count=1000000000"),
        ({"components": examples.LAYOUT.components * 20}, "120 entries; at most 64"),
        ({"components": examples.LAYOUT.components * 2}, "layer 0 owns it twice"),
    ],
)
def test_a_layout_that_can_not_be_laid_out_is_refused(
    change: dict[str, object], complaint: str
) -> None:
    payload = msgspec.msgpack.encode(replace_fields(examples.LAYOUT, change))
    with pytest.raises(ProtocolError, match=complaint):
        codec.decode_layout(payload)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": "x" * 129}, "129 characters; at most 128"),
        ({"dtype": "x" * 129}, "129 characters; at most 128"),
        ({"order": "x" * 129}, "129 characters; at most 128"),
        ({"layers": list(range(2000))}, "2000 entries; at most 1024"),
        ({"layers": [1, 1]}, "must be ascending"),
        ({"layers": [-1]}, "must be ascending"),
        ({"segments": []}, "must be at least one"),
        ({"segments": [{"name": "s", "unit_count": 4, "unit_nbytes": 1}] * 2}, "named differently"),
        ({"segments": [{"name": "s", "unit_count": 4, "unit_nbytes": 1}] * 17}, "17 entries"),
        ({"segments": [{"name": "s", "unit_count": 0, "unit_nbytes": 1}]}, "unit_count=0"),
        ({"segments": [{"name": "s", "unit_count": 1 << 20, "unit_nbytes": 1}]}, "unit_count=1048"),
        ({"segments": [{"name": "s", "unit_count": 4, "unit_nbytes": 0}]}, "unit_nbytes=0"),
        ({"segments": [{"name": "s", "unit_count": 4, "unit_nbytes": 1 << 30}]}, "unit_nbytes=107"),
        (
            {"segments": [{"name": "s", "unit_count": 1 << 14, "unit_nbytes": 1 << 24}]},
            "pages of .* bytes: at most 4294967296",
        ),
        ({"live": {"kind": "window", "size": 0, "back": 0}}, "live.size=0: must be in 1.."),
        ({"live": {"kind": "block", "size": 0, "back": 0}}, "live.size=0: must be in 1.."),
        ({"live": {"kind": "tail", "size": 0, "back": 0}}, "live.size=0: must be in 1.."),
        ({"live": {"kind": "tail", "size": 4, "back": -1}}, "live.back=-1"),
        ({"live": {"kind": "full", "size": -1, "back": 0}}, "live.size=-1"),
        ({"live": {"kind": "window", "size": 1 << 40, "back": 0}}, "live.size=1099511627776"),
        ({"live": {"kind": "half", "size": 1, "back": 0}}, "Invalid enum value 'half'"),
        ({"shard": "mirror"}, "Invalid enum value 'mirror'"),
    ],
)
def test_a_component_that_can_not_be_laid_out_is_refused(
    change: dict[str, object], complaint: str
) -> None:
    plain = dataclasses.asdict(examples.LAYOUT)
    plain["components"][0].update(change)
    with pytest.raises(ProtocolError, match=complaint):
        codec.decode_layout(msgspec.msgpack.encode(plain))


def replace_fields(layout: ServerLayout, change: dict[str, object]) -> dict[str, object]:
    return {**dataclasses.asdict(layout), **change}


class _FirstReleaseLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """`TokenLogprobs` as the first release had it."""

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]] = []
    asked: list[tuple[int, float]] = []


def test_log_probabilities_of_releases_with_and_without_ranks_are_read_by_both() -> None:
    ranked = TokenLogprobs(5, -0.5, [(5, -0.5)], [(7, -2.0)], rank=3)
    plain = _FirstReleaseLogprobs(5, -0.5, [(5, -0.5)], [(7, -2.0)])
    told = decode_logprobs(msgspec.msgpack.encode([plain]))
    assert told == [msgspec.structs.replace(ranked, rank=0)]
    payload = encode_logprobs([ranked])
    assert msgspec.msgpack.decode(payload, type=list[_FirstReleaseLogprobs]) == [plain]
