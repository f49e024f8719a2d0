"""Bugs of prefixes that are kept: what is found, held, copied, sent in part and let go of.

Knows nothing of stories.
"""

from __future__ import annotations

from collections.abc import Sequence as List

import pytest

from common.prefix_digests import DIGEST_NBYTES
from common.protocol.worker import PrefillChunk
from common.scheduling.batcher import Batcher
from common.scheduling.cached_sequences import CachedSequences, HeldPrefix
from common.scheduling.checkpoints import Checkpoints
from common.scheduling.page_account import PageAccount
from common.scheduling.prefix_cache import Match, PrefixCache
from common.scheduling.prefix_tree import Checkpoint, Node, PrefixTree
from common.scheduling.sequence import Sequence
from decode_server.requests import Requests

Patch = pytest.MonkeyPatch


def a_copy_is_forgotten(patch: Patch) -> None:
    """Of a block that another prompt was first with, the own page never comes back."""
    close = PageAccount.close

    def close_without(self: PageAccount, sequence: Sequence) -> None:
        sequence.copies = [[] for _ in sequence.spans]
        close(self, sequence)

    patch.setattr(PageAccount, "close", close_without)


def a_copy_comes_back_twice(patch: Patch) -> None:
    """Pages of blocks that are in the cache count as a sequence's own."""
    owned = PageAccount.owned_pages

    def owned_all(self: PageAccount, sequence: Sequence) -> list[list[int]]:
        sequence.block_count = max(0, sequence.block_count - 1)
        return owned(self, sequence)

    patch.setattr(PageAccount, "owned_pages", owned_all)


def a_match_is_not_held(patch: Patch) -> None:
    """It can be evicted between the request and the transfer."""
    hold, adopt = CachedSequences.hold, CachedSequences.adopt

    def hold_loosely(self: CachedSequences, match: Match) -> HeldPrefix | None:
        held = hold(self, match)
        if held is not None:
            self._tree.unlock(held.node)
        return held

    def adopt_late(self: CachedSequences, sequence: Sequence, held: HeldPrefix | None) -> None:
        if held is not None:
            self._tree.lock(held.node, held.block_count)
        adopt(self, sequence, held)

    patch.setattr(CachedSequences, "hold", hold_loosely)
    patch.setattr(CachedSequences, "let_go", lambda self, held: None)
    patch.setattr(CachedSequences, "adopt", adopt_late)
    patch.setattr(CachedSequences, "_tree", property(lambda self: self.cache.tree), raising=False)


def what_was_held_is_kept_for_good(patch: Patch) -> None:
    patch.setattr(Requests, "_let_go", lambda self, request: setattr(request, "held", None))


def blocks_are_found_before_their_chunk_returned(patch: Patch) -> None:
    begin = Batcher._begin_checkpoints

    def begin_early(self: Batcher, chunks: list[PrefillChunk], decoding: list[Sequence]) -> object:
        for chunk in chunks:
            sequence = self._prompts[chunk.request_id]
            before = sequence.computed_count
            sequence.computed_count = chunk.stop
            self._account.cached.remember(sequence)
            sequence.computed_count = before
        return begin(self, chunks, decoding)

    patch.setattr(Batcher, "_begin_checkpoints", begin_early)


def a_checkpoint_is_of_one_token_more(patch: Patch) -> None:
    """It is found for prompts that it lacks a token of."""
    add = Checkpoints.add

    def add_longer(self: Checkpoints, checkpoint: Checkpoint, node: Node) -> None:
        checkpoint.token_count += 1
        add(self, checkpoint, node)

    patch.setattr(Checkpoints, "add", add_longer)


def the_rest_of_a_checkpoint_is_not_compared(patch: Patch) -> None:
    find = Checkpoints.find

    def find_any(
        self: Checkpoints,
        node: Node,
        block_count: int,
        block_tokens: int,
        token_ids: List[int],
        token_max: int,
    ) -> Checkpoint | None:
        for one in node.path():
            for checkpoint in one.checkpoints:
                if checkpoint.block_count <= block_count and checkpoint.token_count <= token_max:
                    return checkpoint
        return find(self, node, block_count, block_tokens, token_ids, token_max)

    patch.setattr(Checkpoints, "find", find_any)


