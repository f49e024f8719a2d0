"""Random prompts that share beginnings, over a real batcher and account and a memory that tells
whose each row is.

    python -m tests.scheduling.prefix_story 1234     tells what is left of a failing story

A story is a number for its server and one for each of its operations, so that it can be cut short.
After each operation every page must have exactly one owner. Knows nothing of requests or peers:
caches that come from elsewhere are written by the story itself.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.prefix_digests import DIGEST_NBYTES, extend_digests
from common.protocol.worker import PageCopies, Step, StepDone
from common.request import SamplingParams
from common.scheduling.batcher import Batcher, BatchLimits
from common.scheduling.cached_sequences import HeldPrefix
from common.scheduling.page_account import PageAccount
from common.scheduling.sequence import PageSpan, Sequence
from tests.scheduling.prefix_memory import KnownSequence, PrefixMemory, next_name
from tests.scheduling.prefix_owners import check_owners

OPERATION_COUNT = 400
TOKEN_MAX = 48
TOKENS = 3
EOS = 0
RUNNING_MAX = 4
WAITING_MAX = 6
SALTS = (b"a" * DIGEST_NBYTES, b"b" * DIGEST_NBYTES)
# Rounds in which all that was begun has to end.
END_ROUND_MAX = 3000


@dataclass(frozen=True, slots=True)
class Story:
    server: int
    operations: tuple[int, ...]


def story_of(seed: int) -> Story:
    rng = random.Random(seed)
    count = rng.randint(10, OPERATION_COUNT)
    return Story(rng.getrandbits(32), tuple(rng.getrandbits(32) for _ in range(count)))


@dataclass(eq=False)
class Request:
    """tokens: with what was generated so far. bad_from: the first token that comes out wrong.

    writer, wanted: whom it waits for, and how many tokens. may_read_bad: whether one that comes out
    wrong was there when it began.
    """

    request_id: int
    salt: bytes
    tokens: list[int]
    prompt_count: int
    sampling: SamplingParams
    has_digests: bool
    bad_from: int | None = None
    writer: Sequence | None = None
    wanted: int = 0
    sequence: Sequence | None = None
    known: KnownSequence | None = None
    may_read_bad: bool = False


@dataclass(eq=False)
class Arriving:
    """A cache on its way: the pages of its request, behind the blocks that are held for it."""

    request: Request
    held: HeldPrefix | None
    spans: list[PageSpan]
    streamed_from: int
    digests: bytes


@dataclass(eq=False)
class Sent:
    """A step with the workers. drawn: what it drew, once it is computed; None for no token."""

    step: Step
    drawn: dict[int, int | None] | None = None


class WatchedAccount(PageAccount):
    """Knows who has not been closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sequences: list[Sequence] = []

    def close(self, sequence: Sequence) -> None:
        super().close(sequence)
        self.sequences.remove(sequence)


def random_layout(rng: random.Random) -> ServerLayout:
    kinds: list[Live] = []
    if rng.random() < 0.8:
        kinds.append(FULL)
    if rng.random() < 0.4:
        size = rng.choice([3, 4, 16])
        kinds += [Live(LiveKind.BLOCK, size), Live(LiveKind.TAIL, size, rng.choice([0, size]))]
    if rng.random() < 0.4:
        kinds.append(Live(LiveKind.WINDOW, rng.randint(1, 20)))
    if rng.random() < 0.3:
        kinds.append(rng.choice([Live(LiveKind.TAIL, 4, 4), Live(LiveKind.TAIL, 5, 0)]))
    if rng.random() < 0.4 or not kinds:
        kinds.append(SLOT)
    rng.shuffle(kinds)
    segment = (Segment("h", 1, 8),)
    components = tuple(
        CacheComponent(f"c{i}", (i,), segment, live, Shard.SPLIT, "float32")
        for i, live in enumerate(dict.fromkeys(kinds))
    )
    stages = ((0, len(components)),)
    return ServerLayout(components, 1, stages, rng.choice([1, 2, 4, 4, 8, 16]))


