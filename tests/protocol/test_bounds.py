"""What a peer may claim, field by field."""

from __future__ import annotations

import math
from typing import get_args

import msgspec
import pytest

from common.errors import ProtocolError
from common.protocol import peer
from common.protocol.bounds import check_peer_message
from common.protocol.sampling_bounds import SAMPLING_CHECKS
from common.request import Grammar, GrammarKind, Origin, SamplingParams, TransferTrace
from tests.protocol.examples import DECODE_TO_PREFILL, DESCRIPTOR, PREFILL_TO_DECODE, SAMPLING

TRACED = f"00-{1:032x}-{2:016x}-01"

BY_TYPE: dict[type, peer.DecodeToPrefill | peer.PrefillToDecode] = {
    type(message): message for message in (*DECODE_TO_PREFILL, *PREFILL_TO_DECODE)
}


def changed(
    example: type, fields: dict[str, object]
) -> peer.DecodeToPrefill | peer.PrefillToDecode:
    return msgspec.structs.replace(BY_TYPE[example], **fields)


@pytest.mark.parametrize("message", [*DECODE_TO_PREFILL, *PREFILL_TO_DECODE])
def test_an_honest_message_passes(message: peer.DecodeToPrefill | peer.PrefillToDecode) -> None:
    check_peer_message(message)


def test_every_kind_of_message_has_an_example() -> None:
    assert set(BY_TYPE) == {*get_args(peer.DecodeToPrefill), *get_args(peer.PrefillToDecode)}


