"""Who begins before whom, held against an account of its own: nobody begins while another one, who
is before it, waits and fits.

Asked before each decision is applied, when the pages that it takes are still there. Says nothing of
requests that wait for more than pages: those of rooms and of servers that failed them, those that
wait for what another one computes or brings, and those behind the first few, which are looked at in
turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from common.scheduling.fair_share import FairShare
from common.scheduling.prefix_cache import NOTHING
from common.scheduling.waiting_queue import FIRST_COUNT
from decode_server.decisions import ComputeHere, Reserve, Split
from decode_server.request import DecodeRequest
from decode_server.scheduler import DecodeScheduler
from prefill_server.admission import GiveUpHeld, Schedule
from prefill_server.request import PrefillRequest
from prefill_server.scheduler import PrefillScheduler


class WatchedShare(FairShare):
    """What each client was served, counted beside the real account."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self._seen_waiting: Counter[str] = Counter()
        self._seen_floor = 0
        self._seen_last = ""

    def begin_waiting(self, client: str) -> None:
        super().begin_waiting(client)
        if not self._seen_waiting[client]:
            others = [self.seen[one] for one, count in self._seen_waiting.items() if count]
            least = min(others) if others else self.seen[self._seen_last]
            self._seen_floor = max(self._seen_floor, least)
            self.seen[client] = max(self.seen[client], self._seen_floor)
        self._seen_waiting[client] += 1

    def end_waiting(self, client: str) -> None:
        super().end_waiting(client)
        self._seen_waiting[client] -= 1
        if not self._seen_waiting[client]:
            self._seen_last = client

    def charge(self, client: str, token_count: int, cost: int = 1) -> None:
        super().charge(client, token_count, cost)
        self.seen[client] = max(0, self.seen[client] + cost * token_count)


def watch(core: DecodeScheduler | PrefillScheduler) -> None:
    """Hold every decision of a core that has just been made against the order."""
    share = WatchedShare()
    core.requests.queue.share = share
    if isinstance(core, DecodeScheduler):
        _watch_decode(core, share)
    else:
        _watch_prefill(core, share)


# ---- decode servers ------------------------------------------------------------------------------


def _watch_decode(core: DecodeScheduler, share: WatchedShare) -> None:
    decide = core._admission.decide

    def watched(now: float) -> Iterator[Reserve | ComputeHere | Split]:
        for decision in decide(now):
            if not isinstance(decision, Split):
                _check_decode(core, share, decision)
            yield decision

    core._admission.decide = watched  # type: ignore[method-assign]


def _check_decode(
    core: DecodeScheduler, share: WatchedShare, decision: Reserve | ComputeHere
) -> None:
    one, admission = decision.request, core._admission
    if isinstance(decision, ComputeHere) and not core._is_local and not one.is_computed_here:
        return  # a rest, which takes no prefill server
    if isinstance(decision, Reserve) and (one.room is not None or one.tested_link or one.is_held):
        return
    rank = _rank(one, share)
    for other in _first_of_each(core, share):
        if other is one or _rank(other, share) >= rank:
            continue
        if isinstance(decision, Reserve):
            longest = decision.source.request_token_max
            is_bound = other.bootstrap is not None or other.tested_link or other.tried_links
            if is_bound or other.is_computed_here or len(other.token_ids) > longest:
                continue
            match = admission._match_to_receive(other)
            if core.requests.arriving._first and other.digests:
                key = core.requests.arriving._key(other, match.block_count)
                if key in core.requests.arriving._first:
                    continue
            needs = core.account.needs_to_receive(NOTHING, len(other.token_ids))
        else:
            if not (core._is_local or other.is_computed_here):
                continue
            needs = core.account.needs_behind(NOTHING, len(other.token_ids) + 1)
        samples = core.requests.samples.needs(other)
        needs = [a + b for a, b in zip(needs, samples, strict=True)]
        assert not admission._fits_grown(other, needs), (
            f"request {one.request_id} begins before request {other.request_id}, "
            f"{rank} before {_rank(other, share)}"
        )


def _rank(request: DecodeRequest, share: WatchedShare) -> tuple[int, bool, int]:
    """Requests of a smaller one are before those of a larger one."""
    is_new = not request.requested_at
    return -request.claim.priority, is_new, share.seen[request.claim.client] if is_new else 0


def _first_of_each(core: DecodeScheduler, share: WatchedShare) -> list[DecodeRequest]:
    """Of each priority, those that every round looks at."""
    queue = core.requests.queue
    ready = [one for one in queue if one.request_id not in queue._aside]
    ready.sort(key=lambda one: (_rank(one, share), queue._keys[one.request_id]))
    counts: Counter[int] = Counter()
    first: list[DecodeRequest] = []
    for one in ready:
        counts[one.claim.priority] += 1
        if counts[one.claim.priority] <= FIRST_COUNT:
            first.append(one)
    return first


# ---- prefill servers -----------------------------------------------------------------------------


def _watch_prefill(core: PrefillScheduler, share: WatchedShare) -> None:
    decide = core._admission.decide

    def watched(now: float) -> Iterator[Schedule | GiveUpHeld]:
        for decision in decide(now):
            if isinstance(decision, Schedule):
                _check_prefill(core, share, decision.request)
            yield decision

    core._admission.decide = watched  # type: ignore[method-assign]


def _check_prefill(core: PrefillScheduler, share: WatchedShare, one: PrefillRequest) -> None:
    queue, admission = core.requests.queue, core._admission
    oldest: dict[tuple[int, str], PrefillRequest] = {}
    for other in sorted(queue, key=lambda each: queue._keys[each.request_id]):
        if other.request_id not in queue._aside:
            oldest.setdefault((other.claim.priority, other.claim.client), other)

    def rank(request: PrefillRequest) -> tuple[int, int]:
        return -request.claim.priority, share.seen[request.claim.client]

    for other in oldest.values():
        if rank(other) < rank(one):
            needs = core.account.needs_behind(NOTHING, len(other.token_ids))
            is_short = admission._is_short(other) or not core.account.can_allocate(needs)
            assert is_short, (
                f"request {one.request_id} of the prefill server is computed before request "
                f"{other.request_id}, {rank(one)} before {rank(other)}"
            )