@dataclass
class World:
    """step_count, and all else of `tally`: what has happened, by name."""

    rng: random.Random
    tally: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        rng = self.rng
        self.layout = random_layout(rng)
        groups = self.layout.groups
        self.digest_tokens = rng.choice([2, 4, 4, 16])
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
        checkpoint_max = rng.choice([0, 1, 2, 4, 8])
        self.account = WatchedAccount(
            groups,
            counts,
            has_prefix_cache=True,
            chunk_token_max=chunk_max,
            checkpoint_max=checkpoint_max,
            digest_tokens=self.digest_tokens,
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
        self.memory = PrefixMemory(groups, counts)
        self.history: list[tuple[bytes, list[int]]] = [(SALTS[0], [1])]
        self.waiting: list[Request] = []
        self.requests: dict[int, Request] = {}
        self.arriving: list[Arriving] = []
        self.leaving: list[Sequence] = []
        self.sent: list[Sent] = []
        self.workers: dict[int, KnownSequence] = {}
        self.next_id = 1
        self.is_tainted = False

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
        salt, known = rng.choice(self.history)
        shared = known[: rng.choice([0, len(known), rng.randint(0, len(known))])]
        more = [rng.randrange(TOKENS) for _ in range(rng.choice([0, 1, 2, 7, rng.randint(0, 40)]))]
        tokens = (shared + more or [1])[: TOKEN_MAX - 1]
        if rng.random() < 0.1:
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
        return extend_digests(request.salt, request.tokens, self.digest_tokens)

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
        request.may_read_bad = any(self._is_suspect(one) for one in self.requests.values())
        self.requests[request.request_id] = request
        self.account.sequences.append(sequence)
        self.batcher.add(sequence)

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
        known = self._known(request, request.tokens)
        known.bad_from = None
        for group, span in enumerate(one.spans):
            known.pages[group].update(enumerate(span.page_ids, span.first_index))
        self.memory.receive(known, count, one.streamed_from)
        request.bad_from = None
        request.tokens = [*request.tokens, self._drawn(known)]
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
            request.sequence, request.bad_from = None, None
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
                one.drawn = self.compute(one.step)
                return

    def compute(self, step: Step) -> dict[int, int | None]:
        for request_id in step.retired:
            del self.workers[request_id]
        for new in step.new:
            request = self.requests[new.request_id]
            assert new.request_id not in self.workers
            self.workers[new.request_id] = self._known(request, new.token_ids)
        for grant in step.grants:
            self.workers[grant.request_id].grant(grant)
        self.copy(step.copies)
        drawn: dict[int, int | None] = {}
        for chunk in step.chunks:
            for position in range(chunk.start, chunk.stop):
                self._compute(chunk.request_id, position)
            if chunk.is_last:
                drawn[chunk.request_id] = self._draw(chunk.request_id)
        for request_id in step.decode:
            self._compute(request_id, len(self.workers[request_id].names) - 2)
            drawn[request_id] = self._draw(request_id)
        self.tally["steps"] += 1
        return drawn

    def copy(self, copies: list[PageCopies]) -> None:
        self.memory.copy(copies)
        self.tally["pages copied"] += sum(len(one.source_ids) for one in copies)

    def _known(self, request: Request, tokens: list[int]) -> KnownSequence:
        name = next_name(7, SALTS.index(request.salt))
        known = KnownSequence(name, tokens, len(self.page_counts), request.bad_from)
        request.known = known
        return known

    def _compute(self, request_id: int, position: int) -> None:
        known, request = self.workers[request_id], self.requests[request_id]
        self.memory.compute(known, position)
        if known.is_bad and request.bad_from is None:
            assert request.may_read_bad or self.is_tainted, "what came out wrong is found"

    def _draw(self, request_id: int) -> int | None:
        """What the model says; nothing if what it saw is wrong."""
        known = self.workers[request_id]
        token = self._drawn(known)
        known.add(token)
        return None if known.is_bad else token

    def _drawn(self, known: KnownSequence) -> int:
        return known.names[-1] // 7 % TOKENS

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


def own_pages(account: PageAccount, one: Arriving) -> list[list[int]]:
    """Per group, the pages of a cache on its way that nobody else has."""
    assert account.cache is not None
    blocks = one.held.block_count if one.held is not None else 0
    counts = account.cache.page_counts
    return [span.page_ids[blocks * n :] for span, n in zip(one.spans, counts, strict=True)]


def run_story(story: Story) -> Counter[str]:
    """What happened. Raises: AssertionError for any promise that is broken."""
    world = World(random.Random(story.server))
    for number in story.operations:
        world.operate(number)
    world.rng = random.Random(story.server)
    world.finish()
    return world.tally


def problem_of(story: Story) -> str:
    try:
        run_story(story)
    except Exception as exc:  # noqa: BLE001 - whatever it is, it is the story's end
        return f"{type(exc).__name__}: {exc}"
    return ""


def shortened(story: Story) -> Story:
    """A failing story without the operations that its failure does without."""
    operations = list(story.operations)
    size = len(operations) // 2
    while size:
        at = 0
        while at < len(operations):
            fewer = operations[:at] + operations[at + size :]
            if problem_of(Story(story.server, tuple(fewer))):
                operations = fewer
            else:
                at += size
        size //= 2
    return Story(story.server, tuple(operations))


if __name__ == "__main__":
    shortest = shortened(story_of(int(sys.argv[1])))
    print(problem_of(shortest))
    print(shortest)
    run_story(shortest)