@pytest.mark.parametrize(
    ("kind", "fields", "complaint"),
    [
        (peer.Hello, {"version_min": -1}, r"Hello.version_min=-1: must be in 0\.\."),
        (peer.Hello, {"version_max": 2**40}, "Hello.version_max="),
        (peer.Hello, {"role": "d\n"}, r"Hello.role='d\\n': must be printable"),
        (peer.Hello, {"incarnation": ""}, "Hello.incarnation='': must not be empty"),
        (peer.Hello, {"incarnation": "x" * 129}, "129 characters; at most 128"),
        (peer.Hello, {"incarnation": "a\x1b[2J"}, "must be printable"),
        (peer.Hello, {"fingerprint": {str(i): "" for i in range(1025)}}, "1025 entries"),
        (peer.Hello, {"fingerprint": {"k": "v" * 8193}}, r"fingerprint\['k'\]: 8193 characters"),
        (peer.Hello, {"fingerprint": {"k" * 8193: "v"}}, "fingerprint key: 8193 characters"),
        (peer.Welcome, {"version": -1}, "Welcome.version=-1"),
        (peer.Welcome, {"request_token_max": -1}, "Welcome.request_token_max=-1"),
        (peer.Welcome, {"request_token_max": 2**63}, "Welcome.request_token_max="),
        (peer.Welcome, {"host_ids": ["\n"]}, "must be printable"),
        (peer.Welcome, {"pids": [0]}, r"smallest of Welcome.pids=0: must be in 1\.\."),
        (peer.Welcome, {"pids": [-5, 7]}, "smallest of Welcome.pids=-5"),
        (peer.Welcome, {"pids": [1, 2**31]}, "largest of Welcome.pids="),
        (peer.Welcome, {"pids": [1] * 1025}, "1025 entries; at most 1024"),
        (peer.TransferDone, {"digests": [b""] * 1025}, "1025 entries; at most 1024"),
        (peer.TransferDone, {"digests": [bytes(5 << 20)] * 2}, "10485760 bytes; at most"),
        (peer.Refuse, {"differences": ["x"] * 1025}, "1025 entries; at most 1024"),
        (peer.Refuse, {"differences": ["x" * 8193]}, "8193 characters"),
        (peer.Attach, {"ranks": [DESCRIPTOR, DESCRIPTOR]}, "rank 1 is described twice"),
        (peer.Attached, {"transports": ["x" * 8193]}, "8193 characters"),
        (peer.Detached, {"reason": "x" * 8193}, "8193 characters"),
        (peer.Welcome, {"credits": -1}, "Welcome.credits=-1"),
        (peer.Heartbeat, {"credits": -1}, r"Heartbeat.credits=-1: must be in 0\.\."),
        (peer.Heartbeat, {"credits": 2**63}, "Heartbeat.credits="),
        (peer.Heartbeat, {"progress": -1}, "Heartbeat.progress=-1"),
        (peer.Heartbeat, {"queued_token_count": 2**64 - 1}, "Heartbeat.queued_token_count="),
        (peer.TransferRequest, {"transfer_id": -1}, "transfer_id=-1"),
        (peer.TransferRequest, {"transfer_id": 2**63}, "transfer_id="),
        (peer.TransferRequest, {"token_count": 0}, r"token_count=0: must be in 1\.\."),
        (peer.TransferRequest, {"token_count": 2**24 + 1}, "token_count="),
        (peer.TransferRequest, {"budget_ms": -1}, "budget_ms=-1"),
        (peer.TransferRequest, {"budget_ms": 2**60}, "budget_ms="),
        (peer.TransferRequest, {"writers": [-1]}, "smallest of TransferRequest.writers=-1"),
        (peer.TransferRequest, {"writers": [0, 1024]}, "largest of TransferRequest.writers=1024"),
        (peer.TransferRequest, {"writers": [0] * 1025}, "1025 entries"),
        (peer.TransferRequest, {"origin": Origin("x" * 262)}, "262 characters; at most 261"),
        (peer.TransferRequest, {"origin": Origin("r", "00-12-34-01")}, "must be a W3C traceparent"),
        (peer.TransferRequest, {"origin": Origin("r", TRACED + "0")}, "must be a W3C traceparent"),
        (peer.TransferDone, {"trace": TransferTrace(chunk_ends_s=[0.1] * 65)}, "65 entries; at"),
        (peer.TransferDone, {"trace": TransferTrace(chunk_ends_s=[math.nan])}, "must be finite"),
        (peer.TransferRequest, {"room": -1}, "room=-1"),
        (peer.TransferRequest, {"room": 2**63}, "room="),
        (peer.TransferRequest, {"token_ids": [3, -1]}, "smallest of TransferRequest.token_ids=-1"),
        (peer.TransferRequest, {"token_ids": [1, 2**31]}, "largest of TransferRequest.token_ids="),
        (peer.TransferRequest, {"prompt_count": -1}, "prompt_count=-1"),
        (peer.TransferRequest, {"pages": [(0, [1])] * 65}, "65 entries; at most 64"),
        (peer.TransferRequest, {"pages": [(-1, [1])]}, r"pages\[0\] first index=-1"),
        (peer.TransferRequest, {"pages": [(0, [1]), (2**31, [1])]}, r"pages\[1\] first index="),
        (peer.TransferRequest, {"pages": [(0, [1, -2])]}, r"smallest of .*pages\[0\] page ids=-2"),
        (peer.TransferRequest, {"pages": [(0, [1, 2**40])]}, r"largest of .*pages\[0\] page ids="),
        (peer.TransferDone, {"first_token": -1}, "first_token=-1"),
        (peer.TransferFailed, {"status": 200}, r"status=200: must be in 400\.\.599"),
        (peer.TransferFailed, {"kind": "k" * 129}, "129 characters"),
        (peer.Abort, {"peer_incarnation": ""}, "must not be empty"),
        (peer.Quiesced, {"transfer_id": -7}, "Quiesced.transfer_id=-7"),
    ],
)
def test_a_claim_out_of_bounds_is_refused_by_name(
    kind: type, fields: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        check_peer_message(changed(kind, fields))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"rank": -1}, "rank=-1"),
        ({"rank": 1024}, "rank=1024"),
        ({"worker_address": bytes(1 << 17)}, "131072 bytes; at most 65536"),
        ({"regions": [("r", 0, 0, b"")] * 65}, "65 entries; at most 64"),
        ({"regions": [("r\n", 0, 0, b"")]}, "must be printable"),
        ({"regions": [("r", -1, 0, b"")]}, "region 'r' address=-1"),
        ({"regions": [("r", 0, -1, b"")]}, "region 'r' nbytes=-1"),
        ({"regions": [("r", 2**64 - 4, 5, b"")]}, "wraps around the address space"),
        ({"regions": [("r", 0, 5, bytes(1 << 17))]}, "131072 bytes; at most 65536"),
        ({"probe": ("p", 0, 2**63, b"")}, "region 'p' nbytes="),
    ],
)
def test_a_description_of_a_rank_out_of_bounds_is_refused(
    fields: dict[str, object], complaint: str
) -> None:
    descriptor = msgspec.structs.replace(DESCRIPTOR, **fields)
    with pytest.raises(ProtocolError, match=complaint):
        check_peer_message(changed(peer.Attach, {"ranks": [descriptor]}))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"seed": 2**63}, "seed="),
        ({"seed": -1}, "seed=-1"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1"),
        ({"max_new_tokens": 2**24 + 1}, "max_new_tokens="),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_k": 0}, r"top_k=0: must be in 1\.\."),
        ({"top_logprobs_num": -1}, "top_logprobs_num=-1"),
        ({"top_logprobs_num": 129}, "top_logprobs_num=129"),
        ({"logprob_start_len": -2}, "logprob_start_len=-2"),
        ({"temperature": math.nan}, r"temperature=nan: must be a finite number in \[0"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": 1e300}, r"temperature=1e\+300"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0.0: .* in \(0, 2\]"),
        ({"repetition_penalty": 2.1}, "repetition_penalty=2.1"),
        ({"repetition_penalty": -1.0}, "repetition_penalty=-1.0"),
        ({"presence_penalty": math.nan}, "presence_penalty=nan"),
        ({"frequency_penalty": -math.inf}, "frequency_penalty=-inf"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias=-1"),
        ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\]=nan"),
        ({"logit_bias": {1: 1e39}}, r"logit_bias\[1\]=1e\+39"),
        ({"logit_bias": dict.fromkeys(range(4097), 0.0)}, "4097 entries; at most 4096"),
        ({"grammar": Grammar(GrammarKind.REGEX, "a" * 65537)}, "grammar: 65537 characters"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids=-1"),
        ({"stop_token_ids": tuple(range(1025))}, "1025 entries"),
        ({"token_ids_logprob": (2**31,)}, "token_ids_logprob="),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids=-1"),
        ({"allowed_token_ids": tuple(range(2**18 + 1))}, "262145 entries"),
        ({"bad_words": ((1, 2), (-1,))}, "bad_words=-1"),
        ({"bad_words": ((),)}, "bad_words: a word without tokens"),
        ({"bad_words": ((1,),) * 1025}, "1025 entries"),
        ({"bad_words": ((1,) * 65,)}, "65 entries; at most 64"),
    ],
)
def test_sampling_that_would_fail_or_never_end_is_refused(
    fields: dict[str, object], complaint: str
) -> None:
    sampling = msgspec.structs.replace(SAMPLING, **fields)
    with pytest.raises(ProtocolError, match=complaint):
        check_peer_message(changed(peer.TransferRequest, {"sampling": sampling}))


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_a_trace_with_times_that_are_no_numbers_is_refused(seconds: float) -> None:
    done = BY_TYPE[peer.TransferDone]
    assert isinstance(done, peer.TransferDone)
    trace = msgspec.structs.replace(done.trace, wire_s=seconds)
    with pytest.raises(ProtocolError, match=r"trace\.wire_s"):
        check_peer_message(changed(peer.TransferDone, {"trace": trace}))


def test_every_option_of_sampling_has_a_check() -> None:
    assert set(SAMPLING_CHECKS) == set(SamplingParams.__struct_fields__)


def test_a_long_honest_prompt_passes() -> None:
    check_peer_message(changed(peer.TransferRequest, {"token_ids": [7] * 1_000_000}))
