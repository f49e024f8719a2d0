"""Two real worker processes and a real transfer over UCX, ordered by a test through real ZMQ."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.config import Role
from common.protocol.worker import (
    ClosePeer,
    ConnectPeer,
    NewSequence,
    OpenPeer,
    PageGrant,
    PeerClosed,
    PeerConnected,
    PeerFailed,
    PeerOpened,
    PrefillChunk,
    SendSettled,
    Step,
    StepDone,
)
from common.request import SamplingParams
from tests.engine.tiny_checkpoints import Reference, random_prompt
from tests.transport.process_faults import Faults, build
from tests.worker.whole_send import WholeSend
from tests.worker.worker_processes import ANSWER_TIMEOUT_S, WorkerProcesses

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

GREEDY = SamplingParams(max_new_tokens=24, seed=1, temperature=0.0)
SEEDED = SamplingParams(
    max_new_tokens=24, seed=9, temperature=0.9, top_p=0.95, presence_penalty=0.5
)
PREFILL_PAGES = [9, 30, 4, 11, 2, 25, 6, 17]
DECODE_PAGES = [60, 3, 57, 40, 41, 42, 5, 59, 13, 8]


@dataclass
class Pair:
    """A prefill and a decode server that are connected, each known to the other by its role."""

    prefill: WorkerProcesses
    decode: WorkerProcesses
    next_id: int = 100

    def connect(self) -> list[PeerConnected]:
        self.decode.send(OpenPeer("prefill"))
        opened = [self.decode.expect(PeerOpened) for _ in self.decode.processes]
        ranks = sorted((message.descriptor for message in opened), key=lambda d: d.rank)
        self.prefill.send(ConnectPeer("decode", self.decode.ready[0].layout, ranks))
        return [self.prefill.expect(PeerConnected) for _ in self.prefill.processes]

    def transfer(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        chunk: int,
        target_pages: list[int] | None = None,
        token_start: int = 0,
    ) -> tuple[list[int], list[SendSettled]]:
        """Prompt on one side chunk by chunk, each sent at once; all output; what was settled.

        token_start: what lies before is in the target's pages; it is neither named nor sent.
        """
        request_id = self.next_id
        self.next_id += 1
        count = len(prompt)
        page_count = -(-count // self.prefill.config.page_size)
        source = PREFILL_PAGES[: max(page_count, 1)]
        target = DECODE_PAGES[: -(-count // self.decode.config.page_size)]
        new = [NewSequence(request_id, prompt, count, sampling)]
        grants = [PageGrant(request_id, 0, 0, source)]
        first = token_start // self.decode.config.page_size
        tokens: list[int] = []
        settled: list[SendSettled] = []
        sent_count = token_start
        for start in range(0, count, chunk):
            stop = min(start + chunk, count)
            is_last = stop == count
            piece = PrefillChunk(request_id, start, stop, is_last)
            tokens += self.prefill.step(new=new, grants=grants, chunks=[piece]).token_ids
            new, grants = [], []
            if stop <= sent_count and not is_last:
                continue
            self.prefill.request_send(
                WholeSend(
                    send_id=request_id * 1000 + start,
                    step_id=0,
                    transfer_id=request_id,
                    peer="decode",
                    token_start=sent_count,
                    token_stop=stop,
                    is_final=is_last,
                    source_pages=[(0, source)],
                    target_pages=[(first, (target_pages or target)[first:])],
                )
            )
            sent_count = stop
            settled += [self.prefill.expect(SendSettled) for _ in self.prefill.processes]
        self.prefill.step(retired=[request_id])
        tokens += self.decode_only(request_id, prompt, tokens, sampling)
        return tokens, settled

    def decode_only(
        self, request_id: int, prompt: list[int], tokens: list[int], sampling: SamplingParams
    ) -> list[int]:
        """Every step is sent before the one before it is answered, as by a scheduler."""
        output: list[int] = []
        new = [NewSequence(request_id, prompt + tokens, len(prompt), sampling)]
        grants = [PageGrant(request_id, 0, 0, DECODE_PAGES)]
        self.decode.start_step(new=new, grants=grants, decode=[request_id])
        for _ in range(sampling.max_new_tokens - len(tokens) - 1):
            self.decode.start_step(decode=[request_id])
            output += self.decode.finish_step().token_ids
        output += self.decode.finish_step().token_ids
        self.decode.step(retired=[request_id])
        return output


def start_pair(
    checkpoint: Path,
    prefill_changes: dict[str, object] | None = None,
    decode_changes: dict[str, object] | None = None,
) -> Iterator[Pair]:
    with (
        WorkerProcesses(checkpoint, Role.PREFILL, **(prefill_changes or {})) as prefill,
        WorkerProcesses(checkpoint, Role.DECODE, **(decode_changes or {})) as decode,
    ):
        prefill.wait_ready()
        decode.wait_ready()
        yield Pair(prefill, decode)


@pytest.fixture(scope="module", params=["shm", "stream"])
def pair(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Pair]:
    changes = {"transport": request.param}
    for pair in start_pair(checkpoint, changes, changes):
        connected = pair.connect()
        expected = {"shm": "posix", "stream": "stream"}[request.param]
        assert [expected in message.transports for message in connected] == [True]
        yield pair


@pytest.mark.parametrize("length", [1, 7, 8, 9, 45])
@pytest.mark.parametrize("chunk", [64, 16])
def test_a_handed_over_prompt_continues_as_transformers_would(
    pair: Pair, oracle: Reference, length: int, chunk: int
) -> None:
    prompt = random_prompt(length, length)
    tokens, settled = pair.transfer(prompt, GREEDY, chunk=chunk)
    assert tokens == oracle.greedy(prompt, 24)
    assert {message.error for message in settled} == {""}
    item_nbytes = 12288 // 8  # all layers' keys and values of one token of this checkpoint
    assert sum(message.nbytes for message in settled) == length * item_nbytes


def test_a_seeded_request_with_penalties_draws_the_same_on_the_pair_as_on_one_server(
    pair: Pair,
) -> None:
    prompt = random_prompt(37, 5)
    tokens, _ = pair.transfer(prompt, SEEDED, chunk=16)
    alone = pair.prefill.generate(7, prompt, SEEDED, PREFILL_PAGES)
    assert tokens == alone
    assert len(set(alone)) > 8


def test_a_page_that_lands_in_the_wrong_place_changes_the_tokens(
    pair: Pair, oracle: Reference
) -> None:
    prompt = random_prompt(45, 1)
    elsewhere = [DECODE_PAGES[0], 61, *DECODE_PAGES[2:6]]
    tokens, _ = pair.transfer(prompt, GREEDY, chunk=64, target_pages=elsewhere)
    assert tokens != oracle.greedy(prompt, 24)


def test_a_transfer_settles_while_the_engine_computes(pair: Pair) -> None:
    tokens = random_prompt(512, 6)
    steps = 30
    for index in range(steps):  # given: steps that keep the engine busy for long
        new = [NewSequence(900 + index, tokens, 512, GREEDY)]
        grants = [PageGrant(900 + index, 0, 0, list(range(64, 128)))]
        chunks = [PrefillChunk(900 + index, 0, 512, is_last=True)]
        retired = [900 + index - 1] if index else []
        pair.prefill.send(Step(10_000 + index, new, grants, chunks, [], retired))
    pair.prefill.request_send(
        WholeSend(8, 0, 8, "decode", 0, 64, True, [(0, PREFILL_PAGES)], [(0, [*range(1, 9)])])
    )
    settled, earlier = pair.prefill.expect_after(SendSettled)
    assert settled.error == ""
    computed_count = sum(isinstance(message, StepDone) for message in earlier)
    assert computed_count < steps
    for _ in range(steps - computed_count):
        assert pair.prefill.expect(StepDone).failed == {}
    pair.prefill.step(retired=[900 + steps - 1])


@pytest.mark.parametrize(
    ("source", "target", "named"),
    [
        ([0], [5], "source page 0 of group 0: must be in 1..128"),
        ([129], [5], "source page 129 of group 0: must be in 1..128"),
        ([1], [0], "target page 0 of group 0: must be in 1..128"),
        ([1], [-3], "target page -3 of group 0: must be in 1..128"),
        ([1], [129], "target page 129 of group 0: must be in 1..128"),
        ([1, 2], [5, 5], "target page 5 of group 0 is named twice"),
        ([2, 2], [5, 6], "source page 2 of group 0 is named twice"),
    ],
)
def test_bad_page_ids_are_answered_and_nothing_is_written(
    pair: Pair, source: list[int], target: list[int], named: str
) -> None:
    pair.prefill.request_send(
        WholeSend(5, 0, 5, "decode", 0, 8 * len(source), True, [(0, source)], [(0, target)])
    )
    settled = pair.prefill.expect(SendSettled)
    assert (settled.error, settled.nbytes, settled.is_quiet) == (named, 0, True)


def test_a_send_to_a_peer_that_is_not_connected_is_answered(pair: Pair) -> None:
    pair.prefill.request_send(WholeSend(6, 0, 6, "nobody", 0, 8, True, [(0, [1])], [(0, [1])]))
    settled = pair.prefill.expect(SendSettled)
    assert settled.error == "peer nobody is not connected"


@pytest.mark.parametrize(
    ("prefill_changes", "decode_changes"),
    [
        pytest.param({"page_size": 16}, {"page_size": 8}, marks=pytest.mark.soak),
        pytest.param(
            {"page_size": 4, "layer_group_count": 3}, {"tp_size": 2}, marks=pytest.mark.soak
        ),
        pytest.param({"tp_size": 2}, {"page_size": 16}, marks=pytest.mark.soak),
    ],
    ids=["page 16 to 8", "page 4 to tp 2", "tp 2 to page 16"],
)
def test_servers_that_are_cut_differently_continue_as_transformers_would(
    checkpoint: Path,
    oracle: Reference,
    prefill_changes: dict[str, object],
    decode_changes: dict[str, object],
) -> None:
    for pair in start_pair(checkpoint, prefill_changes, decode_changes):
        pair.connect()
        prompt = random_prompt(29, 2)
        tokens, settled = pair.transfer(prompt, GREEDY, chunk=12)
        assert {message.error for message in settled} == {""}
        assert tokens == oracle.greedy(prompt, 24)


def test_a_killed_peer_is_an_event_and_the_rank_serves_the_next_incarnation(
    checkpoint: Path, oracle: Reference
) -> None:
    prompt = random_prompt(30, 3)
    with WorkerProcesses(checkpoint, Role.PREFILL) as prefill:
        prefill.wait_ready()
        with WorkerProcesses(checkpoint, Role.DECODE) as decode:
            decode.wait_ready()
            pair = Pair(prefill, decode)
            pair.connect()
            pair.transfer(prompt, GREEDY, chunk=64)
            decode.processes[0].kill()
            decode.processes[0].wait()
            failed = prefill.expect(PeerFailed)
            assert failed.peer == "decode" and failed.reason
        prefill.request_send(WholeSend(1, 0, 1, "decode", 0, 8, True, [(0, [1])], [(0, [1])]))
        assert "failed" in prefill.expect(SendSettled).error
        prefill.send(ClosePeer("decode"))
        assert prefill.expect(PeerClosed).peer == "decode"
        with WorkerProcesses(checkpoint, Role.DECODE) as decode:
            decode.wait_ready()
            pair = Pair(prefill, decode, next_id=500)
            pair.connect()
            tokens, _ = pair.transfer(prompt, GREEDY, chunk=64)
            assert tokens == oracle.greedy(prompt, 24)


def test_both_sides_connect_again_under_the_same_names_and_end_on_shutdown(
    checkpoint: Path, oracle: Reference
) -> None:
    prompt = random_prompt(20, 4)
    for pair in start_pair(checkpoint):
        for _ in range(3):
            pair.connect()
            tokens, _ = pair.transfer(prompt, GREEDY, chunk=8)
            assert tokens == oracle.greedy(prompt, 24)
            for side, peer in ((pair.prefill, "decode"), (pair.decode, "prefill")):
                side.send(ClosePeer(peer))
                assert side.expect(PeerClosed).peer == peer
        pair.connect()
        assert pair.prefill.shut_down() == [0]
        assert pair.decode.shut_down() == [0]
        assert pair.prefill.log == "" and pair.decode.log.count("\n") <= 1


# ---- the end of a worker -------------------------------------------------------------------------


def test_a_worker_ends_on_a_signal_to_terminate_only(checkpoint: Path) -> None:
    with WorkerProcesses(checkpoint, Role.DECODE) as worker:
        worker.wait_ready()
        os.kill(worker.processes[0].pid, signal.SIGINT)  # the supervisor's business alone
        worker.step()
        os.kill(worker.processes[0].pid, signal.SIGTERM)
        assert worker.processes[0].wait(ANSWER_TIMEOUT_S) == 0


def test_a_worker_that_can_not_understand_its_scheduler_ends_with_one_line(
    checkpoint: Path,
) -> None:
    with WorkerProcesses(checkpoint, Role.DECODE) as worker:
        worker.wait_ready()
        worker.tell_bytes(b"\xc1")
        assert worker.processes[0].wait(ANSWER_TIMEOUT_S) == 1
        lines = worker.log.splitlines()
        assert len(lines) == 1 and "the I/O thread failed: ProtocolError" in lines[0]


def test_a_bug_in_the_engine_ends_the_worker_with_one_line(checkpoint: Path) -> None:
    with WorkerProcesses(checkpoint, Role.DECODE) as worker:
        worker.wait_ready()
        # given: a page that does not exist, which only our own scheduler could have granted
        with pytest.raises(AssertionError, match="the engine failed"):
            worker.generate(1, [5, 6], GREEDY, [4096])
        assert worker.processes[0].wait(ANSWER_TIMEOUT_S) == 1
        assert len(worker.log.splitlines()) == 1


def test_settings_that_can_not_work_end_the_start_with_one_line_and_exit_code_2(
    checkpoint: Path,
) -> None:
    with WorkerProcesses(checkpoint, Role.DECODE, context_length=5000) as worker:
        assert worker.processes[0].wait(ANSWER_TIMEOUT_S) == 2
        lines = worker.log.splitlines()
        assert len(lines) == 1 and "--context-length 5000: must be in 1..1024" in lines[0]


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    build(tmp_path)
    return Faults(tmp_path, tmp_path / "faults")


def test_a_transport_that_breaks_ends_the_worker_with_the_reason(
    checkpoint: Path, faults: Faults
) -> None:
    """It would live on else, and no peer could ever connect to it again."""
    with WorkerProcesses(checkpoint, Role.DECODE, {0: faults.environment}) as worker:
        worker.wait_ready()
        faults.set("epoll_wait", errno.ENOMEM)
        worker.send(OpenPeer("prefill"))  # wakes the progress thread
        assert worker.processes[0].wait(ANSWER_TIMEOUT_S) == 1
        reason = "the I/O thread failed: TransportBroken: epoll_wait: Cannot allocate memory"
        assert reason in worker.log


def test_a_broken_transport_ends_a_worker_whose_engine_waits_for_another_rank(
    checkpoint: Path, faults: Faults
) -> None:
    with WorkerProcesses(checkpoint, Role.DECODE, {0: faults.environment}, tp_size=2) as worker:
        worker.wait_ready()
        os.kill(worker.processes[1].pid, signal.SIGSTOP)
        prompt = random_prompt(16, 1)
        worker.start_step(
            new=[NewSequence(1, prompt, 16, GREEDY)],
            grants=[PageGrant(1, 0, 0, [1, 2])],
            chunks=[PrefillChunk(1, 0, 16, is_last=True)],
        )
        faults.set("epoll_wait", errno.ENOMEM)
        worker.send(OpenPeer("prefill"))
        assert worker.processes[0].wait(ANSWER_TIMEOUT_S) == 1
        assert "the engine did not end within 10 s" in worker.log
