"""Who is next, and whether its pages fit.

Knows nothing of what happens to a request after it was admitted. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from operator import add, le

from common.layout.component import LiveKind
from common.protocol.peer import VERSION_OF_SHARED_ROOMS
from common.scheduling.batcher import Batcher
from common.scheduling.facts import PASSED_OVER_MAX_S
from common.scheduling.followers import Followers
from common.scheduling.host_tier import HostTier
from common.scheduling.page_account import PageAccount
from common.scheduling.prefix_cache import NOTHING, Match
from common.scheduling.sequence import Sequence, reusable_count
from common.transfers.transfers import Transfers
from decode_server.choice import Choice
from decode_server.decisions import ComputeHere, Reserve, Split
from decode_server.expected_time import ExpectedTime
from decode_server.output_lengths import Growing
from decode_server.request import DecodeRequest
from decode_server.requests import Requests

# Tokens that the window of every active request is expected to grow by soon.
WINDOW_TOKENS = 64
# What a rest may take to compute here while no prefill server can be asked.
MISSING_S = 2.0
# The growth of all is found anew when one in so many came or left.
GROWTH_RATIO = 16
# Requests that are looked at in vain, one after the other, until a round ends: a queue can be long,
# and streams wait for the next step.
VAIN_COUNT_MAX = 16


@dataclass(frozen=True, slots=True)
class Short:
    """A request's pages are not there."""


