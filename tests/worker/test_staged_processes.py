"""Staged transfers between real worker processes, page sizes, ranks and element types apart."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.channel.peer import PeerDialer
from common.channel.poller import Poller
from common.config import Role, TransferMode
from common.protocol.codec import decode_slot_freed, encode
from common.protocol.descriptor import RankDescriptor
from common.protocol.staging import SlotFilled, SlotFreed
from common.protocol.worker import (
    ClosePeer,
    ConnectPeer,
    Expect,
    Forget,
    Forgotten,
    NewSequence,
    OpenPeer,
    PageGrant,
    PeerClosed,
    PeerConnected,
    PeerFailed,
    PeerOpened,
    PrefillChunk,
    ReclaimPeer,
    SendSettled,
    Step,
    StepDone,
)
from tests.engine.tiny_checkpoints import Reference, random_prompt
from tests.worker.test_worker_processes import (
    DECODE_PAGES,
    GREEDY,
    PREFILL_PAGES,
    Pair,
)
from tests.worker.whole_send import WholeSend
from tests.worker.worker_processes import WorkerProcesses

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

LINK = "127.0.0.1:1"  # where the decode side would have dialled


class StagedPair(Pair):
    """A pair whose decode side expects what is sent, as its scheduler would."""

    transfer_mode = TransferMode.STAGED

    def open(self) -> list[RankDescriptor]:
        layout = self.prefill.ready[0].layout
        self.decode.send(OpenPeer("prefill", layout, LINK, self.transfer_mode))
        opened = [self.decode.expect(PeerOpened) for _ in self.decode.processes]
        return sorted((message.descriptor for message in opened), key=lambda d: d.rank)

    def connect(self) -> list[PeerConnected]:
        layout = self.decode.ready[0].layout
        self.prefill.send(ConnectPeer("decode", layout, self.open(), self.transfer_mode))
        return [self.prefill.expect(PeerConnected) for _ in self.prefill.processes]

    def expect_transfer(self, transfer_id: int, token_count: int, token_start: int = 0) -> None:
        page_size = self.decode.config.page_size
        first = token_start // page_size
        pages = [(first, DECODE_PAGES[first : -(-token_count // page_size)])]
        self.decode.send(Expect(transfer_id, "prefill", token_count, pages, token_start))

    def forget(self, transfer_id: int) -> None:
        self.decode.send(Forget(transfer_id))
        for _ in self.decode.processes:
            assert self.decode.expect(Forgotten).transfer_id == transfer_id


def start(
    checkpoint: Path, prefill_changes: dict[str, object], decode_changes: dict[str, object]
) -> Iterator[StagedPair]:
    with (
        WorkerProcesses(
            checkpoint, Role.PREFILL, max_total_tokens=8192, **prefill_changes
        ) as prefill,
        WorkerProcesses(
            checkpoint,
            Role.DECODE,
            max_total_tokens=8192,
            prefill=(LINK,),
            staging_buffer_mb=4,
            **decode_changes,
        ) as decode,
    ):
        prefill.wait_ready()
        decode.wait_ready()
        yield StagedPair(prefill, decode)


@pytest.mark.parametrize(
    ("transport", "prefill_changes", "decode_changes"),
    [
        pytest.param("shm", {"page_size": 16}, {"page_size": 64}, marks=pytest.mark.soak),
        pytest.param("stream", {"page_size": 16}, {"page_size": 64}, marks=pytest.mark.soak),
        pytest.param("stream", {"page_size": 64}, {"page_size": 8}, marks=pytest.mark.soak),
        pytest.param("shm", {"tp_size": 2, "layer_group_count": 2}, {}, marks=pytest.mark.soak),
    ],
)
def test_a_staged_prompt_continues_as_transformers_would(
    checkpoint: Path,
    oracle: Reference,
    transport: str,
    prefill_changes: dict[str, object],
    decode_changes: dict[str, object],
) -> None:
    prefill_changes, decode_changes = (
        changes | {"transport": transport} for changes in (prefill_changes, decode_changes)
    )
    for pair in start(checkpoint, prefill_changes, decode_changes):
        assert all(message.transfer_mode.startswith("staged (") for message in pair.connect())
        for length in (1, 17, 45):
            pair.expect_transfer(pair.next_id, length)
            prompt = random_prompt(length, length)
            tokens, settled = pair.transfer(prompt, GREEDY, chunk=64)
            assert {message.error for message in settled} == {""}
            assert tokens == oracle.greedy(prompt, 24)
            item_nbytes = 12288 // 8  # all keys and values of one token of this checkpoint
            assert sum(message.nbytes for message in settled) == length * item_nbytes
            pair.forget(pair.next_id - 1)


@pytest.mark.parametrize(
    ("transport", "prefill_dtype", "decode_dtype", "agreeing_min"),
    [
        ("shm", "float32", "bfloat16", 20),
        pytest.param("stream", "bfloat16", "float8_e4m3fn", 8, marks=pytest.mark.soak),
        pytest.param("shm", "float8_e4m3fn", "bfloat16", 8, marks=pytest.mark.soak),
    ],
)
def test_element_types_are_converted_on_the_way(
    checkpoint: Path,
    oracle: Reference,
    transport: str,
    prefill_dtype: str,
    decode_dtype: str,
    agreeing_min: int,
) -> None:
    """Random weights have no margin between tokens, so a rounded cache takes another turn sooner or
    later: how many of 24 greedy tokens agree with the exact model before is what is asked."""
    changes = [
        {"transport": transport, "kv_cache_dtype": dtype} for dtype in (prefill_dtype, decode_dtype)
    ]
    for pair in start(checkpoint, *changes):
        pair.transfer_mode = TransferMode.AUTO
        assert all(message.transfer_mode.startswith("staged (") for message in pair.connect())
        prompt = random_prompt(45, 3)
        pair.expect_transfer(pair.next_id, 45)
        tokens, settled = pair.transfer(prompt, GREEDY, chunk=64)
        assert {message.error for message in settled} == {""}
        narrow = {"bfloat16": 2, "float8_e4m3fn": 4}
        share = max(narrow.get(dtype, 1) for dtype in (prefill_dtype, decode_dtype))
        assert sum(message.nbytes for message in settled) == 45 * 12288 // 8 // share
        expected = oracle.greedy(prompt, 24)
        agreeing = next((i for i in range(24) if tokens[i] != expected[i]), 24)
        assert agreeing >= agreeing_min


def test_a_staged_transfer_settles_while_the_engines_compute(checkpoint: Path) -> None:
    for pair in start(checkpoint, {}, {"page_size": 16}):
        pair.connect()
        steps = 20
        prompt = random_prompt(512, 6)
        for side in (pair.prefill, pair.decode):  # given: both engines busy for long
            for index in range(steps):
                pages = list(range(400, 400 + 512 // side.config.page_size))
                side.send(
                    Step(
                        10_000 + index,
                        [NewSequence(900 + index, prompt, 512, GREEDY)],
                        [PageGrant(900 + index, 0, 0, pages)],
                        [PrefillChunk(900 + index, 0, 512, is_last=True)],
                        [],
                        [900 + index - 1] if index else [],
                    )
                )
        pair.expect_transfer(8, 64)
        send = WholeSend(
            8, 0, 8, "decode", 0, 64, True, [(0, PREFILL_PAGES)], [(0, DECODE_PAGES[:4])]
        )
        pair.prefill.request_send(send)
        settled, earlier = pair.prefill.expect_after(SendSettled)
        computed_count = sum(isinstance(message, StepDone) for message in earlier)
        assert settled.error == "" and computed_count < steps
        for _ in range(steps - computed_count):
            assert pair.prefill.expect(StepDone).failed == {}


def forge(address: str, message: SlotFilled) -> SlotFreed:
    """A decode rank's answer to a process that is no prefill rank."""
    dialer, poller = PeerDialer(), Poller()
    dialer.dial(address)
    poller.register(dialer)
    for _ in range(200):
        dialer.send(address, encode(message))
        poller.poll(0.05)
        received = dialer.receive()
        if received:
            dialer.close()
            return decode_slot_freed(received[0][1])
    raise AssertionError("no answer")


