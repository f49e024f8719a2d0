"""Bugs of sharing prefixes, planted into the real tree, cache and batcher to see that stories find
them.

Knows nothing of stories.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List

import msgspec
import pytest

from common.layout.component import LiveKind
from common.prefix_digests import extend_digests
from common.protocol.worker import PageCopies, PrefillChunk, Step
from common.scheduling import cached_sequences
from common.scheduling.batcher import Batcher
from common.scheduling.cached_sequences import CachedSequences
from common.scheduling.checkpoints import Checkpoints
from common.scheduling.page_account import PageAccount
from common.scheduling.prefix_cache import Match, PrefixCache
from common.scheduling.prefix_tree import Checkpoint, Node, PrefixTree
from common.scheduling.sequence import Sequence
from tests.scheduling import prefix_setup, prefix_world
from tests.scheduling.prefix_setup import SALTS
from tests.scheduling.prefix_workers import PrefixWorkers

Patch = pytest.MonkeyPatch


def a_lock_is_forgotten(patch: Patch) -> None:
    """What a sequence begins with can be evicted under it."""
    begin, end = CachedSequences.begin, CachedSequences.end

    def begin_unlocked(self: CachedSequences, sequence: Sequence, match: Match) -> None:
        begin(self, sequence, match)
        if self.cache is not None and sequence.node is not None:
            self.cache.unlock(sequence.node)

    def end_unlocked(self: CachedSequences, sequence: Sequence) -> None:
        sequence.node = None
        end(self, sequence)

    patch.setattr(CachedSequences, "begin", begin_unlocked)
    patch.setattr(CachedSequences, "end", end_unlocked)


def a_lock_is_never_let_go_of(patch: Patch) -> None:
    patch.setattr(CachedSequences, "let_go", lambda self, held: None)


def pages_are_taken_from_the_first_one_on(patch: Patch) -> None:
    """And not from those behind the blocks that are there."""
    append = PrefixTree._append

    def append_from_0(
        self: PrefixTree, node: Node, keys: bytes, pages: List[List[int]], block_count: int
    ) -> Node:
        shifted = [
            [*range(node.end * each), *given]
            for given, each in zip(pages, self._page_counts, strict=True)
        ]
        return append(self, node, keys, shifted, block_count)

    patch.setattr(PrefixTree, "_append", append_from_0)


def the_rest_of_a_checkpoint_is_not_compared(patch: Patch) -> None:
    def find(
        self: Checkpoints,
        node: Node,
        block_count: int,
        block_tokens: int,
        token_ids: List[int],
        token_max: int,
        lookahead: int,
    ) -> tuple[Checkpoint | None, int]:
        for one in node.path():
            for checkpoint in one.checkpoints:
                if checkpoint.block_count <= block_count and checkpoint.token_count <= token_max:
                    return checkpoint, checkpoint.token_count
        return None, 0

    patch.setattr(Checkpoints, "find", find)


def a_checkpoint_is_a_token_late(patch: Patch) -> None:
    """What it holds is that of one token more than it says."""
    add = Checkpoints.add

    def add_late(self: Checkpoints, checkpoint: Checkpoint, node: Node) -> None:
        if checkpoint.rest:
            checkpoint.token_count -= 1
            checkpoint.least_count -= 1
            checkpoint.rest = checkpoint.rest[:-1]
        add(self, checkpoint, node)

    patch.setattr(Checkpoints, "add", add_late)


def a_window_that_has_come_is_used_a_token_earlier(patch: Patch) -> None:
    new_checkpoint = CachedSequences._new_checkpoint

    def new_with_all(self: CachedSequences, sequence: Sequence, count: int) -> Checkpoint:
        sequence.received_count = 0
        return new_checkpoint(self, sequence, count)

    patch.setattr(CachedSequences, "_new_checkpoint", new_with_all)


def what_a_sequence_leaves_is_a_token_late(patch: Patch) -> None:
    leave = CachedSequences._leave_checkpoint

    def leave_late(self: CachedSequences, sequence: Sequence, cache: PrefixCache) -> None:
        sequence.computed_count -= 1
        leave(self, sequence, cache)
        sequence.computed_count += 1

    patch.setattr(CachedSequences, "_leave_checkpoint", leave_late)


def blocks_are_found_before_their_chunk_has_returned(patch: Patch) -> None:
    begin = Batcher._begin

    def begin_early(
        self: Batcher,
        chunks: list[PrefillChunk],
        decoding: list[Sequence],
        draft_counts: list[int] | None = None,
    ) -> Step | None:
        step = begin(self, chunks, decoding, draft_counts)
        for chunk in chunks:
            sequence = self._prompts[chunk.request_id]
            computed_count, sequence.computed_count = sequence.computed_count, chunk.stop
            self._account.cached.remember(sequence)
            sequence.computed_count = computed_count
        return step

    patch.setattr(Batcher, "_begin", begin_early)


def a_locked_leaf_is_evicted(patch: Patch) -> None:
    note_locked = PrefixTree._note_locked

    def note_half(self: PrefixTree, node: Node) -> None:
        note_locked(self, node)
        if node.is_leaf and node.parent is not None:
            self._idle_leaves[node] = None

    patch.setattr(PrefixTree, "_note_locked", note_half)


def the_seed_is_ignored(patch: Patch) -> None:
    """Prompts under one salt find what others have left."""
    find, root = PrefixTree.find, PrefixTree.root
    one = SALTS[0]
    patch.setattr(PrefixTree, "root", lambda self, seed: root(self, one))
    patch.setattr(PrefixTree, "find", lambda self, seed, keys, most: find(self, one, keys, most))


def duplicates_come_back_twice(patch: Patch) -> None:
    owned_pages = PageAccount.owned_pages

    def owned_twice(self: PageAccount, sequence: Sequence) -> list[list[int]]:
        owned = owned_pages(self, sequence)
        return [[*own, *copies] for own, copies in zip(owned, sequence.copies, strict=True)]

    patch.setattr(PageAccount, "owned_pages", owned_twice)


def duplicates_are_kept(patch: Patch) -> None:
    close = PageAccount.close

    def close_without(self: PageAccount, sequence: Sequence) -> None:
        sequence.copies = [[] for _ in self.groups]
        close(self, sequence)

    patch.setattr(PageAccount, "close", close_without)


def the_window_of_a_checkpoint_is_a_page_off(patch: Patch) -> None:
    begin = CachedSequences.begin_checkpoint

    def begin_off(self: CachedSequences, sequence: Sequence, count: int) -> Checkpoint | None:
        known = len(sequence.page_copies)
        checkpoint = begin(self, sequence, count)
        for index, one in enumerate(sequence.page_copies[known:], known):
            if self._groups[one.group].live.kind is LiveKind.WINDOW:
                pages = sequence.spans[one.group].page_ids
                at = pages.index(one.source_ids[0]) + 1
                sources = [pages[(at + i) % len(pages)] for i in range(len(one.source_ids))]
                sequence.page_copies[index] = PageCopies(one.group, sources, one.target_ids)
        return checkpoint

    patch.setattr(CachedSequences, "begin_checkpoint", begin_off)


def windows_of_a_match_are_a_page_off(patch: Patch) -> None:
    indices = CachedSequences._checkpoint_indices

    def indices_off(self: CachedSequences, token_count: int, least_count: int) -> list[range]:
        found = indices(self, token_count, least_count)
        return [
            range(one.start + 1, one.stop) if group.live.kind is LiveKind.WINDOW else one
            for group, one in zip(self._groups, found, strict=True)
        ]

    patch.setattr(CachedSequences, "_checkpoint_indices", indices_off)


def pages_are_copied_after_a_step_has_computed(patch: Patch) -> None:
    compute = PrefixWorkers.compute

    def compute_first(self: PrefixWorkers, step: Step) -> dict[int, int | None]:
        drawn = compute(self, msgspec.structs.replace(step, copies=[]))
        self.copy(step.copies)
        return drawn

    patch.setattr(PrefixWorkers, "compute", compute_first)


def a_checkpoint_may_go_before_it_is_copied(patch: Patch) -> None:
    copy = CachedSequences.copy_checkpoint

    def copy_unused(self: CachedSequences, sequence: Sequence) -> None:
        copy(self, sequence)
        self.note_copied(sequence)

    patch.setattr(CachedSequences, "copy_checkpoint", copy_unused)


def blocks_of_a_failed_prompt_stay(patch: Patch) -> None:
    patch.setattr(PrefixTree, "cut_off", lambda self, node, block_count: None)


def blocks_that_nobody_knows_the_tokens_of_are_kept(patch: Patch) -> None:
    """Of who left while a step ahead computed a token that was never told."""
    remember = CachedSequences.remember

    def remember_all(self: CachedSequences, sequence: Sequence) -> None:
        tokens = sequence.token_ids
        missing = max(0, sequence.computed_count - len(tokens))
        sequence.token_ids = [*tokens, *[0] * missing]
        remember(self, sequence)
        sequence.token_ids = tokens

    patch.setattr(CachedSequences, "remember", remember_all)


def the_token_behind_a_block_is_not_in_its_digest(patch: Patch) -> None:
    def extend(
        digests: bytes, token_ids: List[int], digest_tokens: int, lookahead: int = 0
    ) -> bytes:
        """Of tokens that have a digest, but of these alone."""
        return extend_digests(digests, token_ids[: len(token_ids) - lookahead], digest_tokens)

    for module in (cached_sequences, prefix_setup, prefix_world):
        patch.setattr(module, "extend_digests", extend)


def the_token_behind_a_checkpoint_is_not_compared(patch: Patch) -> None:
    find = Checkpoints.find

    def find_without(
        self: Checkpoints,
        node: Node,
        block_count: int,
        block_tokens: int,
        token_ids: List[int],
        token_max: int,
        lookahead: int,
    ) -> tuple[Checkpoint | None, int]:
        return find(self, node, block_count, block_tokens, token_ids, token_max, 0 * lookahead)

    patch.setattr(Checkpoints, "find", find_without)


def a_block_is_found_before_the_next_token_is_known(patch: Patch) -> None:
    """Its name is that of a zero behind it."""
    remember = CachedSequences.remember

    def remember_all(self: CachedSequences, sequence: Sequence) -> None:
        tokens = sequence.token_ids
        sequence.token_ids = [*tokens, 0]
        remember(self, sequence)
        sequence.token_ids = tokens

    patch.setattr(CachedSequences, "remember", remember_all)


DRAFT_PLANTS: tuple[Callable[[Patch], None], ...] = (
    the_token_behind_a_block_is_not_in_its_digest,
    the_token_behind_a_checkpoint_is_not_compared,
    a_block_is_found_before_the_next_token_is_known,
)
PLANTS: tuple[Callable[[Patch], None], ...] = (
    a_lock_is_forgotten,
    a_lock_is_never_let_go_of,
    pages_are_taken_from_the_first_one_on,
    the_rest_of_a_checkpoint_is_not_compared,
    a_checkpoint_is_a_token_late,
    what_a_sequence_leaves_is_a_token_late,
    a_window_that_has_come_is_used_a_token_earlier,
    blocks_are_found_before_their_chunk_has_returned,
    a_locked_leaf_is_evicted,
    the_seed_is_ignored,
    duplicates_come_back_twice,
    duplicates_are_kept,
    the_window_of_a_checkpoint_is_a_page_off,
    windows_of_a_match_are_a_page_off,
    pages_are_copied_after_a_step_has_computed,
    a_checkpoint_may_go_before_it_is_copied,
    blocks_of_a_failed_prompt_stay,
    blocks_that_nobody_knows_the_tokens_of_are_kept,
)
