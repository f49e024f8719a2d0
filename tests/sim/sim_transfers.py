"""What the workers of simulated servers write into each other's pages, and when they say so.

A transfer copies in two pieces with time between them and settles after the second. Over shared
memory a piece is at the target once it is put. Over a network it is on its way for a while and
lands whatever became of its source, unless the target has closed the door that it was sent to. Over
CUDA IPC the source's device copies it for a while, even if its process is stopped, and whatever
doors the target closes; only the end of the process ends that. A staged piece lies in a slot until
the target's process scatters it, if it still expects it by then.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from common.config import TransferMode
from common.protocol import worker
from common.protocol.descriptor import RankDescriptor
from common.protocol.worker import (
    ClosePeer,
    CloseTransfer,
    ConnectPeer,
    Expect,
    Forget,
    Forgotten,
    OpenPeer,
    OpenTransfer,
    PeerClosed,
    PeerConnected,
    PeerFailed,
    PeerOpened,
    SendSettled,
)
from common.protocol.worker_values import PeerWriter
from common.scheduling.facts import ServerFacts
from tests.sim.digests import regions_of
from tests.sim.oracle import rows_to_send
from tests.sim.sim_cache import PageLists, SimCache
from tests.sim.sim_process import SimProcess
from tests.worker.whole_send import WholeSend as Send

# How often a send looks whether its last piece has arrived.
POLL_S = 0.01
# Of staged pieces, how many wait in their slot long enough to be given up and forgotten.
LATE_SCATTER_SHARE = 0.2
# Of device copies, how many wait long for what the device does first.
LATE_COPY_SHARE = 0.2
# What carries pieces over a network. "posix" stores at once, "cuda_ipc" has a device copy.
NETWORKS = ("tcp", "rc_mlx5", "cuda_copy,tcp")

Rows = list[tuple[int, int]]
Find = Callable[[str], "SimTransfers | None"]


class SimTransfers:
    """All that one worker sends, and all that it lets in.

    transport: as the real one names it; of "cuda_ipc,tcp" every piece takes one of the two.
    doors: by peer, the number of what it may write through over a network.
    transfers: that are open, by id.
    awaits: whether this server has just these pages set aside for a transfer; asked of every piece
        that lands.
    tally: what happened how often. damage_rate: of pieces, how many leave a wrong value behind.
    unreachable: how peers are that can't be connected to, "refused" or "silent"; "" if they can.
    """

    def __init__(
        self,
        facts: ServerFacts,
        process: SimProcess,
        cache: SimCache,
        rng: random.Random,
        transport: str,
        tally: Counter[str],
    ) -> None:
        self.facts = facts
        self.process = process
        self.transport = transport
        self.tally = tally
        self.doors: dict[str, int] = {}
        self.writers: dict[str, PeerWriter] = {}
        self.awaits_fences: Callable[[], bool] | None = None
        self.expected: dict[int, Expect] = {}
        self.targets: dict[str, SimTransfers] = {}
        self.awaits: Callable[[int, PageLists], bool] = lambda transfer_id, pages: True
        self.damage_rate = 0.0
        self.unreachable = ""
        self.damage_rng = random.Random(0)
        self._cache = cache
        self._rng = rng
        self._door_count = 0
        self._doors_there: dict[str, int] = {}
        self._modes: dict[str, TransferMode] = {}
        self._cancelled: set[int] = set()
        self._refused: set[int] = set()
        self.transfers: dict[int, OpenTransfer] = {}
        self._sends_open: dict[int, Send] = {}
        self._waiting: list[Send] = []
        self._in_flight: Counter[int] = Counter()
        self._in_copy: Counter[int] = Counter()
        self._begun: set[int] = set()
        self._in_slots: Counter[int] = Counter()

    @property
    def is_under_way(self) -> bool:
        """Whether several sends have put something and not all."""
        return len(self._begun) > 1

    @property
    def has_bytes_under_way(self) -> bool:
        """Whether the network carries something of a send."""
        return any(self._in_flight[send_id] for send_id in self._sends_open)

    # ---- connections -----------------------------------------------------------------------------

    def open(self, message: OpenPeer) -> None:
        self._door_count += 1
        self.doors[message.peer] = self._door_count
        writer = PeerWriter(message.peer, message.host_ids, message.pids)
        self.writers[message.peer] = writer
        address = str(self._door_count).encode()
        for rank in range(self.facts.rank_count):
            descriptor = RankDescriptor(rank, address, regions_of(self.facts, rank))
            self.process.soon(PeerOpened(message.peer, rank, descriptor))

    def connect(self, message: ConnectPeer, find: Find) -> None:
        target = find(message.peer)
        if self.unreachable == "refused":
            self.process.soon(PeerFailed(message.peer, 0, "connection refused"))
        if target is None or self.unreachable:
            return
        self.targets[message.peer] = target
        self._modes[message.peer] = message.transfer_mode
        self._doors_there[message.peer] = int(message.ranks[0].worker_address)
        for rank in range(self.facts.rank_count):
            transports = self.transport if rank == 0 else ""
            self.process.soon(PeerConnected(message.peer, rank, transports))

    def close(self, message: ClosePeer) -> None:
        self._leave(message.peer, "closed")
        for rank in range(self.facts.rank_count):
            delay = self._rng.uniform(0.0001, 0.02)
            self.process.after(delay, lambda rank=rank: self._shut(message.peer, rank))

    def end(self) -> None:
        """Its scheduler is gone: nothing of it is sent, taken in or scattered any more."""
        for peer in list(self.targets):
            self._leave(peer, "its scheduler is gone")
        self.expected.clear()
        for peer in list(self.doors):
            self.process.after(
                self._rng.uniform(0.0001, 0.02), lambda peer=peer: self._shut(peer, 0)
            )

    @property
    def has_ended(self) -> bool:
        return not self.doors and not self._sends_open

    def break_off(self, peer: str) -> None:
        """The data connection to a peer breaks, and nothing else does."""
        if peer in self.targets:
            self.tally["data connections broken"] += 1
            self._leave(peer, "the connection broke")
            self.process.soon(PeerFailed(peer, 0, "the connection broke"))

    def _leave(self, peer: str, reason: str) -> None:
        self.targets.pop(peer, None)
        for send in list(self._sends_open.values()):
            if send.peer == peer:
                self._settle(send, reason)

    def _shut(self, peer: str, rank: int) -> None:
        """Nothing gets in through a door that is closed, and none of our copies to there runs; only
        then that is said."""
        if any(send.peer == peer for send in self._sends_open.values()):
            self.process.after(POLL_S, lambda: self._shut(peer, rank))
            return
        if rank == 0:
            self.doors.pop(peer, None)
        self.process.say(PeerClosed(peer, rank))

    # ---- what leaves -----------------------------------------------------------------------------

    def open_transfer(self, message: OpenTransfer) -> None:
        assert message.transfer_id not in self.transfers
        self.transfers[message.transfer_id] = message

    def close_transfer(self, message: CloseTransfer) -> None:
        del self.transfers[message.transfer_id]
        under_way = [s for s in self._sends_open.values() if s.transfer_id == message.transfer_id]
        assert not under_way, f"transfer_id={message.transfer_id} is closed too early"

    def send(self, message: worker.Send, finished_step: int) -> None:
        """Waits for its step, as the real one does for each layer group."""
        send = Send.of(message, self.transfers[message.transfer_id])
        self._sends_open[send.send_id] = send
        if send.step_id > finished_step:
            self._waiting.append(send)
        else:
            self._begin(send)

    def apply_step(self, finished_step: int) -> None:
        """Another step has ended; others that sends wait for may be behind it."""
        waiting, self._waiting = self._waiting, []
        for send in waiting:
            if send.step_id > finished_step:
                self._waiting.append(send)
            elif send.send_id in self._sends_open:
                self._begin(send)

    def cancel(self, transfer_id: int) -> None:
        self._cancelled.add(transfer_id)
        for send in list(self._waiting):
            if send.transfer_id == transfer_id:
                self._waiting.remove(send)
                self._settle(send, "cancelled")

    def _begin(self, send: Send) -> None:
        middle = (send.token_start + send.token_stop) // 2
        first = self._rng.uniform(0.0005, 0.01)
        second = first + self._rng.uniform(0.0005, 0.01)
        is_staged = self._is_staged(send)
        wait = flight = 0.0
        if is_staged:
            # It is in the slot by then: the target scatters it whatever the source does.
            wait = second - first
            if self._rng.random() < LATE_SCATTER_SHARE:
                wait += self._rng.uniform(0.1, 1.0)
            second = first
        elif self.transport != "posix":
            flight = self._rng.uniform(0.0005, 0.02)
        begin, stop = send.token_start, send.token_stop
        # The range may be empty: only the second piece brings what is final with the prompt.
        pieces = [(first, (begin, middle), 0.0, False), (second, (middle, stop), wait, True)]
        for at, tokens, in_slot, is_last in pieces:
            rows = rows_to_send(self._cache.lives, *tokens, is_last=is_last and send.is_final)
            self.process.after(at, lambda r=rows, w=in_slot: self._copy(send, r, w, flight))
        self.process.after(second + wait + flight + 0.0001, lambda: self._settle(send, ""))

    def _copy(self, send: Send, rows: Rows, wait: float, flight: float) -> None:
        """wait: how long it lies in its slot. flight: how long it is on its way."""
        target = self.targets.get(send.peer)
        is_open = send.send_id in self._sends_open
        if self.process.is_dead or not is_open or target is None or target.process.is_dead:
            return
        if send.transfer_id in self._cancelled or send.send_id in self._refused:
            return
        self._begun.add(send.send_id)
        values = [self._cache.take(send.source_pages, group, item) for group, item in rows]
        if self._is_staged(send):
            self._stage(send, target, rows, values, wait)
            return
        carrier = self.transport
        if carrier == "cuda_ipc,tcp":
            carrier = self._rng.choice(("cuda_ipc", "tcp"))
        if carrier in NETWORKS:
            self._put_over_network(send, target, rows, values, flight)
        elif carrier == "cuda_ipc":
            self._copy_by_device(send, target, rows, values, flight)
        else:
            self.tally["pieces over shared memory"] += 1
            target.write(send, rows, values)

    def _stage(
        self, send: Send, target: SimTransfers, rows: Rows, values: list[int], wait: float
    ) -> None:
        self._in_slots[send.send_id] += 1

        def scatter() -> None:
            self._in_slots[send.send_id] -= 1
            if target.expects(send, self.facts.incarnation):
                self.tally["pieces through slots"] += 1
                target.write(send, rows, values)
            else:
                self.tally["pieces in slots not expected any more"] += 1
                self._refused.add(send.send_id)

        target.process.receive(wait, scatter)

    def _copy_by_device(
        self, send: Send, target: SimTransfers, rows: Rows, values: list[int], flight: float
    ) -> None:
        self._in_copy[send.send_id] += 1

        def land() -> None:
            self._in_copy[send.send_id] -= 1
            self.tally["pieces copied by a device"] += 1
            target.write(send, rows, values)

        is_late = self._rng.random() < LATE_COPY_SHARE
        self.process.beside(self._rng.uniform(0.1, 1.0) if is_late else flight, land)

    def _put_over_network(
        self, send: Send, target: SimTransfers, rows: Rows, values: list[int], flight: float
    ) -> None:
        door = self._doors_there[send.peer]
        self._in_flight[send.send_id] += 1

        def land() -> None:
            self._in_flight[send.send_id] -= 1
            if target.doors.get(self.facts.incarnation) == door:
                self.tally["pieces over a network"] += 1
                target.write(send, rows, values)
            else:
                self.tally["pieces over a network at a closed door"] += 1

        target.process.receive(flight, land)

    def _is_staged(self, send: Send) -> bool:
        """Every transfer in staged mode, some in auto mode."""
        mode = self._modes.get(send.peer)
        return mode is TransferMode.STAGED or (mode is TransferMode.AUTO and send.send_id % 2 == 1)

    def _settle(self, send: Send, error: str) -> None:
        if self.process.is_dead or send.send_id not in self._sends_open:
            return
        is_cancelled = send.transfer_id in self._cancelled
        is_quiet = self._in_flight[send.send_id] == 0
        has_landed = is_quiet and (self._in_slots[send.send_id] == 0 or is_cancelled)
        if self._in_copy[send.send_id] or (not has_landed and not error):
            self.process.after(POLL_S, lambda: self._settle(send, error))
            return
        del self._sends_open[send.send_id]
        self._begun.discard(send.send_id)
        if is_cancelled:
            error = "cancelled"
        elif send.send_id in self._refused:
            error = "refused by the target"
        nbytes = (send.token_stop - send.token_start) * 8
        self.tally["connections broken with bytes under way"] += not is_quiet
        self.process.say(
            SendSettled(send.send_id, send.transfer_id, 0, error, nbytes, 1, 0.001, is_quiet)
        )
        for rank in range(1, self.facts.rank_count):
            self.process.say(SendSettled(send.send_id, send.transfer_id, rank, error, 0, 0, 0.0))

    # ---- what gets in ----------------------------------------------------------------------------

    def expect(self, message: Expect) -> None:
        self.expected[message.transfer_id] = message

    def forget(self, message: Forget) -> None:
        self.expected.pop(message.transfer_id, None)
        for rank in range(self.facts.rank_count):
            self.process.soon(Forgotten(message.transfer_id, rank))

    def expects(self, send: Send, source: str) -> bool:
        """Whether a staged copy of a source incarnation may be scattered here, now."""
        expected = self.expected.get(send.transfer_id)
        return (
            expected is not None
            and expected.peer == source
            and expected.pages == send.target_pages
            and expected.token_start <= send.token_start
            and send.token_stop <= expected.token_count
        )

    def write(self, send: Send, rows: Rows, values: list[int]) -> None:
        """Into this target's pages, at these (group, item)."""
        if self.process.is_dead:
            return
        if self.awaits_fences is not None:
            assert self.awaits_fences(), "bytes for a scheduler that is gone landed after its fence"
            assert not self._cache.are_used(send.target_pages), "late bytes landed in used pages"
            self.tally["bytes that were late for their scheduler"] += 1
            return
        assert self.awaits(send.transfer_id, send.target_pages), (
            f"late bytes of transfer_id={send.transfer_id} landed, or in pages of others"
        )
        for (group, item), value in zip(rows, values, strict=True):
            self._cache.leave(send.target_pages, group, item, value)
        if rows and self.damage_rng.random() < self.damage_rate:
            group, item = self.damage_rng.choice(rows)
            value = self._cache.take(send.target_pages, group, item)
            self._cache.leave(send.target_pages, group, item, value + 1)
            self.tally["pieces damaged"] += 1