class Admission:
    """Chooses requests that leave the waiting queue, as many as find pages beside those that the
    active ones are expected to grow by: then a newcomer seldom pushes another request out.

    is_local: this server computes all prompts. computes_rests: it computes short rests of prompts
    whose beginning is here. Writes nothing.
    """

    def __init__(
        self,
        account: PageAccount,
        batcher: Batcher,
        choice: Choice,
        requests: Requests,
        transfers: Transfers,
        times: ExpectedTime,
        tier: HostTier[DecodeRequest],
        *,
        is_local: bool,
        computes_rests: bool,
    ) -> None:
        self._account = account
        self._batcher = batcher
        self._choice = choice
        self._requests = requests
        self._incoming = transfers.incoming
        self._writers = transfers.writers
        self._is_local = is_local
        self._computes_rests = computes_rests
        self._times = times
        self._tier = tier
        self._followers = Followers(requests.queue, batcher)
        self._growth = (-1, 0, 0)

    @property
    def active_count(self) -> int:
        """Requests that have pages, those of transfers under way included."""
        batcher = self._batcher
        computing_count = batcher.running_count + batcher.prompt_count + batcher.ready_count
        return computing_count + self._incoming.under_way_count

    def decide(self, now: float) -> Iterator[Reserve | ComputeHere | Split]:
        """One request after the other. Each decision is applied before the next one is made.

        No one begins that is less urgent than another one that fits. One that does not fit may be
        passed by those behind it for a while, and then keeps the pages that come back for itself.
        """
        if self._writers.trouble:
            return
        self._followers.wake()
        vain_count, may_ask_any = 0, not self._is_local and self._choice.may_ask_any(now)
        for request in self._requests.queue.looks():
            if vain_count == VAIN_COUNT_MAX or self._may_begin_none():
                return
            is_here = self._is_local or request.is_computed_here
            if is_here:
                may_begin = not self._batcher.is_full
            elif request.bootstrap_link is not None:
                may_begin = self._choice.choose(request, now) is not None
            else:
                may_begin = may_ask_any or self._computes_rests
            if not may_begin:
                continue
            vain_count += 1
            decision = self._here(request) if is_here else self._elsewhere(request, now)
            if isinstance(decision, Short):
                if self._is_late(request, now):
                    return
            elif decision is not None:
                yield decision
                vain_count = 0
                may_ask_any = not self._is_local and self._choice.may_ask_any(now)

    def _may_begin_none(self) -> bool:
        """Whether whoever begins now would wait for a place in the batch with its pages."""
        return self._batcher.ready_count > 0 or (self._is_local and self._batcher.is_full)

    def _here(self, request: DecodeRequest) -> ComputeHere | Short | None:
        """A request whose prompt this server computes itself; None if it waits for another one."""
        match, reusable = self._match_to_compute(request)
        tokens, digests = request.token_ids, request.digests
        if self._followers.follows(request, match, digests, reusable, len(tokens)):
            return None
        if not self._fits_grown(request, self._needs_to_compute(request, match)):
            return Short()
        if self._tier.holds_up(request, reusable):
            return None
        return ComputeHere(request, self._match_to_compute(request)[0])

    def _elsewhere(
        self, request: DecodeRequest, now: float
    ) -> Reserve | ComputeHere | Split | Short | None:
        """A request that a prefill server is asked for, or a rest that is computed here sooner.

        Pages bound the transfers under way, for how many it takes to keep the batch full depends
        on how long prefill servers take. Nothing more is asked for while caches that have come wait
        for a place in the batch.
        """
        decision = self._decide_one(request, now)
        if decision is None or isinstance(decision, Split):
            return decision
        if isinstance(decision, Reserve) and not self._fits_to_receive(decision):
            return Short()
        if self._is_held_up(decision):
            return None
        decision = self._found_anew(decision)
        if isinstance(decision, Reserve) and not self._fits_to_receive(decision):
            return None  # what is being saved is not free yet
        return decision

    def _is_held_up(self, decision: Reserve | ComputeHere) -> bool:
        """Whether it waits for what is saved in host memory, or comes from there. What could be
        computed here comes with what that takes."""
        request = decision.request
        is_asked = isinstance(decision, Reserve)
        may_compute = self._computes_rests and request.room is None and not request.tested_link
        if not is_asked or may_compute:
            _, token_max = self._match_to_compute(request)
            if self._tier.holds_up(request, token_max):
                return True
        if not isinstance(decision, Reserve) or not decision.source.remote.sends_rest:
            return False
        return self._tier.holds_up(request, len(request.token_ids), is_received=True)

    def _found_anew(self, decision: Reserve | ComputeHere) -> Reserve | ComputeHere:
        """The same, with what is here now that there is room."""
        request = decision.request
        if isinstance(decision, ComputeHere):
            return replace(decision, match=self._match_to_compute(request)[0])
        is_known = decision.source.remote.sends_rest
        return replace(decision, match=self._match_to_receive(request) if is_known else NOTHING)

    def _decide_one(
        self, request: DecodeRequest, now: float
    ) -> Reserve | ComputeHere | Split | None:
        """What would be done with a request if its pages were there; None if it waits."""
        if self._is_quicker_here(request, now):
            match, _ = self._match_to_compute(request)
            return ComputeHere(request, match, is_rest=True)
        match = self._match_to_receive(request)
        is_free = request.room is None and not request.tested_link
        if is_free and self._requests.arriving.is_awaited(request, match.block_count):
            return None
        source = self._choice.choose(request, now)
        if source is None:
            return None
        knows_samples = source.remote.version >= VERSION_OF_SHARED_ROOMS
        if request.children and request.room is not None and not knows_samples:
            return Split(request)
        return Reserve(request, source, match if source.remote.sends_rest else NOTHING)

    def _fits_to_receive(self, reserve: Reserve) -> bool:
        request = reserve.request
        needs = self._account.needs_to_receive(reserve.match, len(request.token_ids))
        needs = list(map(add, needs, self._requests.samples.needs(request)))
        return self._fits_grown(request, needs)

    def _needs_to_compute(self, request: DecodeRequest, match: Match) -> list[int]:
        """Pages per group that it takes to compute a prompt here, those of its samples included."""
        needs = self._account.needs_behind(match, len(request.token_ids) + 1)
        return list(map(add, needs, self._requests.samples.needs(request)))

    @staticmethod
    def _is_late(request: DecodeRequest, now: float) -> bool:
        """Whether no other one may pass it any more."""
        return now - request.waiting_since > PASSED_OVER_MAX_S

    def _match_to_compute(self, request: DecodeRequest) -> tuple[Match, int]:
        """What is here to go on from, and how many tokens that may be at most."""
        tokens = request.token_ids
        count = len(tokens) - 1
        if not request.output_count:
            count = reusable_count(tokens, request.sampling)
        return self._account.match(request.digests, tokens, count), count

    def _match_to_receive(self, request: DecodeRequest) -> Match:
        return self._account.match(request.digests, request.token_ids, len(request.token_ids))

    def _is_quicker_here(self, request: DecodeRequest, now: float) -> bool:
        """Whether the rest of a prompt is computed sooner than a prefill server's would be here. It
        may take longer as the other one would have more to compute: its cache lacks the answers.
        One that a router named may have computed it already, and its other half waits."""
        if not self._computes_rests or request.tested_link or request.room is not None:
            return False
        if self._batcher.is_full:
            return False
        match, _ = self._match_to_compute(request)
        token_count = len(request.token_ids)
        lacking = token_count - match.token_count
        computed_s = self._times.computed_s(lacking)
        if not match.token_count or computed_s is None:
            return False
        source = self._choice.choose(request, now)
        asked_s = MISSING_S
        if source is not None:
            lacking_there = token_count - self._times.cached_there(source, request)
            asked_s = self._times.asked_s(source, request) * max(1.0, lacking_there / lacking)
        if computed_s > asked_s:
            return False
        return self._fits_grown(request, self._needs_to_compute(request, match))

    @property
    def followed_count(self) -> int:
        """How often a request waited for what another one computed, or had sent."""
        return self._followers.count + self._requests.arriving.count

    def short_count(self, queue: Sized, now: float) -> int:
        """Of those that wait, how many wait for pages or places here: all, unless no prefill server
        can be asked at the moment."""
        return len(queue) if self._choice.may_ask_any(now) else 0

    @property
    def may_starve(self) -> bool:
        """Whether nothing runs, and pages are in quarantine."""
        pool = self._account.pool
        groups = range(len(pool.page_counts))
        return not self.active_count and any(map(pool.quarantined_count, groups))

    def is_starved(self, first: DecodeRequest | None) -> bool:
        """Whether quarantined pages alone keep the next request out."""
        if first is None or not self.may_starve:
            return False
        match, _ = self._match_to_compute(first)
        needs = self._needs_to_compute(first, match)
        return not all(map(le, needs, self._room()))

    def _fits_grown(self, request: DecodeRequest, needs: list[int]) -> bool:
        """Whether a newcomer's pages fit, and those that it is expected to grow by. Alone, it may
        have what there is."""
        room = self._room()
        if not all(map(le, needs, room)):
            return False
        growth = 0
        if self.active_count:
            growth = self._requests.answers.lengths.expected_growth(self._growing(request))
        return all(
            need + self._pages_of(group, growth) <= available
            for group, (need, available) in enumerate(zip(needs, room, strict=True))
        )

    def _room(self) -> list[int]:
        """Pages per group that a newcomer may take; below 0 if the active ones may need more."""
        return [
            self._account.available_count(group) - self._headroom(group)
            for group in range(len(self._account.groups))
        ]

    def _headroom(self, group: int) -> int:
        """Pages of a group that the active requests are expected to need, and for each one that is
        filled in part. A window stops growing, a slot or a tail is all there from the start."""
        live, page_items = self._account.groups[group].live, self._account.groups[group].page_items
        if live.kind is LiveKind.WINDOW:
            page_max = self.active_count * self._account.decode_page_max(group)
            headroom = self.active_count * -(-WINDOW_TOKENS // page_items)
            return min(headroom, max(0, page_max - self._account.pool.used_count(group)))
        if not live.is_paged:
            return 0
        return self._pages_of(group, self._expected_growth()) + self.active_count

    def _pages_of(self, group: int, growth: int) -> int:
        """Pages of a group for so many tokens more, where it grows with each."""
        page_group = self._account.groups[group]
        if not page_group.live.is_paged or page_group.live.kind is LiveKind.WINDOW:
            return 0
        items = -(-growth // max(1, page_group.live.size))
        return -(-items // page_group.page_items)

    def _expected_growth(self) -> int:
        """Tokens of all active requests; found anew with every step, for it takes a while. Of the
        many that one round may add, each counts as the mean of those before it."""
        step_count, active_count = self._batcher.step_count, self.active_count
        found_at, found_count, growth = self._growth
        change = abs(active_count - found_count)
        if found_at == step_count and 0 < change * GROWTH_RATIO <= found_count:
            return -(-growth * active_count // found_count)
        if change or found_at != step_count:
            active: list[DecodeRequest | Sequence] = [
                *self._batcher.sequences(),
                *self._requests.transferring,
            ]
            growing = [growing for one in active for growing in self._growing(one)]
            growth = self._requests.answers.lengths.expected_growth(growing)
            self._growth = (step_count, active_count, growth)
        return self._growth[2]

    def _growing(self, one: DecodeRequest | Sequence) -> list[Growing]:
        """What may grow of one: each of its samples."""
        token_count = len(one.token_ids)
        left_count = one.sampling.max_new_tokens - one.output_count
        left_count = min(left_count, self._batcher.limits.sequence_token_max - token_count)
        growing = Growing(token_count, one.output_count, max(0, left_count))
        return [growing] * one.sample_count