def test_forged_messages_are_refused_and_the_pair_goes_on(
    checkpoint: Path, oracle: Reference
) -> None:
    for pair in start(checkpoint, {}, {"page_size": 16}):
        pair.connect()
        (descriptor,) = pair.open()  # asked again, the answer is the same
        assert descriptor.staging_buffer is not None and descriptor.regions == []
        address, ring = descriptor.staging_buffer.address, descriptor.staging_buffer.rings[0]
        pair.expect_transfer(5, 40)
        slot = ring.slots[-1]
        for message, named in (
            (SlotFilled(ring.ring + 1, 1, slot, 5, 0, 0, 1, 0, 1), "unknown ring"),
            (SlotFilled(ring.ring, 10**9, slot, 6, 0, 0, 1, 0, 1), "not expected from this peer"),
            (SlotFilled(ring.ring, 10**9 + 1, slot, 5, 0, 0, 2**30, 0, 1), "must lie in 0.."),
            (SlotFilled(ring.ring, 10**9 + 2, slot, 5, 0, 0, 1, 0, 41), "items 0..41"),
            (SlotFilled(ring.ring, 10**9 + 3, 63, 5, 0, 0, 1, 0, 1), "is not of this ring"),
        ):
            assert named in forge(address, message).error
        pair.forget(5)
        assert (
            "not expected"
            in forge(address, SlotFilled(ring.ring, 10**9 + 4, slot, 5, 0, 0, 1, 0, 1)).error
        )
        prompt = random_prompt(20, 4)
        pair.expect_transfer(pair.next_id, 20)
        tokens, settled = pair.transfer(prompt, GREEDY, chunk=8)
        assert tokens == oracle.greedy(prompt, 24)
        assert {message.error for message in settled} == {""}


