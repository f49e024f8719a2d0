"""Checkpoints of any token count do what a list of them does; marks name where prompts go on."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.prefix_digests import DIGEST_NBYTES, extend_digests
from common.scheduling.page_pool import PagePool
from common.scheduling.prefix_cache import MARK_NBYTES, Match, PrefixCache, marks_in
from common.scheduling.prefix_tree import Checkpoint, Node
from tests.scheduling.slow_prefixes import Lock, SlowCheckpoint, SlowPrefixes

PAGE_SIZE = 2
COUNT_MAX = 3
PAGE_COUNTS = (200, 12)
SEED = bytes(DIGEST_NBYTES)
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "keep", "add", "add", "add", "use", "let go", "leave", "evict"]),
        PROMPTS,
        st.integers(0, 12),
    ),
    min_size=20,
    max_size=60,
)


def cache_of(*lives: Live) -> PrefixCache:
    components = tuple(
        CacheComponent(f"c{i}", (i,), (Segment("h", 1, 8),), live, Shard.SPLIT, "float32")
        for i, live in enumerate(lives)
    )
    layout = ServerLayout(components, 1, ((0, len(lives)),), PAGE_SIZE)
    pool = PagePool(PAGE_COUNTS[: len(lives)])
    return PrefixCache(pool, layout.groups, PAGE_SIZE, COUNT_MAX)


def digests_of(tokens: list[int]) -> bytes:
    return extend_digests(SEED, tokens, PAGE_SIZE)


@dataclass
class Both:
    """A cache of a full group and a window, and the slow one. locks: what is kept, and its tokens.

    known: by number, the checkpoints that the fast one may still have.
    """

    fast: PrefixCache = field(default_factory=lambda: cache_of(FULL, Live(LiveKind.WINDOW, 2)))
    slow: SlowPrefixes = field(default_factory=lambda: SlowPrefixes(PAGE_SIZE))
    locks: list[tuple[Node, Lock, list[int]]] = field(default_factory=list)
    known: list[Checkpoint] = field(default_factory=list)
    used: list[tuple[Checkpoint, SlowCheckpoint, Node, Lock]] = field(default_factory=list)

    def keep(self, tokens: list[int]) -> None:
        """All blocks of a prompt are there from now on, and locked."""
        cache, blocks = self.fast, len(tokens) // PAGE_SIZE
        match = cache.match(digests_of(tokens), tokens, len(tokens))
        assert match.block_count == len(self.slow.find(SEED, tokens))
        node = cache.lock(match.node or cache.tree.root(SEED), match.block_count)
        lock = self.slow.lock(SEED, self.slow.find(SEED, tokens))
        missing = blocks - match.block_count
        pages = [*[0] * match.block_count, *self.fast.pool.allocate(0, missing)]
        node, _ = cache.extend(node, digests_of(tokens), [pages, []], blocks)
        self.slow.extend(lock, tokens, [((page,),) for page in pages])
        self.locks.append((node, lock, tokens))

    def add(self, number: int) -> None:
        """A checkpoint of some beginning of a locked prompt; the budget may cost another one."""
        if not self.locks:
            return
        node, lock, tokens = self.locks[number % len(self.locks)]
        count = 1 + number % len(tokens)
        least = count - (number % 3 == 0 and count > 1)
        blocks = count // PAGE_SIZE
        equal = [one for one in self.slow.checkpoints if one.tokens == tuple(tokens[:count])]
        serving = [one for one in equal if one.least <= least]
        serving.sort(key=lambda one: one.number)  # of two that serve, the older one is renewed
        rest = tuple(tokens[blocks * PAGE_SIZE : count])
        checkpoint = Checkpoint(count, least, blocks, rest, [[], []])
        idle = self.slow.idle()
        if len(self.slow.checkpoints) >= COUNT_MAX and idle:
            self.slow.checkpoints.remove(idle[0])
            serving = [one for one in serving if one is not idle[0]]
        assert self.fast.checkpoints.begin() == (len(self.slow.checkpoints) < COUNT_MAX)
        if len(self.slow.checkpoints) >= COUNT_MAX:
            return
        checkpoint.pages[1] = self.fast.pool.allocate(1, 1)
        self.fast.add(checkpoint, node)
        if not serving:
            made = SlowCheckpoint(
                SEED, lock.blocks[:blocks], tuple(tokens[:count]), least, len(self.known)
            )
            self.known.append(checkpoint)
            self.slow.checkpoints.append(made)
        elif not serving[0].users:
            self.slow.touch(serving[0])

    def use(self, tokens: list[int], number: int) -> None:
        """What a prompt finds is copied, and what that takes is locked."""
        match = self.match(tokens, 1 + number % len(tokens))
        if match.checkpoint is None:
            return
        assert match.node is not None
        slow = self.slow_of(match.checkpoint)
        self.fast.checkpoints.use(match.checkpoint)
        slow.users += 1
        lock = self.slow.lock(SEED, slow.path)
        node = self.fast.lock(match.node, len(slow.path))
        self.used.append((match.checkpoint, slow, node, lock))

    def let_go(self, number: int) -> None:
        if self.used:
            fast, slow, node, lock = self.used.pop(number % len(self.used))
            self.fast.let_go(fast)
            slow.users -= 1
            if not slow.users:
                self.slow.touch(slow)
            self.fast.unlock(node)
            self.slow.unlock(lock)

    def leave(self, number: int) -> None:
        if self.locks:
            node, lock, _ = self.locks.pop(number % len(self.locks))
            self.fast.unlock(node)
            self.slow.unlock(lock)

    def evict(self, number: int) -> None:
        """Blocks, with the checkpoints on them, or pages of checkpoints only."""
        pool = self.fast.pool
        if number % 2:
            count = number % 4
            free = set(pool._free[0])
            self.fast.evict_blocks(count)
            taken = [page for page in pool._free[0] if page not in free]
            self.slow.evict([((page,),) for page in taken])
        else:
            missing = number % 3
            self.fast.checkpoints.evict([0, missing])
            for one in self.slow.idle()[:missing]:
                self.slow.checkpoints.remove(one)

    def match(self, tokens: list[int], token_max: int) -> Match:
        match = self.fast.match(digests_of(tokens), tokens, token_max)
        serving, count = self.slow.best(SEED, tokens, token_max)
        assert match.token_count == count
        if match.checkpoint is None:
            assert not serving
        else:
            assert self.slow_of(match.checkpoint) in serving
        return match

    def slow_of(self, checkpoint: Checkpoint) -> SlowCheckpoint:
        (slow,) = [one for one in self.slow.checkpoints if self.known[one.number] is checkpoint]
        return slow

    def check(self, tokens: list[int]) -> None:
        for token_max in range(1, len(tokens) + 1):
            self.match(tokens, token_max)
        cache = self.fast
        idle = [self.known[one.number] for one in self.slow.idle()]
        assert list(cache.checkpoints.idle()) == idle
        assert cache.checkpoints.count == len(self.slow.checkpoints) <= COUNT_MAX
        assert cache.checkpoints.idle_page_counts == [0, len(idle)]
        assert cache.pool.used_count(1) == len(self.slow.checkpoints)
        assert cache.pool.used_count(0) == cache.tree.block_count == len(self.slow.blocks)
        assert set(marks_in(cache.marks())) == self.marks()

    def marks(self) -> set[bytes]:
        """Of the block behind which each checkpoint lies."""
        ends = [one.tokens[: len(one.path) * PAGE_SIZE] for one in self.slow.checkpoints]
        return {digests_of(list(end))[-DIGEST_NBYTES:][:MARK_NBYTES] for end in ends if end}


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
def test_checkpoints_are_found_kept_and_forgotten_as_in_a_list_of_them(
    operations: list[tuple[str, list[int], int]],
) -> None:
    both = Both()
    for name, tokens, number in operations:
        seen = [one.number for one in both.slow.checkpoints], len(both.slow.blocks)
        version = both.fast.version
        match name:
            case "keep":
                both.keep(tokens)
            case "add":
                both.add(number)
            case "use":
                both.use(tokens, number)
            case "let go":
                both.let_go(number)
            case "leave":
                both.leave(number)
            case "evict":
                both.evict(number)
        both.check(tokens)
        after = [one.number for one in both.slow.checkpoints], len(both.slow.blocks)
        if (sorted(seen[0]), seen[1]) != (sorted(after[0]), after[1]):
            assert both.fast.version != version, "what is found has changed"
    while both.used:
        both.let_go(0)
    while both.locks:
        both.leave(0)
    assert both.fast.flush()
    assert [both.fast.pool.free_count(group) for group in range(2)] == list(PAGE_COUNTS)
    assert list(both.fast.tree.nodes()) == []


def test_marks_of_a_model_that_only_grows_name_the_ends_of_runs_and_some_blocks_between() -> None:
    cache = cache_of(FULL)
    long, short = [0] * 1200, [*[0] * 100, *[1] * 4]
    for tokens in (long, short):
        match = cache.match(digests_of(tokens), tokens, len(tokens))
        node = cache.lock(match.node or cache.tree.root(SEED), match.block_count)
        cache.extend(node, digests_of(tokens), [list(range(600))], len(tokens) // PAGE_SIZE)
    ends = {
        digests_of(tokens)[-DIGEST_NBYTES:][:MARK_NBYTES]
        for tokens in (long, short, long[:100], long[:512], long[:1024])
    }
    assert set(marks_in(cache.marks())) == ends


def test_a_prompt_shorter_than_a_block_goes_on_from_a_checkpoint_of_its_seed_alone() -> None:
    cache = cache_of(FULL, SLOT)
    root = cache.lock(cache.tree.root(SEED), 0)
    cache.checkpoints.begin()
    pages = [[], cache.pool.allocate(1, 1)]
    cache.add(Checkpoint(1, 1, 0, (5,), pages), root)
    cache.unlock(root)
    other = extend_digests(b"b" * DIGEST_NBYTES, [5, 6], PAGE_SIZE)
    assert cache.match(digests_of([5, 6]), [5, 6], 1).token_count == 1
    assert cache.match(other, [5, 6], 1).token_count == 0
    assert cache.match(digests_of([4, 6]), [4, 6], 1).token_count == 0
