"""The tree of blocks does what a list of all blocks does that is searched from end to end."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.prefix_digests import DIGEST_NBYTES, extend_digests
from common.scheduling.prefix_tree import Node, PrefixTree, equal_count
from tests.scheduling.slow_prefixes import Block, Lock, SlowPrefixes

BLOCK_TOKENS = 2
# Pages of a block in two groups: one has some of both sizes.
PAGE_COUNTS = (1, 2)
SEEDS = (b"a" * DIGEST_NBYTES, b"b" * DIGEST_NBYTES)
# Prompts over two tokens, of up to six blocks: many have some blocks in common.
PROMPTS = st.lists(st.integers(0, 1), max_size=6 * BLOCK_TOKENS + 1)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["lock", "lock", "extend", "extend", "unlock", "evict", "cut"]),
        st.sampled_from(SEEDS),
        PROMPTS,
        st.integers(0, 20),
    ),
    min_size=15,
    max_size=40,
)


def keys_of(seed: bytes, tokens: list[int]) -> bytes:
    return extend_digests(seed, tokens, BLOCK_TOKENS)[DIGEST_NBYTES:]


@dataclass
class Both:
    """A tree and the slow one, which are asked the same."""

    fast: PrefixTree = field(default_factory=lambda: PrefixTree(PAGE_COUNTS))
    slow: SlowPrefixes = field(default_factory=lambda: SlowPrefixes(BLOCK_TOKENS))
    locks: list[tuple[Node, Lock, list[int]]] = field(default_factory=list)
    page_count: int = 0

    def find(self, seed: bytes, tokens: list[int]) -> tuple[Node | None, list[Block]]:
        keys = keys_of(seed, tokens)
        node, count = self.fast.find(seed, keys, len(keys) // DIGEST_NBYTES)
        blocks = self.slow.find(seed, tokens)
        assert count == len(blocks)
        if node is not None:
            assert [tuple(p) for p in self.fast.pages(node, count)] == flat(blocks)
            locked = self.slow.locked()
            assert self.fast.idle_count(node, count) == sum(b not in locked for b in blocks)
        return node, blocks

    def lock(self, seed: bytes, tokens: list[int], number: int) -> None:
        """All that is found, or a part of it."""
        node, blocks = self.find(seed, tokens)
        count = min(len(blocks), number)
        node = node or self.fast.root(seed)
        while node.parent is not None and node.start >= count:
            node = node.parent
        lock = self.slow.lock(seed, blocks[:count])
        self.locks.append((self.fast.lock(node, count), lock, tokens))

    def unlock(self, number: int) -> None:
        if self.locks:
            node, lock, _ = self.locks.pop(number % len(self.locks))
            self.fast.unlock(node)
            self.slow.unlock(lock)

    def extend(self, number: int) -> None:
        """Each block comes with pages that nobody has."""
        if not self.locks:
            return
        index = number % len(self.locks)
        node, lock, tokens = self.locks[index]
        parts = self.slow.cut(tokens)
        pages = [self.new_pages() for _ in parts]
        lists = [[page for block in pages for page in block[group]] for group in range(2)]
        keys = keys_of(lock.seed, tokens)
        node, twice = self.fast.extend(node, keys, lists, max(len(parts), len(lock.blocks)))
        assert {block for one in twice for block in one} == self.slow.extend(lock, tokens, pages)
        self.locks[index] = (node, lock, tokens)
        assert [tuple(p) for p in self.fast.pages(node, len(lock.blocks))] == flat(lock.blocks)

    def new_pages(self) -> tuple[tuple[int, ...], ...]:
        pages: list[tuple[int, ...]] = []
        for each in PAGE_COUNTS:
            pages.append(tuple(range(self.page_count, self.page_count + each)))
            self.page_count += each
        return tuple(pages)

    def cut(self, number: int) -> None:
        if self.locks:
            node, lock, _ = self.locks[number % len(self.locks)]
            count = number % (len(lock.blocks) + 1)
            self.fast.cut_off(node, count)
            self.slow.cut_off(lock, count)

    def evict(self, count: int) -> None:
        idle_count = self.fast.idle_block_count
        evicted = self.fast.evict(count)
        assert evicted.block_count == min(count, idle_count)
        taken = [
            tuple(
                tuple(pages[index * each : (index + 1) * each])
                for pages, each in zip(evicted.pages, PAGE_COUNTS, strict=True)
            )
            for index in range(evicted.block_count)
        ]
        self.slow.evict(taken)

    def check(self) -> None:
        blocks, locked = self.slow.blocks, self.slow.locked()
        assert self.fast.block_count == len(blocks)
        assert self.fast.locked_block_count == len(locked)
        assert self.fast.idle_block_count == len(blocks) - len(locked)
        for node, lock, _ in self.locks:
            assert node.end == len(lock.blocks)
            assert [tuple(p) for p in self.fast.pages(node, node.end)] == flat(lock.blocks)
        nodes = list(self.fast.nodes())
        for node in nodes:
            assert node.parent is None or node.block_count > 0
            for key, child in node.children.items():
                assert child.parent is node and child.start == node.end
                assert child.keys[:DIGEST_NBYTES] == key
                assert all(
                    len(p) == child.block_count * e
                    for p, e in zip(child.pages, PAGE_COUNTS, strict=True)
                )
        runs = [node for node in nodes if node.parent is not None]
        shown = sum(not any(one.is_hidden for one in block.path()) for block in blocks)
        assert sum(node.block_count for node in runs) == shown
        assert len(runs) <= self.fast.node_count <= len(blocks)
        if shown == len(blocks):
            assert self.fast.node_count == len(runs)


def flat(blocks: list[Block]) -> list[tuple[int, ...]]:
    """Per group, the pages of some blocks."""
    return [tuple(p for one in blocks for p in one.pages[group]) for group in range(2)]


def run(both: Both, operations: list[tuple[str, bytes, list[int], int]]) -> None:
    for name, seed, tokens, number in operations:
        found = found_of(both)
        version = both.fast.version
        match name:
            case "lock":
                both.lock(seed, tokens, number)
            case "unlock":
                both.unlock(number)
            case "extend":
                both.extend(number)
            case "evict":
                both.evict(number % 5)
            case "cut":
                both.cut(number)
        both.find(seed, tokens)
        both.check()
        assert found == found_of(both) or version != both.fast.version


def found_of(both: Both) -> set[tuple[object, ...]]:
    """Every beginning that is found, with its pages."""
    return {
        (block.seed, tuple(tokens for one in block.path() for tokens in one.tokens), block.pages)
        for block in both.slow.blocks
        if not any(one.is_hidden for one in block.path())
    }


@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
@pytest.mark.slow
def test_the_tree_finds_keeps_and_evicts_what_a_list_of_all_blocks_does(
    operations: list[tuple[str, bytes, list[int], int]],
) -> None:
    both = Both()
    run(both, operations)
    while both.locks:
        both.unlock(0)
        both.check()
    both.evict(1000)
    assert (both.fast.block_count, both.fast.node_count, list(both.fast.nodes())) == (0, 0, [])


@given(st.binary(max_size=8), st.binary(max_size=8), st.binary(max_size=8))
def test_equal_keys_are_counted_to_the_last_one(shared: bytes, ours: bytes, theirs: bytes) -> None:
    first, second = keys_of(SEEDS[0], [*shared, *ours]), keys_of(SEEDS[0], [*shared, *theirs])
    most = min(len(first), len(second)) // DIGEST_NBYTES
    at = [i * DIGEST_NBYTES for i in range(most)]
    expected = sum(first[i : i + DIGEST_NBYTES] == second[i : i + DIGEST_NBYTES] for i in at)
    assert equal_count(first, 0, second, 0, most) == expected


def test_who_reads_what_was_cut_off_keeps_what_lies_before_it() -> None:
    """Its own blocks are not found any more; it reads those above them still."""
    both = Both()
    both.lock(SEEDS[0], [0] * 8, 0)
    both.extend(0)
    both.lock(SEEDS[0], [0] * 8, 4)
    both.fast.cut_off(both.locks[0][0], 2)
    both.unlock(0)
    assert both.fast.idle_block_count == 0
    assert both.fast.evict(4).block_count == 0
    both.fast.unlock(both.locks[0][0])
    assert both.fast.evict(4).block_count == 4


def test_the_blocks_of_a_checkpoint_far_above_a_match_count_once() -> None:
    """A prompt goes on from a checkpoint at its first block, and finds four; the idle ones of those
    behind the first are nobody's concern."""
    both = Both()
    both.lock(SEEDS[0], [0] * 4, 0)
    both.extend(0)
    both.lock(SEEDS[0], [0] * 8, 2)
    both.unlock(0)
    both.lock(SEEDS[0], [0, 0, 0, 0, 1, 1], 2)
    both.extend(1)
    both.extend(0)
    while both.locks:
        both.unlock(0)
    node, blocks = both.find(SEEDS[0], [0] * 8)
    assert node is not None and (node.start, len(blocks)) == (2, 4)
    assert both.fast.idle_count(node, 1) == 1


def test_a_leaf_goes_when_its_turn_has_come_although_it_became_one_late() -> None:
    """Blocks 0 and 1 were used after what hangs below them, and before two other prompts."""
    both = Both()
    both.lock(SEEDS[0], [0] * 6, 0)
    both.extend(0)
    both.unlock(0)
    for seed, tokens, count in (
        (SEEDS[0], [0] * 6, 2),
        (SEEDS[0], [1] * 4, 0),
        (SEEDS[1], [1] * 4, 0),
    ):
        both.lock(seed, tokens, count)
        if not count:
            both.extend(0)
        both.unlock(0)
    both.evict(1)
    both.evict(1)
    both.evict(1)
    assert len(both.slow.find(SEEDS[0], [0] * 6)) == 0
    assert len(both.slow.find(SEEDS[0], [1] * 4)) == 2
