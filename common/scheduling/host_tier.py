"""What leaves the pool of a server goes to host memory, and comes back when a prompt wants it.

    prefix cache of the pool   ── evicted next, when pages are short ──►   prefix cache of the tier
                               ◄── a prompt begins with it ──────────────

Both are prefix caches of the same pages: found by the same keys, bound to the same exact token
counts. The workers copy beside the engine, and the schedulers go on. Who needs pages waits for what
is saved of them; who needs what was saved waits for it to come back. A copy that fails is a
computation more. Knows nothing of what requests are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

from common.protocol.worker import MovePages, PagesMoved
from common.scheduling.followers import Queue
from common.scheduling.page_account import PageAccount
from common.scheduling.page_moves import Move, Part, begin_move
from common.scheduling.peers import Outbox
from common.scheduling.prefix_cache import Match, PrefixCache
from common.scheduling.prefix_tree import Checkpoint, Node

# Share of each group, and of the checkpoints, that is free or saved before it is needed.
SAVED_SHARE = 1 / 8
SAVED_LEAVES_MAX = 64
# How often a request waits for a copy of its beginning: others may need the pages again meanwhile.
LOAD_COUNT_MAX = 3
# Blocks of a copy out of the pool, of which one is under way at a time: a load waits behind it, and
# streams that run share their cores with it. Smaller ones cost the scheduler more turns.
SPILL_BLOCK_MAX = 64
# Tokens that the tier must have more of, for less is computed as quickly.
LOADED_TOKENS_MIN = 16
COUNTED = ("host_saved_tokens", "host_loaded_tokens", "host_failed_loads")


class Cached(Protocol):
    """A request that waits, and may begin as something that was saved does."""

    request_id: int
    token_ids: list[int]
    digests: bytes


R = TypeVar("R", bound=Cached)


@dataclass(slots=True)
class _UnderWay(Generic[R]):
    """left_count: ranks that have not answered. waiting: who needs what comes back."""

    move: Move
    is_spill: bool
    left_count: int
    error: str = ""
    waiting: list[R] = field(default_factory=list)


class HostTier(Generic[R]):
    """Owner of the copies under way, and of who waits for them: those are set aside in the queue.
    Without a tier nobody ever is."""

    def __init__(
        self, account: PageAccount, queue: Queue[R], outbox: Outbox, rank_count: int
    ) -> None:
        self._account = account
        self._queue = queue
        self._outbox = outbox
        self._rank_count = rank_count
        self._under_way: dict[int, _UnderWay[R]] = {}
        self._waiting_for_room: list[R] = []
        self._load_counts: dict[int, int] = {}
        self._next_id = 1
        self.counters = dict.fromkeys(COUNTED, 0.0)
        if self._caches is not None:
            account.saver = self

    @property
    def _caches(self) -> tuple[PrefixCache, PrefixCache] | None:
        """Of the pool and of the tier, if there are both."""
        cache, host = self._account.cache, self._account.host
        return (cache, host) if cache is not None and host is not None else None

    @property
    def moves(self) -> list[Move]:
        """Those under way."""
        return [one.move for one in self._under_way.values()]

    @property
    def waiting(self) -> list[R]:
        """Requests that wait for copies."""
        loading = [request for one in self._under_way.values() for request in one.waiting]
        return loading + self._waiting_for_room

    @property
    def is_moving(self) -> bool:
        return bool(self._under_way)

    # ---- a request waits -------------------------------------------------------------------------

    def holds_up(self, request: R, token_max: int, *, is_received: bool = False) -> bool:
        """Whether a request that would begin now waits for copies: until its pages are free, or
        until more of its prompt is in the pool. It is set aside then. After a no, what was found of
        it has to be found anew, for room was made.

        token_max: of its tokens, how many could be reused. is_received: whether the rest is to come
        from another server, with all states; else it is computed.
        """
        if self._caches is None:
            return False
        cache, host = self._caches
        match = self._account.match(request.digests, request.token_ids, token_max)
        part = self._part_to_load(request, match, token_max, is_received=is_received)
        for one in self._under_way.values():
            is_ours = part is not None and one.move.source_node in part.node.path()
            if is_ours and not one.is_spill:
                return self._wait(request, one.waiting)
        cache.touch(match)
        needs = self._account.needs_of_rest(match, len(request.token_ids), is_received=is_received)
        if self.saves_for(needs):
            return self._wait(request, self._waiting_for_room)
        # What is saved now may have taken the place of what was to be loaded.
        part = self._part_to_load(request, match, token_max, is_received=is_received)
        move = begin_move(host, cache, part) if part is not None else None
        if move is None:
            return False
        counts = self._load_counts
        counts[request.request_id] = counts.get(request.request_id, 0) + 1
        return self._wait(request, self._begin(move, is_spill=False).waiting)

    def _part_to_load(
        self, request: R, match: Match, token_max: int, *, is_received: bool
    ) -> Part | None:
        """What the tier has more of a prompt than the pool has; None if that is not worth a copy,
        or was copied for it often enough."""
        assert self._caches is not None
        cache, host = self._caches
        if self._load_counts.get(request.request_id, 0) >= LOAD_COUNT_MAX:
            return None
        found = host.match(request.digests, request.token_ids, token_max)
        if found.checkpoint is not None and (is_received or not cache.checkpoints.count_max):
            found = host.without_checkpoint(found)
        gain = found.token_count - match.token_count
        if is_received:
            gain = (found.block_count - match.block_count) * host.block_tokens
        if gain < LOADED_TOKENS_MIN or found.node is None:
            return None
        host.touch(found)
        checkpoints = [found.checkpoint] if found.checkpoint is not None else []
        block_count = found.block_count if is_received else host.kept_blocks(found)
        return Part(found.node, block_count, checkpoints)

    def _wait(self, request: R, waiting: list[R]) -> bool:
        self._queue.set_aside(request)
        waiting.append(request)
        return True

    def _put_back(self, requests: list[R]) -> None:
        for request in requests:
            if request.request_id in self._queue:
                self._queue.put_back(request)

    # ---- pages leave -----------------------------------------------------------------------------

    def save_ahead(self) -> None:
        """Save what would be evicted next, so that its pages are free as soon as they are needed.
        Nothing is evicted for that."""
        if self._caches is None:
            return
        cache, _ = self._caches
        self._load_counts = {
            one: count for one, count in self._load_counts.items() if one in self._queue
        }
        pool, left = self._account.pool, 0
        for group, each in enumerate(cache.page_counts):
            if each:
                wanted = int(pool.page_counts[group] * SAVED_SHARE) - pool.free_count(group)
                left = max(left, -(-wanted // each))
        if left > 0:
            self._save_leaves(list(islice(cache.tree.idle_leaves, SAVED_LEAVES_MAX)), left)
        self._save_checkpoints()

    def _save_leaves(self, leaves: list[Node], block_count: int) -> None:
        """Until so many blocks of them are saved."""
        for leaf in leaves:
            if block_count <= 0 or self._is_spilling:
                return
            block_count -= leaf.block_count
            is_saved = leaf.saved_end == leaf.end
            if not is_saved and not self._spill(Part(leaf, leaf.end, idle_checkpoints(leaf))):
                leaf.saved_end = leaf.end

    def saves_for(self, needs: Sequence[int]) -> bool:
        """Make so many pages free, as far as what they hold is saved. Whether they are not, and it
        is being saved."""
        if not any(self._account.pool.shortfall(needs)):
            return False
        self._make_free(needs)
        return self._is_spilling and any(self._account.pool.shortfall(needs))

    def _make_free(self, needs: Sequence[int]) -> None:
        """Evict what is saved, or can't be; begin to save the rest."""
        assert self._caches is not None
        cache, _ = self._caches
        pool = self._account.pool
        while count := cache.blocks_with(pool.shortfall(needs)):
            leaf = next(iter(cache.tree.idle_leaves), None)
            if leaf is None:
                break
            if not self._spill(Part(leaf, leaf.end, idle_checkpoints(leaf))):
                if self._is_spilling:
                    return
                cache.evict_blocks(min(count, leaf.block_count))
        for checkpoint in list(cache.checkpoints.idle()):
            missing = pool.shortfall(needs)
            if not any(n and pages for n, pages in zip(missing, checkpoint.pages, strict=True)):
                continue
            assert checkpoint.node is not None
            if not self._spill(Part(checkpoint.node, checkpoint.block_count, [checkpoint])):
                if self._is_spilling:
                    return
                cache.checkpoints.forget([checkpoint])

    def _save_checkpoints(self) -> None:
        """Those that go next are saved before one more is made."""
        assert self._caches is not None
        checkpoints = self._caches[0].checkpoints
        ahead_count = -(-checkpoints.count_max * SAVED_SHARE // 1)
        if checkpoints.count + ahead_count <= checkpoints.count_max:
            return
        for checkpoint in list(checkpoints.idle())[: int(ahead_count)]:
            if self._is_spilling:
                return
            node = checkpoint.node
            if not checkpoint.is_saved and node is not None:
                checkpoint.is_saved = True
                self._spill(Part(node, checkpoint.block_count, [checkpoint]))

    @property
    def _is_spilling(self) -> bool:
        return any(one.is_spill for one in self._under_way.values())

    def _spill(self, part: Part) -> bool:
        """Begin to save what the tier lacks of a part, or the beginning of that. False if it lacks
        nothing that it has room for, or if something else is being saved."""
        assert self._caches is not None
        cache, host = self._caches
        if self._is_spilling or not cache.tree.is_found(part.node):
            return False
        move = begin_move(cache, host, part, SPILL_BLOCK_MAX)
        if move is None:
            return False
        self._begin(move, is_spill=True)
        return True

    def _begin(self, move: Move, *, is_spill: bool) -> _UnderWay[R]:
        move_id = self._next_id
        self._next_id += 1
        one: _UnderWay[R] = _UnderWay(move, is_spill, self._rank_count)
        self._under_way[move_id] = one
        self._outbox.to_workers(MovePages(move_id, is_spill, move.copies))
        return one

    # ---- copies end ------------------------------------------------------------------------------

    def note_moved(self, moved: PagesMoved) -> None:
        """A rank has made its copies."""
        one = self._under_way[moved.move_id]
        one.left_count -= 1
        one.error = one.error or moved.error
        if one.left_count:
            return
        del self._under_way[moved.move_id]
        if one.error:
            self._fail(one)
        elif one.move.end(is_use=not one.is_spill):
            name = "host_saved_tokens" if one.is_spill else "host_loaded_tokens"
            self.counters[name] += one.move.token_count
        self._put_back(one.waiting)
        if one.is_spill:
            waiting, self._waiting_for_room = self._waiting_for_room, []
            self._put_back(waiting)

    def _fail(self, one: _UnderWay[R]) -> None:
        """What can't be loaded is forgotten, and what can't be saved is lost when its pages are
        needed."""
        move = one.move
        move.fail()
        self._outbox.report(f"host memory: {one.error}", is_warning=True)
        if one.is_spill:
            move.source.evict_blocks(move.stop - move.start)
        else:
            move.withdraw()
            self.counters["host_failed_loads"] += 1


def idle_checkpoints(leaf: Node) -> list[Checkpoint]:
    """Those that go with its blocks."""
    return [one for one in leaf.checkpoints if one.users == 0]
