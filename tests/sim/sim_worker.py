"""A worker whose cache is arrays of token ids: a wrong or missing page changes the output.

It keeps the real worker's contract: steps run one after the other and write their pages when they
end; a hand-over copies in two pieces with time between them and settles after the second. The next
token is a digest of what is read through the page table, so the oracle needs no pages at all.

Over shared memory a piece is at the target once it is put. Over tcp it is on its way for a while
and lands whatever became of its source, unless the target has closed the door that it was sent to.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from common.config import HandOver
from common.layout.component import LiveKind
from common.protocol.descriptor import RankDescriptor
from common.protocol.digests import Digest, Digested
from common.protocol.worker import (
    CancelSends,
    ClosePeer,
    ConnectPeer,
    Expect,
    Forget,
    Forgotten,
    OpenPeer,
    PeerClosed,
    PeerConnected,
    PeerOpened,
    SchedulerToWorker,
    Send,
    SendSettled,
    Step,
    StepDone,
    WorkerBeat,
    WorkerToScheduler,
)
from common.scheduling.facts import ServerFacts
from tests.sim.digests import digest_pages, regions_of
from tests.sim.oracle import digest, fold, rows_to_send, seen

UNWRITTEN = -1

After = Callable[[float, Callable[[], None]], None]
Reply = Callable[[WorkerToScheduler], None]


@dataclass
class Known:
    """pages: per page group, page ids by logical index; the latest grant of an index counts."""

    tokens: list[int]
    pages: list[dict[int, int]]


class SimWorker:
    """All ranks of one simulated server; those behind the first cache nothing.

    transport: "posix" or "tcp". doors: by peer, the number of what it may write through over tcp.
    awaits: whether this server has pages set aside for a transfer; asked of every byte that lands.
    """

    def __init__(
        self,
        facts: ServerFacts,
        rng: random.Random,
        after: After,
        reply: Reply,
        transport: str = "posix",
    ) -> None:
        self.facts = facts
        self.transport = transport
        self.groups = facts.layout.groups
        self.lives = [group.live for group in self.groups]
        self.pools = [
            [[UNWRITTEN] * group.page_items for _ in range(count + 1)]
            for count, group in zip(facts.page_counts, self.groups, strict=True)
        ]
        self.is_dead = False
        self.damage_rate = 0.0
        self.damage_rng = random.Random(0)
        self.awaits: Callable[[int], bool] = lambda transfer_id: True
        self.targets: dict[str, SimWorker] = {}
        self.expected: dict[int, Expect] = {}
        self._hand_over: dict[str, HandOver] = {}
        self._refused: set[int] = set()
        self._rng = rng
        self._network = after
        self._is_stopped = False
        self._overdue: list[Callable[[], None]] = []
        self.doors: dict[str, int] = {}
        self._door_count = 0
        self._doors_there: dict[str, int] = {}
        self._under_way: Counter[int] = Counter()
        self._reply = reply
        self._known: dict[int, Known] = {}
        self._steps: list[Step] = []
        self._is_computing = False
        self._cancelled: set[int] = set()
        self._sends_open: dict[int, Send] = {}
        self._finished_step = 0
        self._waiting: list[Send] = []

    def handle(self, message: SchedulerToWorker, find: Callable[[str], SimWorker | None]) -> None:
        if self.is_dead:
            return
        if self._is_stopped:
            self._overdue.append(lambda: self.handle(message, find))
            return
        match message:
            case Step():
                self._steps.append(message)
                self._compute_next()
            case Send():
                self._send(message)
            case CancelSends():
                self._cancelled.add(message.transfer_id)
                for send in list(self._waiting):
                    if send.transfer_id == message.transfer_id:
                        self._waiting.remove(send)
                        self._settle(send, "cancelled")
            case Expect():
                self.expected[message.transfer_id] = message
            case Forget():
                self.expected.pop(message.transfer_id, None)
                for rank in range(self.facts.rank_count):
                    self._soon(Forgotten(message.transfer_id, rank))
            case Digest():
                self._after(self._rng.uniform(0.0001, 0.01), lambda: self._compare(message))
            case OpenPeer():
                self._door_count += 1
                self.doors[message.peer] = self._door_count
                address = str(self._door_count).encode()
                for rank in range(self.facts.rank_count):
                    descriptor = RankDescriptor(rank, address, regions_of(self.facts, rank))
                    self._soon(PeerOpened(message.peer, rank, descriptor))
            case ConnectPeer():
                target = find(message.peer)
                if target is not None:
                    self.targets[message.peer] = target
                    self._hand_over[message.peer] = message.hand_over
                    self._doors_there[message.peer] = int(message.ranks[0].worker_address)
                    for rank in range(self.facts.rank_count):
                        transports = self.transport if rank == 0 else ""
                        self._soon(PeerConnected(message.peer, rank, transports))
            case ClosePeer():
                self._close(message.peer)

    def stop(self) -> None:
        """As SIGSTOP does: nothing happens any more, what is due waits."""
        self._is_stopped = True

    def go_on(self) -> None:
        self._is_stopped = False
        while self._overdue and not self._is_stopped:
            self._overdue.pop(0)()

    def _after(self, delay: float, call: Callable[[], None]) -> None:
        def due() -> None:
            if self._is_stopped:
                self._overdue.append(call)
            else:
                call()

        self._network(delay, due)

    def _soon(self, message: WorkerToScheduler) -> None:
        self._after(self._rng.uniform(0.0001, 0.002), lambda: self._say(message))

    def _say(self, message: WorkerToScheduler) -> None:
        if not self.is_dead:
            self._reply(message)

    def beat(self) -> None:
        if not self._is_stopped:
            for rank in range(self.facts.rank_count):
                self._say(WorkerBeat(rank, self._finished_step))

    # ---- compute ---------------------------------------------------------------------------------

    def _compute_next(self) -> None:
        if self._is_computing or not self._steps:
            return
        self._is_computing = True
        step = self._steps.pop(0)
        self._after(self._rng.uniform(0.001, 0.02), lambda: self._finish_step(step))

    def _finish_step(self, step: Step) -> None:
        if self.is_dead:
            return
        for request_id in step.retired:
            del self._known[request_id]
        for new in step.new:
            assert new.request_id not in self._known
            self._known[new.request_id] = Known(list(new.token_ids), [{} for _ in self.pools])
        for grant in step.grants:
            pages = self._known[grant.request_id].pages[grant.group]
            pages.update(enumerate(grant.page_ids, grant.first_index))
        ids: list[int] = []
        sampled: list[int] = []
        for chunk in step.chunks:
            known = self._known[chunk.request_id]
            for position in range(chunk.start, chunk.stop):
                self._write(known, position)
            # Tokens inside a prompt draw nothing, so what they read is compared here.
            for group, live in enumerate(self.lives):
                count = chunk.start + 1 if live.is_paged else chunk.stop
                read = self._read(known, group, count)
                expected = seen(known.tokens[:count], live)
                assert read == expected, f"request {chunk.request_id} at {count}, group {group}"
            if chunk.is_last:
                ids.append(chunk.request_id)
                sampled.append(self._sample(known, chunk.stop))
        for request_id in step.decode:
            known = self._known[request_id]
            self._write(known, len(known.tokens) - 1)
            ids.append(request_id)
            sampled.append(self._sample(known, len(known.tokens)))
        for request_id, token in zip(ids, sampled, strict=True):
            self._known[request_id].tokens.append(token)
        self._is_computing = False
        self._finished_step = step.step_id
        waiting, self._waiting = self._waiting, []
        for send in waiting:
            if send.send_id in self._sends_open:
                self._send(send)
        self._say(StepDone(step.step_id, ids, sampled))
        self._compute_next()

    def _write(self, known: Known, position: int) -> None:
        token = known.tokens[position]
        for group, live in enumerate(self.lives):
            match live.kind:
                case LiveKind.FULL | LiveKind.WINDOW | LiveKind.TAIL:
                    self._put(known, group, position, token)
                case LiveKind.BLOCK:
                    if (position + 1) % live.size == 0:
                        block = known.tokens[position + 1 - live.size : position + 1]
                        self._put(known, group, position // live.size, fold(0, block))
                case LiveKind.SLOT:
                    # A slot is never cleared: who starts does not read it.
                    before = self._get(known, group, range(1))[0] if position else 0
                    self._put(known, group, 0, fold(before, [token]))
                case _:
                    assert_never(live.kind)

    def _sample(self, known: Known, count: int) -> int:
        """All that is seen of the groups, one after the other."""
        return digest(
            [t for group in range(len(self.pools)) for t in self._read(known, group, count)]
        )

    def _read(self, known: Known, group: int, count: int) -> list[int]:
        """What the last of `count` tokens sees in a group."""
        live = self.lives[group]
        if live.kind is LiveKind.WINDOW:
            return self._get(known, group, range(max(0, count - live.size), count))
        return self._get(known, group, live.items(count))

    def _get(self, known: Known, group: int, items: range) -> list[int]:
        pool, pages, rows = self.pools[group], known.pages[group], self.groups[group].page_items
        if not self.lives[group].is_paged:
            return [pool[pages[0]][item % rows] for item in items]
        missing = [item for item in items if item // rows not in pages]
        assert not missing, f"item {missing[0]} of group {group} never had a page"
        return [pool[pages[item // rows]][item % rows] for item in items]

    def _put(self, known: Known, group: int, item: int, value: int) -> None:
        page, row = self._place(known, group, item)
        self.pools[group][page][row] = value

    def _place(self, known: Known, group: int, item: int) -> tuple[int, int]:
        """Page and row of an item; of what is not paged, all items go round in one page."""
        rows = self.groups[group].page_items
        index = item // rows if self.lives[group].is_paged else 0
        assert index in known.pages[group], f"item {item} of group {group} never had a page"
        return known.pages[group][index], item % rows

    # ---- hand-over -------------------------------------------------------------------------------

    def _send(self, send: Send) -> None:
        """Waits for its step, as the real one does for each layer group."""
        self._sends_open[send.send_id] = send
        if send.step_id > self._finished_step:
            self._waiting.append(send)
            return
        middle = (send.token_start + send.token_stop) // 2
        target = self.targets.get(send.peer)
        first = self._rng.uniform(0.0005, 0.01)
        second = first + self._rng.uniform(0.0005, 0.01)
        if target is not None and self._is_staged(send) and self._rng.random() < 0.2:
            # A slot that waits: long enough for its transfer to be given up and forgotten.
            second += self._rng.uniform(0.1, 1.0)
        scatter_at = second
        if target is not None and self._is_staged(send):
            # It is in the slot by then: the target scatters it whatever the source does.
            second = first
        # What is put over tcp is on its way for a while; flushed is what has arrived.
        is_slow = self.transport == "tcp" and not (target and self._is_staged(send))
        flight = self._rng.uniform(0.0005, 0.02) if is_slow else 0.0
        wait = scatter_at - second
        self._after(
            first, lambda: self._copy(send, target, send.token_start, middle, (0.0, flight))
        )
        self._after(
            second, lambda: self._copy(send, target, middle, send.token_stop, (wait, flight))
        )
        self._after(scatter_at + flight + 0.0001, lambda: self._settle(send, ""))

    def _copy(
        self,
        send: Send,
        target: SimWorker | None,
        start: int,
        stop: int,
        times: tuple[float, float],
    ) -> None:
        """times: how long what is staged lies in its slot, and how long it is on its way."""
        wait, flight = times
        is_open = send.send_id in self._sends_open
        if self.is_dead or not is_open or target is None or target.is_dead:
            return
        if send.transfer_id in self._cancelled or send.send_id in self._refused:
            return
        is_last = send.is_final and stop == send.token_stop
        rows = rows_to_send(self.lives, start, stop, is_last=is_last)
        values: list[int] = []
        for group, item in rows:
            page, row = self._row(send.source_pages, group, item)
            values.append(self.pools[group][page][row])
        if not self._is_staged(send):
            self._put_there(send, target, rows, values, flight)
            return

        def scatter() -> None:
            if target.expects(send, self.facts.incarnation):
                target.write(send, rows, values)
            else:
                self._refused.add(send.send_id)

        self._after(wait, scatter)

    def _put_there(
        self,
        send: Send,
        target: SimWorker,
        rows: list[tuple[int, int]],
        values: list[int],
        flight: float,
    ) -> None:
        if self.transport != "tcp":
            target.write(send, rows, values)
            return
        door = self._doors_there[send.peer]
        self._under_way[send.send_id] += 1

        def land() -> None:
            if target._is_stopped:  # it lies in a socket that nobody reads
                target._overdue.append(land)
                return
            self._under_way[send.send_id] -= 1
            if target.doors.get(self.facts.incarnation) == door:
                target.write(send, rows, values)

        self._network(flight, land)

    def write(self, send: Send, rows: list[tuple[int, int]], values: list[int]) -> None:
        """Into this target's pages, at these (group, item)."""
        if self.is_dead:
            return
        assert self.awaits(send.transfer_id), f"late bytes of transfer_id={send.transfer_id} landed"
        for (group, item), value in zip(rows, values, strict=True):
            page, row = self._row(send.target_pages, group, item)
            self.pools[group][page][row] = value
        if rows and self.damage_rng.random() < self.damage_rate:
            group, item = self.damage_rng.choice(rows)
            page, row = self._row(send.target_pages, group, item)
            self.pools[group][page][row] += 1

    def _compare(self, job: Digest) -> None:
        """What lies in the pages by now, as the real one reads them while others are written."""

        def value(group: int, item: int) -> int:
            page, row = self._row(job.pages, group, item)
            return self.pools[group][page][row]

        for rank, digests in digest_pages(self.facts.layout, job, value):
            self._say(Digested(job.transfer_id, rank, digests))

    def _row(self, lists: list[tuple[int, list[int]]], group: int, item: int) -> tuple[int, int]:
        """Page and row of an item in the page lists of a hand-over."""
        first, pages = lists[group]
        row_count = self.groups[group].page_items
        index = item // row_count - first if self.lives[group].is_paged else 0
        assert 0 <= index < len(pages), f"item {item} is not in pages {first}.. of {group}"
        return pages[index], item % row_count

    def _is_staged(self, send: Send) -> bool:
        """Every transfer in landing mode, some in auto mode."""
        mode = self._hand_over[send.peer]
        return mode is HandOver.LANDING or (mode is HandOver.AUTO and send.send_id % 2 == 1)

    def expects(self, send: Send, source: str) -> bool:
        """Whether a staged copy of a source incarnation may be scattered here, now."""
        expected = self.expected.get(send.transfer_id)
        return (
            expected is not None
            and expected.peer == source
            and expected.pages == send.target_pages
            and send.token_stop <= expected.token_count
        )

    def _settle(self, send: Send, error: str) -> None:
        if self.is_dead or send.send_id not in self._sends_open:
            return
        is_quiet = self._under_way[send.send_id] == 0
        if not is_quiet and not error:
            self._after(0.01, lambda: self._settle(send, error))
            return
        del self._sends_open[send.send_id]
        if send.transfer_id in self._cancelled:
            error = "cancelled"
        elif send.send_id in self._refused:
            error = "refused by the target"
        nbytes = (send.token_stop - send.token_start) * 8
        is_quiet = self._under_way[send.send_id] == 0
        self._say(SendSettled(send.send_id, send.transfer_id, 0, error, nbytes, 1, 0.001, is_quiet))
        for r in range(1, self.facts.rank_count):
            self._say(SendSettled(send.send_id, send.transfer_id, r, error, 0, 0, 0.0))

    def _close(self, peer: str) -> None:
        for send in list(self._sends_open.values()):
            if send.peer == peer:
                self._settle(send, "closed")
        self.targets.pop(peer, None)
        for rank in range(self.facts.rank_count):
            self._after(self._rng.uniform(0.0001, 0.02), lambda rank=rank: self._shut(peer, rank))

    def _shut(self, peer: str, rank: int) -> None:
        """Nothing gets in through a door that is closed, and only then that is said."""
        if rank == 0:
            self.doors.pop(peer, None)
        self._say(PeerClosed(peer, rank))
