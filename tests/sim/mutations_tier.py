"""Bugs of the tier in host memory, planted into the real scheduler cores.

Knows nothing of stories.
"""

from __future__ import annotations

import msgspec
import pytest

from common.protocol.worker import PagesMoved
from common.scheduling import host_tier, page_moves
from common.scheduling.host_tier import HostTier
from common.scheduling.page_moves import Move, Part, begin_move
from common.scheduling.prefix_cache import PrefixCache
from common.scheduling.prefix_tree import Checkpoint
from decode_server.request import DecodeRequest
from prefill_server.request import PrefillRequest
from tests.sim.planted import Mutation

Patch = pytest.MonkeyPatch
Tier = HostTier[PrefillRequest | DecodeRequest]


def what_is_being_saved_can_be_evicted(patch: Patch) -> None:
    """Its pages are read by a copy, and nobody says so."""

    def begin(
        source: PrefixCache, target: PrefixCache, part: Part, block_max: int | None = None
    ) -> Move | None:
        move = begin_move(source, target, part, block_max)
        if move is not None:
            source.unlock(move.source_node, is_use=False)
        return move

    def let_go(self: Move, *, is_use: bool) -> None:
        for one, _ in self.checkpoints:
            self.source.let_go(one, is_use=is_use)

    patch.setattr(host_tier, "begin_move", begin)
    patch.setattr(Move, "_let_go", let_go)


def found_before_it_has_come(patch: Patch) -> None:
    """Blocks can be found while they are still copied."""

    def begin(
        source: PrefixCache, target: PrefixCache, part: Part, block_max: int | None = None
    ) -> Move | None:
        move = begin_move(source, target, part, block_max)
        if move is not None:
            move.target_node = move._place_blocks()
            move.pages = [[] for _ in move.pages]
        return move

    def end(self: Move, *, is_use: bool) -> bool:
        self._let_go(is_use=is_use)
        for _, copy in self.checkpoints:
            self.target.add(copy, self.target_node)
        self.target.unlock(self.target_node)
        return True

    patch.setattr(host_tier, "begin_move", begin)
    patch.setattr(Move, "end", end)


def a_failed_load_counts_as_made(patch: Patch) -> None:
    note = HostTier.note_moved

    def note_moved(self: Tier, moved: PagesMoved) -> None:
        note(self, msgspec.structs.replace(moved, error=""))

    patch.setattr(HostTier, "note_moved", note_moved)


def pages_of_a_failed_load_are_kept(patch: Patch) -> None:
    patch.setattr(Move, "_give_up", lambda self: self.target.unlock(self.target_node))


def who_waits_for_a_copy_is_forgotten(patch: Patch) -> None:
    patch.setattr(HostTier, "_put_back", lambda self, requests: None)


def a_checkpoint_comes_back_a_token_later(patch: Patch) -> None:
    """What is saved of one token count is found at the next one."""
    copy_of = page_moves._copy_of

    def later(one: Checkpoint) -> Checkpoint:
        copy = copy_of(one)
        copy.token_count += 1
        copy.least_count += 1
        return copy

    patch.setattr(page_moves, "_copy_of", later)


def the_first_block_is_copied_over_the_next(patch: Patch) -> None:
    """The pages of a path are counted from where the copy begins."""
    pages = PrefixCache.pages

    def begin(
        source: PrefixCache, target: PrefixCache, part: Part, block_max: int | None = None
    ) -> Move | None:
        move = begin_move(source, target, part, block_max)
        if move is not None and move.start:
            found = pages(source, move.source_node, move.stop)
            for index, copies in enumerate(move.copies):
                count = len(copies.source_ids)
                wrong = (found[copies.group] + copies.source_ids)[:count]
                move.copies[index] = msgspec.structs.replace(copies, source_ids=wrong)
        return move

    patch.setattr(host_tier, "begin_move", begin)


def a_page_that_is_filled_is_free(patch: Patch) -> None:
    """One of the pages that a copy fills is given away."""
    release = PrefixCache.release

    def begin(
        source: PrefixCache, target: PrefixCache, part: Part, block_max: int | None = None
    ) -> Move | None:
        move = begin_move(source, target, part, block_max)
        if move is not None and any(move.pages):
            given = [pages[:1] for pages in move.pages]
            release(target, given)
        return move

    patch.setattr(host_tier, "begin_move", begin)


MUTATIONS = (
    Mutation("what-is-being-saved-can-be-evicted", what_is_being_saved_can_be_evicted, 0),
    Mutation("found-before-it-has-come", found_before_it_has_come, 83),
    Mutation("a-failed-load-counts-as-made", a_failed_load_counts_as_made, 12),
    Mutation("pages-of-a-failed-load-are-kept", pages_of_a_failed_load_are_kept, 12),
    Mutation("who-waits-for-a-copy-is-forgotten", who_waits_for_a_copy_is_forgotten, 0),
    Mutation("a-checkpoint-comes-back-later", a_checkpoint_comes_back_a_token_later, 0),
    Mutation("the-first-block-is-copied-again", the_first_block_is_copied_over_the_next, 12),
    Mutation("a-page-that-is-filled-is-free", a_page_that_is_filled_is_free, 0),
)