def a_prefix_is_matched_without_its_checkpoint(patch: Patch) -> None:
    """Windows, tails and slots are whatever lies in the pages."""
    match = PrefixCache.match

    def match_blocks(
        self: PrefixCache, digests: bytes, token_ids: List[int], token_max: int
    ) -> Match:
        found = match(self, digests, token_ids, token_max)
        return Match(found.node, found.block_count, found.block_count * self.block_tokens)

    patch.setattr(PrefixCache, "match", match_blocks)


def a_checkpoint_is_not_copied(patch: Patch) -> None:
    patch.setattr(CachedSequences, "copy_checkpoint", lambda self, sequence: None)


def a_checkpoint_is_evicted_while_it_is_copied(patch: Patch) -> None:
    """Its pages have another owner by the time of the step."""

    def use_loosely(self: Checkpoints, checkpoint: Checkpoint) -> None:
        self.used_count += 1

    patch.setattr(Checkpoints, "use", use_loosely)
    patch.setattr(PrefixCache, "let_go", lambda self, checkpoint: None)


def a_checkpoint_is_made_of_nothing(patch: Patch) -> None:
    """What lay in its pages is left there."""
    begin = CachedSequences.begin_checkpoint

    def begin_empty(
        self: CachedSequences, sequence: Sequence, token_count: int
    ) -> Checkpoint | None:
        before = list(sequence.page_copies)
        checkpoint = begin(self, sequence, token_count)
        sequence.page_copies = before
        return checkpoint

    patch.setattr(CachedSequences, "begin_checkpoint", begin_empty)


def the_salt_is_ignored(patch: Patch) -> None:
    """Of prompts that fill no block."""
    root, find = PrefixTree.root, PrefixTree.find
    none = bytes(DIGEST_NBYTES)
    patch.setattr(PrefixTree, "root", lambda self, seed: root(self, none))
    patch.setattr(PrefixTree, "find", lambda self, seed, keys, most: find(self, none, keys, most))


def what_is_found_in_part_is_sent_at_once(patch: Patch) -> None:
    """The rest of the last block is copied by the first step, which has not run."""
    patch.setattr(CachedSequences, "whole_blocks", lambda self, token_count: token_count)


def pages_behind_a_prefix_are_counted_from_its_beginning(patch: Patch) -> None:
    """A sequence has pages of its own at the places of the blocks that it found."""
    begin = CachedSequences.begin

    def begin_shifted(self: CachedSequences, sequence: Sequence, match: Match) -> None:
        begin(self, sequence, match)
        for span in sequence.spans:
            if len(span.page_ids) > 1:
                span.page_ids[0], span.page_ids[1] = span.page_ids[1], span.page_ids[0]

    patch.setattr(CachedSequences, "begin", begin_shifted)


def a_slot_of_a_leaving_sequence_is_a_token_older_than_told(patch: Patch) -> None:
    """A step in flight has computed its last token, and nobody counts it."""
    leave = CachedSequences.leave

    def leave_short(self: CachedSequences, sequence: Sequence) -> None:
        sequence.computed_count = min(sequence.computed_count, len(sequence.token_ids) - 1)
        leave(self, sequence)

    patch.setattr(CachedSequences, "leave", leave_short)


def tokens_here_are_counted_as_prompt_tokens_more(patch: Patch) -> None:
    open_sequence = PageAccount.open

    def open_more(self: PageAccount, *args: object) -> Sequence | None:
        sequence = open_sequence(self, *args)  # type: ignore[arg-type]
        if sequence is not None and sequence.cached_count:
            sequence.cached_count += len(sequence.token_ids)
        return sequence

    patch.setattr(PageAccount, "open", open_more)
