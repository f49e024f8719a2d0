"""The tier in host memory of a server without processes: its scheduler's half, and its workers'."""

from __future__ import annotations

from dataclasses import dataclass

from common.protocol.worker import MovePages
from common.scheduling.events import ToWorkers
from common.scheduling.host_tier import HostTier
from common.scheduling.peers import Outbox
from tests.families.server import Server, digests_of


@dataclass(frozen=True)
class Waiting:
    """A request that would begin."""

    request_id: int
    token_ids: list[int]
    digests: bytes


class Aside:
    """A queue in which everybody waits. count: how often one was put back."""

    def __init__(self) -> None:
        self.count = 0

    def __contains__(self, request_id: int) -> bool:
        return True

    def set_aside(self, request: Waiting) -> None:
        pass

    def put_back(self, request: Waiting) -> None:
        self.count += 1


class Tier:
    """Copies are made as soon as they are sent."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._outbox = Outbox()
        rank_count = len(server.layout.ranks)
        self.scheduled: HostTier[Waiting] = HostTier(
            server.account, Aside(), self._outbox, rank_count
        )

    def empty_pool(self) -> None:
        """All that nobody uses leaves the pool, and what the tier has room for is saved."""
        while self.scheduled.saves_for(self._server.account.pool.page_counts):
            self._carry_out()

    def load(self, prompt: list[int], token_max: int, *, is_received: bool = False) -> None:
        """What a request would wait for."""
        digests = digests_of(prompt, self._server.lookahead)
        waiting = Waiting(self._server.take_id(), prompt, digests)
        while self.scheduled.holds_up(waiting, token_max, is_received=is_received):
            self._carry_out()

    def _carry_out(self) -> None:
        for effect in self._outbox.take():
            if isinstance(effect, ToWorkers) and isinstance(effect.message, MovePages):
                for pages in self._server.host_pages:
                    self.scheduled.note_moved(pages.run(effect.message))

    def flip(self, group: int) -> None:
        """One bit of every page of a group in host memory."""
        for rank, pages in zip(self._server.layout.ranks, self._server.host_pages, strict=True):
            nbytes = rank.groups[group].page_nbytes
            if nbytes:
                pages.buffers[group][nbytes // 2 :: nbytes] ^= 16
