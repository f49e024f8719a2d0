"""A worker whose cache is arrays of token ids: a wrong or missing page changes the output.

It keeps the real worker's contract: steps run one after the other and write their pages when they
end; a hand-over copies in two pieces with time between them and settles after the second. The next
token is a digest of what is read through the page table, so the oracle needs no pages at all.

Full groups, windows and tails hold token ids, a block holds the sum of its tokens, and a slot the
sum of all tokens so far: one that is stale, mixed up or a token late gives another token.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from common.config import HandOver
from common.layout.component import Live, LiveKind
from common.planner.digests import bucket_count, bucket_of_item, digested_planes
from common.protocol.codec import decode_layout
from common.protocol.local import (
    CancelSends,
    ClosePeer,
    ConnectPeer,
    Digest,
    Digested,
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
    WorkerBeat,
    WorkerToScheduler,
)
from common.scheduling.facts import ServerFacts

VOCAB_SIZE = 997
UNWRITTEN = -1
STATE_MODULUS = 2**31 - 1

After = Callable[[float, Callable[[], None]], None]
Reply = Callable[[WorkerToScheduler], None]


def next_token(tokens: list[int], lives: Sequence[Live]) -> int:
    """What the model says after `tokens`, of which each part of it sees what its rule tells."""
    return digest([value for live in lives for value in seen(tokens, live)])


def seen(tokens: list[int], live: Live) -> list[int]:
    """What a part of the model sees when `tokens` are computed."""
    count = len(tokens)
    match live.kind:
        case LiveKind.FULL:
            return tokens
        case LiveKind.WINDOW:
            return tokens[max(0, count - live.size) :]
        case LiveKind.BLOCK:
            starts = range(0, count - live.size + 1, live.size)
            return [fold(0, tokens[start : start + live.size]) for start in starts]
        case LiveKind.TAIL:
            return tokens[max(0, count - count % live.size - live.back) :]
        case LiveKind.SLOT:
            return [fold(0, tokens)]
        case _:
            assert_never(live.kind)


# The oracle and the workers share only these two.


def digest(read: list[int]) -> int:
    return zlib.crc32(np.asarray(read, dtype=np.int64).tobytes()) % VOCAB_SIZE


def fold(state: int, tokens: list[int]) -> int:
    """A sum in which every token and its place count."""
    for token in tokens:
        state = (state * 31 + token + 1) % STATE_MODULUS
    return state


@dataclass
class Known:
    """pages: per page group, page ids by logical index; the latest grant of an index counts."""

    tokens: list[int]
    pages: list[dict[int, int]]


class SimWorker:
    """All ranks of one simulated server; those behind the first cache nothing."""

    def __init__(self, facts: ServerFacts, rng: random.Random, after: After, reply: Reply) -> None:
        self.facts = facts
        self.groups = facts.layout.groups
        self.lives = [group.live for group in self.groups]
        self.pools = [
            np.full((count + 1, group.page_items), UNWRITTEN, dtype=np.int64)
            for count, group in zip(facts.page_counts, self.groups, strict=True)
        ]
        self.is_dead = False
        self.is_stalled = False
        self._inbox: list[tuple[SchedulerToWorker, Callable[[str], SimWorker | None]]] = []
        self._held: list[WorkerToScheduler] = []
        self.damage_rate = 0.0
        self.damage_rng = random.Random(0)
        self.targets: dict[str, SimWorker] = {}
        self.expected: dict[int, Expect] = {}
        self._hand_over: dict[str, HandOver] = {}
        self._refused: set[int] = set()
        self._rng = rng
        self._after = after
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
        if self.is_stalled:
            self._inbox.append((message, find))
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
                self._after(self._rng.uniform(0.0001, 0.01), lambda: self._digest(message))
            case OpenPeer():
                for rank in range(self.facts.rank_count):
                    descriptor = RankDescriptor(rank, b"address", self._regions(rank))
                    self._soon(PeerOpened(message.peer, rank, descriptor))
            case ConnectPeer():
                target = find(message.peer)
                if target is not None:
                    self.targets[message.peer] = target
                    self._hand_over[message.peer] = message.hand_over
                    for rank in range(self.facts.rank_count):
                        transports = "posix" if rank == 0 else ""
                        self._soon(PeerConnected(message.peer, rank, transports))
            case ClosePeer():
                self._close(message.peer)

    def _regions(self, rank: int) -> list[tuple[str, int, int, bytes]]:
        groups = zip(self.facts.layout.ranks[rank].groups, self.facts.page_counts, strict=True)
        return [
            (f"pages-{index}", 0, group.page_nbytes * (count + 1), b"key")
            for index, (group, count) in enumerate(groups)
        ]

    def _soon(self, message: WorkerToScheduler) -> None:
        self._after(self._rng.uniform(0.0001, 0.002), lambda: self._say(message))

    def _say(self, message: WorkerToScheduler) -> None:
        if self.is_stalled:
            self._held.append(message)
        elif not self.is_dead:
            self._reply(message)

    def beat(self) -> None:
        if not self.is_stalled:
            for rank in range(self.facts.rank_count):
                self._say(WorkerBeat(rank, self._finished_step))

    def thaw(self) -> None:
        """Go on after a stall: what is under way moved on, but neither side heard of the other."""
        self.is_stalled = False
        held, self._held = self._held, []
        for message in held:
            self._say(message)
        inbox, self._inbox = self._inbox, []
        for given, find in inbox:
            self.handle(given, find)

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
        places = [self._place(known, group, item) for item in items]
        return [int(self.pools[group][place]) for place in places]

    def _put(self, known: Known, group: int, item: int, value: int) -> None:
        self.pools[group][self._place(known, group, item)] = value

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
        rows: list[tuple[int, int]] = []
        is_last = send.is_final and stop == send.token_stop
        for group, live in enumerate(self.lives):
            if live.kind is LiveKind.FULL:
                rows += [(group, position) for position in range(start, stop)]
            elif live.kind is LiveKind.BLOCK:
                rows += [(group, item) for item in range(start // live.size, stop // live.size)]
            elif is_last:
                # Final with the prompt only; leaves by absolute position.
                rows += [(group, item) for item in live.items(send.token_stop)]
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
        """Into this target's pages, at these (group, item)."""
        if self.is_dead:
            return
        for (group, item), value in zip(rows, values, strict=True):
            self._row(send.target_pages, group, item)[...] = value
        if rows and self.damage_rng.random() < self.damage_rate:
            group, item = self.damage_rng.choice(rows)
            self._row(send.target_pages, group, item)[...] += 1

    def _digest(self, job: Digest) -> None:
        """What lies in the pages by now, as the real one reads them while others are written."""
        if self.is_dead:
            return
        own = self.facts.layout
        target = decode_layout(job.layout) if job.is_source else own
        count = bucket_count(target)
        for rank in own.ranks:
            digests: list[bytes] = []
            for other in target.ranks if job.is_source else (rank,):
                planes = digested_planes(other, job.verify, job.transfer_id)
                rows = np.zeros((len(planes), count), dtype=np.int64)
                for row, plane in zip(rows, planes, strict=True):
                    items = self.lives[plane.group].items(job.token_count)
                    buckets = bucket_of_item(len(items), count)
                    for item, bucket in zip(items, buckets, strict=True):
                        value = int(self._row(job.pages, plane.group, item)[0])
                        if rank.index == 0:
                            row[bucket] += zlib.crc32(f"{item} {value}".encode())
                digests.append(rows.tobytes())
            self._say(Digested(job.transfer_id, rank.index, digests))

    def _row(self, lists: list[tuple[int, list[int]]], group: int, item: int) -> NDArray[np.int64]:
        """The one value of an item, as a view."""
        first, pages = lists[group]
        row_count = self.groups[group].page_items
        index = item // row_count - first if self.lives[group].is_paged else 0
        assert 0 <= index < len(pages), f"item {item} is not in pages {first}.. of {group}"
        return self.pools[group][pages[index], item % row_count, None]

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
        self._say(SendSettled(send.send_id, send.transfer_id, 0, error, nbytes, 1, 0.001))
        for rank in range(1, self.facts.rank_count):
            self._say(SendSettled(send.send_id, send.transfer_id, rank, error, 0, 0, 0.0))

    def _close(self, peer: str) -> None:
        for send in list(self._sends_open.values()):
            if send.peer == peer:
                self._settle(send, "closed")
        self.targets.pop(peer, None)
        for rank in range(self.facts.rank_count):
            self._soon(PeerClosed(peer, rank))
