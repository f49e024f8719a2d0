"""Nothing that a client can send costs more than its own request: every field of every body at its
largest value goes through a real pair; and a link that says nonsense all the same comes back."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass

import httpx
import pytest

from common.protocol.peer import TransferFailed
from common.runtime.peer_endpoint import MALFORMED_COUNT_MAX
from tests.e2e.fleet import CHECKPOINT, Body, Fleet, Node, error_message, reply_of, wait_until
from tests.e2e.raw_decode import RawDecode
from tests.e2e.wire import Wire
from tests.frontend.largest import OUTPUT_COUNT, PATHS, Case, Server, cases
from tests.protocol.test_codec import changed_bytes

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

FLAGS = ("--dtype", "float32")
VOCAB_SIZE = 1280
TOKEN_MAX = 2048  # of a request
LAYER_COUNT = 3
PAGE_SIZE = 16
# Why a decode server refuses what it knows how to read.
REFUSED = {
    "kv_transfer_params.do_remote_decode": "this is a decode server",
    "require_reasoning": "--reasoning-parser names no format",
}
BODY: Body = {"text": "Facts:", "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
TROUBLES = ("malformed", "dropped a message", "has failed", "left alone")


@dataclass
class Pair:
    prefill: Node
    decode: Node


@pytest.fixture(scope="module")
def started(fleet: Fleet) -> Pair:
    prefill = fleet.prefill(*FLAGS)
    decode = fleet.decode([prefill], *FLAGS)
    fleet.wait_ready()
    return Pair(prefill, decode)


@pytest.fixture
def pair(started: Pair) -> Iterator[Pair]:
    """At rest after each test, and without trouble between the two."""
    yield started
    for node in (started.prefill, started.decode):
        node.wait_at_rest()
        assert not [trouble for trouble in TROUBLES if trouble in node.log], node.log


def send(fleet: Fleet, pair: Pair, case: Case) -> httpx.Response:
    """As a client does, or as a router does to both servers."""
    other: Future[httpx.Response] | None = None
    if "bootstrap_room" in case.body:
        other = fleet.threads.submit(pair.prefill.post, case.path, case.body)
    reply = pair.decode.post(case.path, case.body)
    if other is not None:
        assert other.result().status_code == reply.status_code, other.result().text
    return reply


@pytest.mark.parametrize(
    "path", [PATHS[0], *(pytest.param(path, marks=pytest.mark.soak) for path in PATHS[1:])]
)
def test_every_field_at_its_largest_value_passes_a_pair(
    fleet: Fleet, pair: Pair, path: str
) -> None:
    server = Server(VOCAB_SIZE, TOKEN_MAX - OUTPUT_COUNT, port=pair.prefill.bootstrap_port)
    problems: list[str] = []
    for case in cases(path, server):
        reply = send(fleet, pair, case)
        if case.field in REFUSED:
            assert reply.status_code == 400 and REFUSED[case.field] in error_message(reply)
        elif reply.status_code != 200 or '"error":{' in reply.text or '"abort"' in reply.text:
            problems.append(f"{case.field}: {reply.status_code} {reply.text[:300]}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": f"00-{'f' * 32}-{'f' * 16}-ff"},
        {"traceparent": f"00-{'F' * 32}-{'f' * 16}-01"},
        {"traceparent": f"ff-{'f' * 32}-{'f' * 16}-01-{'x' * 4096}"},
        {"x-request-id": "~" * 128},
        {"x-request-id": "x" * 4096},
    ],
    ids=str,
)
def test_headers_that_name_a_request_pass_a_pair(
    fleet: Fleet, pair: Pair, headers: dict[str, str]
) -> None:
    url = f"{pair.decode.url}/generate"
    assert fleet.client.post(url, json=BODY, headers=headers).status_code == 200


def test_a_grammar_that_can_not_be_followed_is_its_clients_fault(pair: Pair) -> None:
    """A prefill server that failed three transfers in a row would be left alone."""
    # Whatever digit comes first leaves too many of them open; 0 alone would be followed by the end.
    alternatives = " | ".join(f'"{index}"' for index in range(1, 1025))
    body: Body = {"prompt": "Facts:", "max_tokens": 9, "guided_grammar": f"start: {alternatives}"}
    for _ in range(5):
        reply = pair.decode.post("/v1/completions", body)
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "no_token", reply.text
        assert "grammar" in error_message(reply)


def test_a_reservation_that_can_not_be_read_is_answered_at_once(started: Pair) -> None:
    prefill = started.prefill
    with RawDecode(prefill, CHECKPOINT, LAYER_COUNT, PAGE_SIZE) as raw:
        request = raw.reserve(7, raw.layout, [5, 6, 7])
        raw.say_bytes(changed_bytes(request, {"sampling": {"max_new_tokens": 1, "seed": "new"}}))
        failed = raw.wait_for(TransferFailed)
        assert (failed.transfer_id, failed.kind, failed.status) == (7, "bad_reservation", 400)
        assert "seed" in failed.message


# ---- nonsense ------------------------------------------------------------------------------------

GREETING_NBYTES = 64
IS_LONG = 0x02
NONSENSE = b"\x00\x01\xc1"  # a ZMTP frame of one byte, which is no msgpack


class Frames:
    """One direction of a ZMTP connection, so that something can be put between two frames."""

    def __init__(self) -> None:
        self._greeting_nbytes_left = GREETING_NBYTES
        self._rest = b""

    def take(self, data: bytes) -> tuple[bytes, bool]:
        """What is whole by now, and whether that ends with a frame and not within the greeting."""
        self._rest += data
        whole = min(len(self._rest), self._greeting_nbytes_left)
        self._greeting_nbytes_left -= whole
        has_frames = False
        while not self._greeting_nbytes_left:
            size_nbytes = 8 if self._rest[whole : whole + 1] and self._is_long(whole) else 1
            head = whole + 1 + size_nbytes
            end = head + int.from_bytes(self._rest[whole + 1 : head], "big")
            if head > len(self._rest) or end > len(self._rest):
                break
            whole, has_frames = end, True
        taken, self._rest = self._rest[:whole], self._rest[whole:]
        return taken, has_frames

    def _is_long(self, at: int) -> bool:
        return bool(self._rest[at] & IS_LONG)


class NonsenseWire(Wire):
    """Puts so many messages that can't be read behind the frames of one side.

    is_dialler: whether behind the decode server's.
    """

    def __init__(self, target: int) -> None:
        self.nonsense_count = 0
        self.is_dialler = True
        self._frames: dict[socket.socket, Frames] = {}
        super().__init__(target)

    def alter(self, source: socket.socket, data: bytes, *, is_dialler: bool) -> bytes | None:
        whole, has_frames = self._frames.setdefault(source, Frames()).take(data)
        if not has_frames or is_dialler is not self.is_dialler:
            return whole
        count, self.nonsense_count = self.nonsense_count, 0
        return whole + count * NONSENSE


@pytest.mark.parametrize("is_dialler", [True, False], ids=["decode", "prefill"])
def test_a_pair_survives_nonsense_on_its_link(
    fleet: Fleet, started: Pair, is_dialler: bool
) -> None:
    """Whose words they seem to be, that server is given up, dialled anew and used again."""
    with closing(NonsenseWire(started.prefill.bootstrap_port)) as wire:
        decode = fleet.decode([], *FLAGS, "--prefill", f"127.0.0.1:{wire.port}", name="wired")
        decode.wait_ready()
        expected = decode.generate(BODY).output_ids
        hearer = started.prefill if is_dialler else decode
        wire.is_dialler, wire.nonsense_count = is_dialler, MALFORMED_COUNT_MAX
        wait_until("the link to be dropped", lambda: "is dropped" in hearer.log)
        assert reply_of(fleet.in_background(decode, BODY).result()).output_ids == expected
        assert decode.info().counters["peers_lost"] >= 1
        decode.terminate()
        fleet.nodes.remove(decode)
