"""Servers of one role that ask each other for caches: real cores, and a policy that lends.

A borrower asks by room for the cache of a prompt that the other server has computed, or for what
lies behind a prefix that it keeps. The lender sends what it has, and as the first token one that
the tests choose. Knows nothing of time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.failures import Failure, FailureKind
from common.request import Bootstrap, Origin, TransferTrace
from common.scheduling.facts import SchedulerLimits, ServerFacts
from common.scheduling.prefix import Prefix
from common.scheduling.sequence import Sequence
from common.transfers.incoming_transfer import Ask, CacheFailed, CacheReady, IncomingTransfer
from common.transfers.outgoing import ALL_COMPUTED, CacheAsked, OutgoingTransfer
from common.transfers.transfers import (
    AbortAsked,
    SendProgressed,
    TargetLost,
    TransferEvent,
    Transfers,
)
from decode_server.scheduler import DecodeScheduler
from prefill_server.scheduler import PrefillScheduler
from tests.sim.invariants import check_pages
from tests.sim.node import Node
from tests.sim.world import World

FIRST_TOKEN = 5
BUDGET_S = 30.0
# What lies in the pages of a prefix: no token and no sum of tokens.
POISON = -7


@dataclass(frozen=True)
class Lent:
    """A cache that has come, and its tokens."""

    transfer: IncomingTransfer
    tokens: list[int]


class Lending:
    """The policy that a lending core adds to the core of its role.

    holds: by room, the sequences whose caches are lent. wanted: by room, the tokens of the caches
    that were asked for. arrived: those that came; failed: why others did not.
    prefixes: kept here until the node drops them. early_stops: tokens after which Sends end before
    the final one.
    """

    def __init__(self, transfers: Transfers) -> None:
        self.transfers = transfers
        self.holds: dict[int, Sequence] = {}
        self.wanted: dict[int, list[int]] = {}
        self.arrived: list[Lent] = []
        self.failed: list[Failure] = []
        self.prefixes: list[Prefix] = []
        self.early_stops: list[int] = []

    def ask(
        self,
        source_incarnation: str,
        room: int,
        tokens: list[int],
        prefix: Prefix | None = None,
    ) -> None:
        """Ask the server that is connected under an incarnation for the cache of a room.

        prefix: that is kept here of it.
        """
        source = self.transfers.links.connections.of_incarnation(source_incarnation)
        assert source is not None and source.is_source
        self.wanted[room] = tokens
        ask = Ask(room, [], 0, None, BUDGET_S, Origin())
        self.transfers.incoming.reserve(source, 1000 + room, room, len(tokens), ask, prefix)

    def apply(self, events: list[TransferEvent], now: float) -> None:
        for event in events:
            match event:
                case CacheAsked(transfer=transfer):
                    self._lend(transfer, now)
                case SendProgressed(transfer=transfer):
                    self._end_if_settled(transfer, now)
                case AbortAsked(transfer=transfer):
                    self._stop(transfer, Failure(FailureKind.ABORTED, event.reason), now)
                case TargetLost(transfers=orphans):
                    for transfer in orphans:
                        self._stop(transfer, Failure(FailureKind.PEER_LOST, event.reason), now)
                case CacheReady(transfer=received, owner=room):
                    self.arrived.append(Lent(received, self.wanted[room]))
                case CacheFailed(failure=failure):
                    self.failed.append(failure)

    def _lend(self, transfer: OutgoingTransfer, now: float) -> None:
        assert transfer.room is not None
        sequence = self.holds.get(transfer.room)
        if sequence is None:
            self.transfers.outgoing.refuse(transfer, Failure(FailureKind.NOT_HELD, "none"), now)
            return
        pages, stop = sequence.page_lists(), transfer.token_count
        for early in self.early_stops:
            if early < stop:
                send = self.transfers.outgoing.send
                send(transfer, pages, early, ALL_COMPUTED, is_final=False)
        self.transfers.outgoing.send(transfer, pages, stop, ALL_COMPUTED, is_final=True)
        self.transfers.outgoing.ask_digests(transfer, pages)

    def _stop(self, transfer: OutgoingTransfer, failure: Failure, now: float) -> None:
        transfer.failure = transfer.failure or failure
        self.transfers.outgoing.cancel(transfer)
        self._end_if_settled(transfer, now)

    def _end_if_settled(self, transfer: OutgoingTransfer, now: float) -> None:
        outgoing = self.transfers.outgoing
        if transfer.failure is not None and not transfer.sends_open:
            outgoing.refuse(transfer, transfer.failure, now)
        elif transfer.failure is None and not transfer.is_on_its_way:
            outgoing.finish(transfer, [FIRST_TOKEN], TransferTrace(), [], [])


class LendingDecode(DecodeScheduler):
    """A decode server that computes its own prompts, and lends what it runs."""

    def __init__(
        self, facts: ServerFacts, limits: SchedulerLimits, links: list[str], seed: int
    ) -> None:
        super().__init__(facts, limits, links, is_local=True, sends=True, seed=seed)
        self.lending = Lending(self.transfers)

    def _apply_events(self, events: list[TransferEvent], now: float) -> None:
        self.lending.apply(events, now)


class LendingPrefill(PrefillScheduler):
    """A prefill server that lends what it holds."""

    def __init__(
        self, facts: ServerFacts, limits: SchedulerLimits, links: list[str], seed: int
    ) -> None:
        super().__init__(facts, limits, links, receives=True, seed=seed)
        self.lending = Lending(self.transfers)

    def _apply_events(self, events: list[TransferEvent], now: float) -> None:
        self.lending.apply(events, now)


class LendingNode(Node):
    """A simulated server with a lending core."""

    def make_core(self, limits: SchedulerLimits) -> LendingDecode | LendingPrefill:
        kind = LendingPrefill if self.role == "prefill" else LendingDecode
        return kind(self.facts, limits, self.links, self.world.rng.getrandbits(32))

    def dials(self, other: Node) -> bool:
        return f"{other.name}:1" in self.links

    def check(self) -> None:
        """Its transfers belong to no request."""
        arrived = [lent.transfer for lent in self.lending.arrived]
        check_pages(self.core, arrived, self.lending.prefixes)

    @property
    def lending(self) -> Lending:
        assert isinstance(self.core, LendingDecode | LendingPrefill)
        return self.core.lending

    @property
    def border(self) -> int:
        """Tokens after which whole pages end in every group that grows."""
        groups = self.core.account.groups
        return math.lcm(*(group.page_tokens for group in groups if group.live.is_streamable))

    def keep_prefix(self, token_count: int) -> Prefix:
        """Pages of so many tokens, which hold what no transfer brings."""
        account = self.core.account
        counts = [
            token_count // group.page_tokens if group.live.is_streamable else 0
            for group in account.groups
        ]
        prefix = Prefix(token_count, account.allocate(counts))
        self.lending.prefixes.append(prefix)
        for group, place in self._places(prefix):
            self.worker.cache.leave([(0, pages) for pages in prefix.pages], group, place, POISON)
        return prefix

    def drop_prefixes(self) -> None:
        """Nothing was written to any of them."""
        while self.lending.prefixes:
            prefix = self.lending.prefixes.pop()
            pages = [(0, list(ids)) for ids in prefix.pages]
            for group, place in self._places(prefix):
                assert self.worker.cache.take(pages, group, place) == POISON
            for group, ids in enumerate(prefix.pages):
                self.core.account.pool.release(group, ids)

    def _places(self, prefix: Prefix) -> list[tuple[int, int]]:
        """(group, item) of all rows of its pages."""
        return [
            (index, item)
            for index, (group, ids) in enumerate(
                zip(self.core.account.groups, prefix.pages, strict=True)
            )
            for item in range(len(ids) * group.page_items)
        ]

    def hold(self, room: int, prompt: list[int]) -> None:
        """Have a prompt computed, and keep its cache: a decode server runs it for long, a prefill
        server holds it."""
        engine = self.facts.incarnation if self.role == "prefill" else ""
        bootstrap = Bootstrap("", 1, room, engine) if engine else None
        client = self.world.submit(self, prompt, 1 if engine else 400, bootstrap, 1000.0)
        while not client.output:
            self.world.run(self.world.now + 0.01)
        core = self.core
        if isinstance(core, PrefillScheduler):
            request = core.requests.of_room(room)
            sequence = request.sequence if request is not None else None
        else:
            running = core.requests.get(client.request_id)
            sequence = running.sequence if running is not None else None
        assert sequence is not None
        self.lending.holds[room] = sequence


def lending_pair(world: World, role: str) -> tuple[LendingNode, LendingNode]:
    """Two servers of a role; the second one dials the first. Not booted yet."""
    first = LendingNode(world, "a", role, 4, 90)
    second = LendingNode(world, "b", role, 8, 60)
    second.links = ["a:1"]
    for node in (first, second):
        node.self_test_interval_s = 0.0
        node.page_counts = (node.pages,) * len(world.lives)
        world.nodes[node.name] = node
    return first, second
