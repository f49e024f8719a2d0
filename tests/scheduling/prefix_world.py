"""Random prompts that share beginnings, over a real batcher and account and a memory that tells
whose each row is. After each operation every page must have exactly one owner.

Knows nothing of requests' clients or of peers: caches that come from elsewhere are written by the
world itself.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from common.layout.component import LiveKind
from common.prefix_digests import extend_digests
from common.protocol.worker import StepDone
from common.request import SamplingParams
from common.scheduling.batch_limits import BatchLimits
from common.scheduling.batcher import Batcher
from common.scheduling.page_account import PageAccount
from common.scheduling.sequence import Sequence
from tests.scheduling.prefix_owners import check_owners
from tests.scheduling.prefix_setup import (
    SALTS,
    TOKEN_MAX,
    Arriving,
    Request,
    Sent,
    WatchedAccount,
    own_pages,
    random_layout,
)
from tests.scheduling.prefix_workers import TOKENS, PrefixWorkers, drawn_token

EOS = 0
RUNNING_MAX = 4
WAITING_MAX = 6
# Rounds in which all that was begun has to end.
END_ROUND_MAX = 3000


@dataclass
class World:
    """step_count, and all else of `tally`: what has happened, by name. has_draft: whether rows of
    the cache depend on the next token."""

    rng: random.Random
    has_draft: bool = False
    tally: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        rng = self.rng
        self.layout = random_layout(rng, has_draft=self.has_draft)
        groups = self.layout.groups
        chunk_max = rng.choice([1, 3, 5, 8, 16, 64])
        lone = PageAccount(groups, [0] * len(groups), has_prefix_cache=False)
        counts: list[int] = []
        for index, group in enumerate(groups):
            # What one request needs alone: it must end, whatever is cached.
            least = group.page_end(TOKEN_MAX + 1)
            if group.live.kind is LiveKind.WINDOW:
                least = min(least, lone.decode_page_max(index) + rng.randint(0, 3))
            counts.append(rng.choice([least, least + 1, least + least // 2, 2 * least, 4 * least]))
        self.page_counts = counts
        self.account = WatchedAccount(
            groups,
            counts,
            chunk_max,
            rng.choice([0, 1, 2, 4, 8]),
            rng.choice([2, 4, 4, 16]),
            int(self.has_draft),
        )
        self.is_prompt_only = rng.random() < 0.4
        self.has_bad = rng.random() < 0.3
        limits = BatchLimits(
            chunk_max,
            RUNNING_MAX,
            TOKEN_MAX,
            frozenset({EOS}),
            rng.choice([1, 2]),
            self.is_prompt_only,
        )
        self.batcher = Batcher(self.account, limits)
        self.history: list[tuple[bytes, list[int]]] = [(salt, [1]) for salt in SALTS]
        self.waiting: list[Request] = []
        self.requests: dict[int, Request] = {}
        self.arriving: list[Arriving] = []
        self.leaving: list[Sequence] = []
        self.sent: list[Sent] = []
        self.next_id = 1
        self.is_tainted = False
        self.seen = (-1, False)
        self.workers = PrefixWorkers(
            groups,
            self.account.pool,
            self.requests,
            lambda request: request.may_read_bad or self.is_tainted,
            self.tally,
            has_draft=self.has_draft,
        )

    # ---- operations ------------------------------------------------------------------------------

    def operate(self, number: int) -> None:
        rng = self.rng = random.Random(number)
        names = ["submit", "submit", "open", "open", "plan", "plan", "work", "end", "end", "end"]
        names += ["arrive", "abort", "close", "ask"] + ["flush"] * (rng.random() < 0.1)
        operations: dict[str, Callable[[], None]] = {
            "submit": self.submit,
            "open": self.open_all,
            "plan": self.plan,
            "work": self.work,
            "end": self.end,
            "arrive": self.arrive,
            "abort": self.abort,
            "close": self.close_one,
            "ask": self.ask,
            "flush": self.flush,
        }
        before = [self.account.available_count(g) for g in range(len(self.page_counts))]
        relief = self.account.relief_count
        operations[rng.choice(names)]()
        check_owners(self)
        after = [self.account.available_count(g) for g in range(len(self.page_counts))]
        if any(now > then for now, then in zip(after, before, strict=True)):
            assert self.account.relief_count > relief, "pages are to be had, and nobody is told"

    def submit(self) -> None:
        if len(self.waiting) >= WAITING_MAX:
            return
        rng = self.rng
        salt, known = rng.choice(self.history[-rng.choice([3, 10, 1000]) :])
        shared = known[: rng.choice([0, len(known), rng.randint(0, len(known))])]
        more = [rng.randrange(TOKENS) for _ in range(rng.choice([0, 1, 2, 7, rng.randint(0, 40)]))]
        tokens = (shared + more or [1])[: TOKEN_MAX - 1]
        if rng.random() < 0.2:
            salt = rng.choice(SALTS)
        self.history.append((salt, list(tokens)))
        count = rng.choice([1, 2, 5, 20])
        sampling = SamplingParams(max_new_tokens=count, seed=0, ignore_eos=rng.random() < 0.5)
        has_digests = rng.random() < 0.95
        request = Request(self.next_id, salt, tokens, len(tokens), sampling, has_digests)
        if self.has_bad and rng.random() < 0.15:
            request.bad_from = rng.randint(0, len(tokens))
        self.next_id += 1
        self.waiting.append(request)

    def open_all(self) -> None:
        for request in list(self.waiting):
            if self.batcher.is_full:
                return
            if self._waits(request):
                continue
            if not self._open(request):
                return

    def _digests(self, request: Request) -> bytes:
        if not request.has_digests:
            return b""
        account = self.account
        digests = extend_digests(
            request.salt, request.tokens, account.digest_tokens, account.lookahead
        )
        self.account.note_tokens(digests, request.tokens)
        return digests

    def _waits(self, request: Request) -> bool:
        """Whether another prompt computes what it begins with."""
        if request.writer is not None:
            writer = request.writer
            if self.batcher.computes_prompt(writer) and not self.batcher.has_reached(
                writer, request.wanted
            ):
                return True
            request.writer = None
            return False
        digests, most = self._digests(request), len(request.tokens) - 1
        match = self.account.match(digests, request.tokens, most)
        found = self.batcher.find_writer(match, digests, most)
        if found is None or self.rng.random() < 0.3:
            return False
        request.writer, request.wanted = found
        assert match.token_count < request.wanted <= most or not match.token_count
        self.batcher.stop_at(*found)
        request.writer.wanted_count = max(request.writer.wanted_count, request.wanted)
        self.tally["waited"] += 1
        return True

    def _open(self, request: Request) -> bool:
        digests, tokens = self._digests(request), request.tokens
        match = self.account.match(digests, tokens, len(tokens) - 1)
        assert match.token_count < len(tokens)
        fits = self.account.can_allocate(self.account.needs_behind(match, len(tokens)))
        sequence = self.account.open(
            request.request_id,
            list(tokens),
            request.prompt_count,
            request.sampling,
            digests,
            match,
        )
        assert fits == (sequence is not None)
        if sequence is None:
            is_idle = not (self.account.sequences or self.arriving)
            assert not is_idle, f"{len(tokens)} tokens find no pages in an empty pool: {match}"
            return False
        self.tally["reused"] += match.token_count > 0
        self.tally["reused all but one"] += 0 < match.token_count == len(tokens) - 1
        self.tally["checkpoints used"] += match.checkpoint is not None
        self.tally["found without a checkpoint"] += match.block_count > 0 == match.token_count
        self._begin(request, sequence)
        return True

    def _begin(self, request: Request, sequence: Sequence) -> None:
        self.waiting = [one for one in self.waiting if one is not request]
        request.sequence = sequence
        request.may_read_bad |= self._has_suspects
        self.requests[request.request_id] = request
        self.account.sequences.append(sequence)
        self.batcher.add(sequence)

    @property
    def may_find_bad(self) -> bool:
        """Whether something that comes out wrong is not known to be so yet, or never will be."""
        return self.is_tainted or self._has_suspects

    @property
    def _has_suspects(self) -> bool:
        is_coming = any(one.request.may_read_bad for one in self.arriving)
        return is_coming or any(map(self._is_suspect, self.requests.values()))

    def _is_suspect(self, request: Request) -> bool:
        return request.sequence in self.account.sequences and (
            request.bad_from is not None or request.may_read_bad
        )

    def ask(self) -> None:
        """A cache whose beginning may be here is asked for elsewhere."""
        rng = self.rng
        if not self.waiting or self.is_prompt_only or len(self.arriving) > 2:
            return
        request = rng.choice(self.waiting)
        digests, tokens = self._digests(request), request.tokens
        match = self.account.match(digests, tokens, len(tokens) - rng.choice([0, 1]))
        account, count = self.account, len(tokens)
        if len(tokens) >= TOKEN_MAX or request.prompt_count < len(tokens):
            return
        if not account.can_allocate(account.needs_to_receive(match, count)):
            return
        held = account.cached.hold(match)
        request.may_read_bad = self._has_suspects
        spans, start = account.spans_for_prompt(count), 0
        if held is not None:
            assert account.cache is not None
            start = held.block_count * account.cache.block_tokens
            for span, pages in zip(
                spans, account.cache.pages(held.node, held.block_count), strict=True
            ):
                span.page_ids += pages
            self.tally["held"] += 1
        needs = account.needs(spans, count + 1)
        for span, pages in zip(spans, account.allocate(needs), strict=True):
            span.page_ids += pages
        self.waiting = [one for one in self.waiting if one is not request]
        self.arriving.append(Arriving(request, held, spans, start, digests))

    def arrive(self) -> None:
        if not self.arriving:
            return
        one = self.arriving.pop(self.rng.randrange(len(self.arriving)))
        request, count = one.request, len(one.request.tokens)
        if self.rng.random() < 0.3:
            if one.held is not None:
                self.account.cached.let_go(one.held)
            for group, pages in enumerate(own_pages(self.account, one)):
                self.account.pool.release(group, pages)
            self.tally["did not come"] += 1
            return
        known = self.workers.known_of(request, request.tokens)
        known.bad_from = None
        for group, span in enumerate(one.spans):
            known.pages[group].update(enumerate(span.page_ids, span.first_index))
        first = drawn_token(known)
        known.add(first)
        self.workers.memory.receive(known, count, one.streamed_from)
        request.bad_from = None
        request.tokens = [*request.tokens, first]
        self.account.note_tokens(one.digests, request.tokens)
        sequence = self.account.adopt(
            request.request_id,
            list(request.tokens),
            request.prompt_count,
            request.sampling,
            one.spans,
            count,
            one.digests,
            one.held,
        )
        self.tally["adopted"] += 1
        self._begin(request, sequence)

    def abort(self) -> None:
        there = [one for one in self.batcher.sequences() if self._may_leave(one)]
        if there:
            self.tally["aborted"] += 1
            self.batcher.remove(self.rng.choice(there))

    def _may_leave(self, sequence: Sequence) -> bool:
        """Nobody learns what is wrong in a prompt that ends before its first token."""
        return not self._is_suspect(self.requests[sequence.request_id])

    def close_one(self) -> None:
        """A sequence of which all was sent."""
        for sequence in list(self.leaving):
            if not self.batcher.is_in_flight(sequence):
                self.leaving.remove(sequence)
                self.account.close(sequence)
                return

    def flush(self) -> None:
        self.account.flush_cache()
        self.tally["flushed"] += 1

    # ---- steps -----------------------------------------------------------------------------------

    def plan(self) -> None:
        planned = self.batcher.plan_step()
        for sequence in planned.retracted:
            request = self.requests[sequence.request_id]
            self.is_tainted |= self._is_suspect(request) or request.bad_from is not None
            request.tokens = list(sequence.token_ids)
            request.sequence, request.bad_from, request.may_read_bad = None, None, False
            self.waiting.insert(0, request)
            self.tally["retracted"] += 1
        if planned.step is not None:
            self.sent.append(Sent(planned.step))
            if self.rng.random() < 0.3:
                self.work()

    def work(self) -> None:
        """Workers compute the oldest step that they have not computed."""
        for one in self.sent:
            if one.drawn is None:
                one.drawn = self.workers.compute(one.step)
                return

    def end(self) -> None:
        """The oldest step returns."""
        if not self.sent:
            return
        if self.sent[0].drawn is None:
            self.work()
        one = self.sent.pop(0)
        drawn = one.drawn
        assert drawn is not None
        failed = {request_id: "nan" for request_id, token in drawn.items() if token is None}
        tokens = [token or 0 for token in drawn.values()]
        outcome = self.batcher.apply_done(
            StepDone(one.step.step_id, list(drawn), tokens, failed=failed)
        )
        for undrawn in outcome.failed:
            self.tally["failed"] += 1
            self.batcher.remove(undrawn.sequence)
        for done in outcome.tokens:
            request = self.requests[done.sequence.request_id]
            if self.is_prompt_only:
                self.batcher.stop(done.sequence)
                self.leaving.append(done.sequence)
            elif done.finish is not None:
                self.batcher.remove(done.sequence)
            else:
                continue
            self.history.append((request.salt, list(done.sequence.token_ids)))
            self.tally["finished"] += 1

    # ---- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """All that was begun ends, and nothing is left of it."""
        for _ in range(END_ROUND_MAX):
            for operation in (self.open_all, self.plan, self.end, self.close_one, self.arrive):
                operation()
                check_owners(self)
            if not (self.waiting or self.account.sequences or self.sent or self.arriving):
                break
        else:
            raise AssertionError(
                f"{len(self.waiting)} wait, {len(self.account.sequences)} never end"
            )
        assert self.account.flush_cache()
        self.account.pool.check()
        cache = self.account.cache
        assert cache is not None
        for group, count in enumerate(self.page_counts):
            assert self.account.pool.free_count(group) == count
        assert (cache.tree.block_count, cache.tree.node_count, cache.checkpoints.count) == (0, 0, 0)
        assert list(cache.tree.nodes()) == [] and cache.marks() == b""
        assert not any(cache.checkpoints.idle_page_counts)
