"""A worker whose cache is an array of token ids: a wrong or missing page changes the output.

It keeps the real worker's contract: steps run one after the other and write their pages when they
end; a hand-over copies in two pieces with time between them and settles after the second. The next
token is a digest of what is read through the page table, so the oracle needs no pages at all.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.config import HandOver
from common.protocol.local import (
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
    RankDescriptor,
    SchedulerToWorker,
    Send,
    SendSettled,
    Step,
    StepDone,
    WorkerToScheduler,
)
from common.scheduling.facts import ServerFacts

VOCAB_SIZE = 997
UNWRITTEN = -1

After = Callable[[float, Callable[[], None]], None]
Reply = Callable[[WorkerToScheduler], None]


def next_token(tokens: list[int], window: int) -> int:
    """What the model says after `tokens`, of which its other half sees the last `window` only."""
    return digest(tokens + tokens[len(tokens) - min(window, len(tokens)) :])


def digest(read: list[int]) -> int:
    """The oracle and the workers share only this."""
    return zlib.crc32(np.asarray(read, dtype=np.int64).tobytes()) % VOCAB_SIZE


@dataclass
class _Known:
    """pages: per page group, page ids by logical index; the latest grant of an index counts."""

    tokens: list[int]
    pages: list[dict[int, int]]


class SimWorker:
    """The only rank of one simulated server."""

    def __init__(self, facts: ServerFacts, rng: random.Random, after: After, reply: Reply) -> None:
        self.facts = facts
        self.page_size = facts.layout.page_size
        self.pools = [
            np.full((count + 1, self.page_size), UNWRITTEN, dtype=np.int64)
            for count in facts.page_counts
        ]
        self.lives = [group.live for group in facts.layout.groups]
        self.is_dead = False
        self.targets: dict[str, SimWorker] = {}
        self.expected: dict[int, Expect] = {}
        self._hand_over: dict[str, HandOver] = {}
        self._refused: set[int] = set()
        self._rng = rng
        self._after = after
        self._reply = reply
        self._known: dict[int, _Known] = {}
        self._steps: list[Step] = []
        self._is_computing = False
        self._cancelled: set[int] = set()
        self._sends_open: dict[int, Send] = {}
        self._finished_step = 0
        self._waiting: list[Send] = []

    def handle(self, message: SchedulerToWorker, find: Callable[[str], SimWorker | None]) -> None:
        if self.is_dead:
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
                self._soon(Forgotten(message.transfer_id, 0))
            case OpenPeer():
                descriptor = RankDescriptor(0, b"address", self._regions())
                self._soon(PeerOpened(message.peer, 0, descriptor))
            case ConnectPeer():
                target = find(message.peer)
                if target is not None:
                    self.targets[message.peer] = target
                    self._hand_over[message.peer] = message.hand_over
                    self._soon(PeerConnected(message.peer, 0, "posix"))
            case ClosePeer():
                self._close(message.peer)

    def _regions(self) -> list[tuple[str, int, int, bytes]]:
        groups = zip(self.facts.layout.ranks[0].groups, self.facts.page_counts, strict=True)
        return [
            (f"pages-{index}", 0, group.page_nbytes * (count + 1), b"key")
            for index, (group, count) in enumerate(groups)
        ]

    def _soon(self, message: WorkerToScheduler) -> None:
        self._after(self._rng.uniform(0.0001, 0.002), lambda: self._say(message))

    def _say(self, message: WorkerToScheduler) -> None:
        if not self.is_dead:
            self._reply(message)

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
            self._known[new.request_id] = _Known(list(new.token_ids), [{} for _ in self.pools])
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
            for group in range(len(self.pools)):
                read = self._read(known, group, chunk.start + 1)
                seen = known.tokens[chunk.start + 1 - len(read) : chunk.start + 1]
                assert read == seen, f"request {chunk.request_id} at {chunk.start}, group {group}"
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

    def _write(self, known: _Known, position: int) -> None:
        for pool, pages in zip(self.pools, known.pages, strict=True):
            page = pages[position // self.page_size]
            pool[page, position % self.page_size] = known.tokens[position]

    def _sample(self, known: _Known, count: int) -> int:
        """The full group is read whole, then the window group, if there is one, its window."""
        return digest(
            [t for group in range(len(self.pools)) for t in self._read(known, group, count)]
        )

    def _read(self, known: _Known, group: int, count: int) -> list[int]:
        """What the last of `count` tokens sees in a group."""
        width = self.lives[group].size or count
        positions = range(max(0, count - width), count)
        pages = [known.pages[group][position // self.page_size] for position in positions]
        rows = np.array(positions) % self.page_size
        values: list[int] = self.pools[group][pages, rows].tolist()
        return values

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
        self._after(first, lambda: self._copy(send, target, send.token_start, middle))
        wait = scatter_at - second
        self._after(second, lambda: self._copy(send, target, middle, send.token_stop, wait))
        self._after(scatter_at + 0.0001, lambda: self._settle(send, ""))

    def _copy(
        self, send: Send, target: SimWorker | None, start: int, stop: int, wait: float = 0.0
    ) -> None:
        """wait: how long what is staged lies in its slot."""
        is_open = send.send_id in self._sends_open
        if self.is_dead or not is_open or target is None or target.is_dead:
            return
        if send.transfer_id in self._cancelled or send.send_id in self._refused:
            return
        rows = [(0, position) for position in range(start, stop)]
        if send.is_final and stop == send.token_stop:
            # A window is final with the prompt, and leaves by absolute position.
            rows += [
                (group, position)
                for group, live in enumerate(self.lives)
                if not live.is_streamable
                for position in live.items(send.token_stop)
            ]
        values = [self._row(send.source_pages, group, at).copy() for group, at in rows]
        if not self._is_staged(send):
            target.write(send, rows, values)
            return

        def scatter() -> None:
            if target.expects(send, self.facts.incarnation):
                target.write(send, rows, values)
            else:
                self._refused.add(send.send_id)

        self._after(wait, scatter)

    def write(
        self, send: Send, rows: list[tuple[int, int]], values: list[NDArray[np.int64]]
    ) -> None:
        """Into this target's pages, at these (group, position)."""
        if self.is_dead:
            return
        for (group, position), value in zip(rows, values, strict=True):
            self._row(send.target_pages, group, position)[...] = value

    def _row(
        self, lists: list[tuple[int, list[int]]], group: int, position: int
    ) -> NDArray[np.int64]:
        """The one token of a position, as a view."""
        first, pages = lists[group]
        index = position // self.page_size - first
        assert 0 <= index < len(pages), f"position {position} is not in pages {first}.. of {group}"
        return self.pools[group][pages[index], position % self.page_size, None]

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
        if self.is_dead or self._sends_open.pop(send.send_id, None) is None:
            return
        if send.transfer_id in self._cancelled:
            error = "cancelled"
        elif send.send_id in self._refused:
            error = "refused by the target"
        nbytes = (send.token_stop - send.token_start) * 8
        self._reply(SendSettled(send.send_id, send.transfer_id, 0, error, nbytes, 1, 0.001))

    def _close(self, peer: str) -> None:
        for send in list(self._sends_open.values()):
            if send.peer == peer:
                self._settle(send, "closed")
        self.targets.pop(peer, None)
        self._soon(PeerClosed(peer, 0))
