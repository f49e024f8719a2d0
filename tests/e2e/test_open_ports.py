"""What real servers listen on in every mode, and that strangers there change nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.fleet import Body, Fleet, Node
from tests.e2e.test_keys import curve
from tests.transport.put_anywhere import PAYLOAD, listening, put_anywhere, say

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

LOOPBACK = "127.0.0.1"
TRANSFER_PORTS = range(41000, 41100)
# What a decode rank is written through, beside the port that staged transfers are announced on.
DATA_PORT_COUNT = {"auto": 1, "shm": 0, "stream": 1, "stream with keys": 1}
CARRIED_BY = {"auto": "posix", "shm": "posix", "stream": "stream", "stream with keys": "stream"}
NOISE_SIZES = (1, 8, 56, 64, 4096, 1 << 16)
QUESTION: Body = {
    "text": "The capital of France is",
    "sampling_params": {"max_new_tokens": 6, "temperature": 0},
}


@dataclass
class Mode:
    name: str
    prefill: Node
    decode: Node
    answer: str


@pytest.fixture(
    params=[
        *("auto", "stream with keys"),
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("shm", "stream")),
    ],
    scope="module",
)
def mode(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mode]:
    """A pair that has handed something over."""
    name = str(request.param)
    directory = tmp_path_factory.mktemp("logs")
    flags = ["--transport", name.split()[0]]
    flags += ["--transfer-ports", f"{TRANSFER_PORTS.start}-{TRANSFER_PORTS.stop - 1}"]
    has_keys = name.endswith("keys")
    with Fleet(directory) as fleet:
        keys = curve(directory, "prefill", d0="decode") if has_keys else []
        prefill = fleet.prefill(*flags, *keys, "--disable-radix-cache")
        keys = curve(directory, "decode", **{prefill.bootstrap: "prefill"}) if has_keys else []
        decode = fleet.decode([prefill], *flags, *keys)
        fleet.wait_ready()
        yield Mode(name, prefill, decode, decode.generate(QUESTION).text)


def places(node: Node) -> set[tuple[str, int]]:
    return {place for pid in node.process_ids() for place in listening(pid)}


def heap_of(pid: int) -> int:
    """The start of a process's heap."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            return int(line.partition("-")[0], 16)
    raise AssertionError(f"process {pid} has no heap")


def test_a_server_listens_on_what_its_mode_needs_and_nothing_else(mode: Mode) -> None:
    prefill, decode = mode.prefill, mode.decode
    assert places(prefill) == {(LOOPBACK, prefill.port), (LOOPBACK, prefill.bootstrap_port)}
    found = places(decode) - {(LOOPBACK, decode.port)}
    assert {host for host, _ in found} == {LOOPBACK}
    assert all(port in TRANSFER_PORTS for _, port in found)
    assert len(found) == DATA_PORT_COUNT[mode.name] + 1


def test_caches_travel_as_the_mode_says(mode: Mode) -> None:
    (peer,) = mode.decode.info().peers
    assert peer.transports == [CARRIED_BY[mode.name]]
    (worker,) = mode.decode.get("/server_info").json()["workers"]
    if mode.name != "shm":
        is_encrypted = mode.name == "stream with keys"
        assert worker["stream"] == ("TLS 1.3" if is_encrypted else "not encrypted")
    assert mode.decode.generate(QUESTION).timeline.transfer.nbytes > 0


def test_strangers_change_nothing_at_any_port(mode: Mode) -> None:
    rng = random.Random(3)
    for node in (mode.prefill, mode.decode):
        worker = node.process_id_of("common.worker")
        heap = heap_of(worker)
        for place in places(node):
            put_anywhere(place, heap + 0x800)
            put_anywhere(place, 0x10)
            for size in NOISE_SIZES:
                say(place, rng.randbytes(size))
        with Path(f"/proc/{worker}/mem").open("rb") as memory:
            memory.seek(heap + 0x800)
            assert memory.read(len(PAYLOAD)) != PAYLOAD
    assert mode.decode.generate(QUESTION).text == mode.answer
    assert mode.prefill.get("/health").status_code == 200
    assert mode.decode.get("/health").status_code == 200


def test_what_is_open_to_all_is_said_at_the_start(fleet: Fleet) -> None:
    """UCX's tcp is there for networks where everybody is trusted, and says what it means."""
    flags = ("--transport", "ucx-tcp", "--net-devices", "lo")
    ports = ("--transfer-ports", f"{TRANSFER_PORTS.start}-{TRANSFER_PORTS.stop - 1}")
    prefill = fleet.prefill(*flags, *ports)
    decode = fleet.decode([prefill], *flags, *ports)
    fleet.wait_ready()
    assert decode.generate(QUESTION).timeline.transfer.nbytes > 0
    for node in (prefill, decode):
        assert "every process that reaches those ports can write anywhere" in node.log
        assert any(port in TRANSFER_PORTS for _, port in places(node))
        assert {host for host, _ in places(node)} == {LOOPBACK}