def test_a_target_that_dies_fails_its_sends_and_the_next_one_is_served(
    checkpoint: Path, oracle: Reference
) -> None:
    prompt = random_prompt(40, 4)
    for pair in start(checkpoint, {}, {}):
        pair.connect()
        os.kill(pair.decode.processes[0].pid, signal.SIGSTOP)
        sends = 6
        for index in range(sends):
            pair.prefill.request_send(
                WholeSend(
                    index, 0, 8, "decode", 0, 40, True, [(0, PREFILL_PAGES)], [(0, DECODE_PAGES)]
                )
            )
        pair.decode.processes[0].kill()
        pair.decode.processes[0].wait()
        settled = [pair.prefill.expect(SendSettled) for _ in range(sends)]
        assert all(message.error and message.is_quiet for message in settled)
        assert pair.prefill.expect(PeerFailed).peer == "decode"
        pair.prefill.send(ClosePeer("decode"))
        assert pair.prefill.expect(PeerClosed).peer == "decode"
        with WorkerProcesses(checkpoint, Role.DECODE, prefill=(LINK,)) as decode:
            decode.wait_ready()
            again = StagedPair(pair.prefill, decode, next_id=500)
            again.connect()
            again.expect_transfer(500, 40)
            tokens, _ = again.transfer(prompt, GREEDY, chunk=64)
            assert tokens == oracle.greedy(prompt, 24)


def test_a_source_that_dies_leaves_slots_that_come_back_when_it_is_fenced(
    checkpoint: Path,
) -> None:
    with WorkerProcesses(checkpoint, Role.PREFILL) as prefill:
        prefill.wait_ready()
        layout = prefill.ready[0].layout
    changes: dict[str, object] = {"prefill": (LINK,), "staging_buffer_mb": 1}
    with WorkerProcesses(checkpoint, Role.DECODE, **changes) as decode:
        decode.wait_ready()

        def open_peer(name: str) -> int:
            decode.send(OpenPeer(name, layout, LINK, TransferMode.STAGED))
            staging_buffer = decode.expect(PeerOpened).descriptor.staging_buffer
            assert staging_buffer is not None
            return len(staging_buffer.rings[0].slots)

        assert open_peer("a") == 4
        decode.send(ClosePeer("a"))
        assert decode.expect(PeerClosed).peer == "a"
        # 16 slots, 4 or half of the free ones for each: the dead peer may still write into its own.
        assert [open_peer(name) for name in "bcd"] == [4, 4, 2]
        decode.send(ReclaimPeer("a"))
        assert open_peer("e") == 3
