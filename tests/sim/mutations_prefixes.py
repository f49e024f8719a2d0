"""Bugs of prefixes that are kept: how blocks are found, held, sent in part and let go of.

Knows nothing of stories.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from common.prefix_digests import DIGEST_NBYTES
from common.protocol.peer import TransferRequest
from common.protocol.worker import PrefillChunk
from common.request import CachedTokens
from common.scheduling.cached_sequences import CachedSequences, HeldPrefix
from common.scheduling.followers import Followers
from common.scheduling.page_account import PageAccount
from common.scheduling.prefix_cache import Match
from common.scheduling.prefix_tree import Node, PrefixTree
from common.scheduling.sequence import Sequence
from common.scheduling.step_checkpoints import StepCheckpoints
from common.transfers.incoming import Incoming
from common.transfers.incoming_transfer import Ask, IncomingTransfer
from common.transfers.outgoing import OutgoingTransfer
from decode_server.arriving_blocks import ArrivingBlocks
from decode_server.request import DecodeRequest
from decode_server.requests import Requests
from tests.sim.planted import Mutation

Patch = pytest.MonkeyPatch


# ---- found and held ------------------------------------------------------------------------------


def a_lock_is_forgotten(patch: Patch) -> None:
    """A sequence ends, and what it read stays locked."""
    end = CachedSequences.end

    def end_locked(self: CachedSequences, sequence: Sequence) -> None:
        sequence.node = None
        end(self, sequence)

    patch.setattr(CachedSequences, "end", end_locked)


def what_was_held_is_kept_for_good(patch: Patch) -> None:
    """A transfer brings nothing, and the blocks that waited for it stay locked."""
    let_go = Requests._let_go

    def forget(self: Requests, request: DecodeRequest) -> None:
        request.held = None
        let_go(self, request)

    patch.setattr(Requests, "_let_go", forget)


def a_match_is_not_held(patch: Patch) -> None:
    """It can be evicted while the rest is on its way."""
    hold, adopt = CachedSequences.hold, CachedSequences.adopt

    def hold_loosely(self: CachedSequences, match: Match) -> HeldPrefix | None:
        held = hold(self, match)
        if held is not None and self.cache is not None:
            self.cache.unlock(held.node)
        return held

    def adopt_late(self: CachedSequences, sequence: Sequence, held: HeldPrefix | None) -> None:
        if held is not None and self.cache is not None:
            self.cache.lock(held.node, held.block_count)
        adopt(self, sequence, held)

    patch.setattr(CachedSequences, "hold", hold_loosely)
    patch.setattr(CachedSequences, "let_go", lambda self, held: None)
    patch.setattr(CachedSequences, "adopt", adopt_late)


def what_is_read_can_be_evicted(patch: Patch) -> None:
    """Locking a leaf does not take it from those that may go."""
    note = PrefixTree._note_locked

    def note_and_keep(self: PrefixTree, node: Node) -> None:
        is_leaf = node in self._idle_leaves
        note(self, node)
        if is_leaf:
            self._idle_leaves[node] = None

    patch.setattr(PrefixTree, "_note_locked", note_and_keep)


def blocks_are_found_before_they_are_computed(patch: Patch) -> None:
    """They are in the tree once their chunk is sent."""
    begin = StepCheckpoints.begin

    def begin_early(
        self: StepCheckpoints,
        chunks: list[PrefillChunk],
        prompts: Mapping[int, Sequence],
        decoding: list[Sequence],
    ) -> object:
        for chunk in chunks:
            sequence = prompts[chunk.request_id]
            before = sequence.computed_count
            sequence.computed_count = chunk.stop
            self._account.cached.remember(sequence)
            sequence.computed_count = before
        return begin(self, chunks, prompts, decoding)

    patch.setattr(StepCheckpoints, "begin", begin_early)


def the_salt_is_ignored(patch: Patch) -> None:
    """Prompts of another seed are found, where no block says otherwise."""
    root, find = PrefixTree.root, PrefixTree.find
    none = bytes(DIGEST_NBYTES)
    patch.setattr(PrefixTree, "root", lambda self, seed: root(self, none))
    patch.setattr(PrefixTree, "find", lambda self, seed, keys, most: find(self, none, keys, most))


def a_duplicate_is_kept(patch: Patch) -> None:
    """The page of a block that another sequence was first with never comes back."""
    close = PageAccount.close

    def close_without(self: PageAccount, sequence: Sequence) -> None:
        sequence.copies = [[] for _ in sequence.spans]
        close(self, sequence)

    patch.setattr(PageAccount, "close", close_without)


def a_duplicate_comes_back_twice(patch: Patch) -> None:
    """Its page is given back as soon as it is known, and again when the sequence ends."""
    remember = CachedSequences.remember

    def remember_and_free(self: CachedSequences, sequence: Sequence) -> None:
        counts = [len(pages) for pages in sequence.copies]
        remember(self, sequence)
        for group, (pages, count) in enumerate(zip(sequence.copies, counts, strict=True)):
            if self.cache is not None:
                self.cache.pool.release(group, pages[count:])

    patch.setattr(CachedSequences, "remember", remember_and_free)


def cached_tokens_are_counted_twice(patch: Patch) -> None:
    """Those that both servers had."""
    patch.setattr(CachedTokens, "count", property(lambda self: self.prefill + self.decode))


# ---- sent in part --------------------------------------------------------------------------------


def a_block_in_part_is_sent_at_once(patch: Patch) -> None:
    """What is cached of the last block leaves before the first step has copied it."""
    patch.setattr(CachedSequences, "whole_blocks", lambda self, token_count: token_count)


def pages_of_a_rest_are_counted_from_the_first(patch: Patch) -> None:
    """The list is cut at its wrong end."""

    def pages(self: IncomingTransfer) -> list[tuple[int, list[int]]]:
        counted = zip(self.spans, self.prefix_page_counts, strict=True)
        return [(s.first_index + n, s.page_ids[: len(s.page_ids) - n]) for s, n in counted]

    patch.setattr(IncomingTransfer, "pages", property(pages))


def a_rest_begins_a_page_early(patch: Patch) -> None:
    """The first index is right and the first page is not."""

    def pages(self: IncomingTransfer) -> list[tuple[int, list[int]]]:
        counted = zip(self.spans, self.prefix_page_counts, strict=True)
        return [
            (s.first_index + n, s.page_ids[n - 1 : -1] if n else s.page_ids) for s, n in counted
        ]

    patch.setattr(IncomingTransfer, "pages", property(pages))


def a_rest_is_asked_for_with_all_pages(patch: Patch) -> None:
    """Nobody says where the rest begins: what is here is written again, while others read it."""
    ask_for = Incoming._request

    def ask_for_all(
        self: Incoming, transfer: IncomingTransfer, attachment: int, ask: Ask
    ) -> TransferRequest:
        message = ask_for(self, transfer, attachment, ask)
        pages = [(span.first_index, list(span.page_ids)) for span in transfer.spans]
        return msgspec.structs.replace(message, token_start=0, pages=pages)

    patch.setattr(Incoming, "_request", ask_for_all)


def what_the_target_has_is_sent_again(patch: Patch) -> None:
    """The source begins with the first token, wherever its target wants the rest from."""

    def begin(self: OutgoingTransfer) -> None:
        self.sent_token_count = 0

    patch.setattr(OutgoingTransfer, "__post_init__", begin)


# ---- waited for ----------------------------------------------------------------------------------


def a_follower_is_never_put_back(patch: Patch) -> None:
    """A request that waits for what another computes waits until its time is up."""
    patch.setattr(Followers, "wake", lambda self: None)


def blocks_that_came_are_waited_for(patch: Patch) -> None:
    """A transfer ends, and equal beginnings go on waiting for it."""
    patch.setattr(ArrivingBlocks, "remove", lambda self, request: None)


MUTATIONS = (
    Mutation("a-lock-is-forgotten", a_lock_is_forgotten, 0),
    Mutation("what-was-held-is-kept-for-good", what_was_held_is_kept_for_good, 1),
    Mutation("a-match-is-not-held", a_match_is_not_held, 1),
    Mutation("what-is-read-can-be-evicted", what_is_read_can_be_evicted, 0),
    Mutation("blocks-found-before-computed", blocks_are_found_before_they_are_computed, 252),
    Mutation("the-salt-is-ignored", the_salt_is_ignored, 75),
    Mutation("a-duplicate-is-kept", a_duplicate_is_kept, 0),
    Mutation("a-duplicate-comes-back-twice", a_duplicate_comes_back_twice, 0),
    Mutation("cached-tokens-are-counted-twice", cached_tokens_are_counted_twice, 2),
    Mutation("a-block-in-part-is-sent-at-once", a_block_in_part_is_sent_at_once, 63),
    Mutation("pages-of-a-rest-from-the-first", pages_of_a_rest_are_counted_from_the_first, 1),
    Mutation("a-rest-begins-a-page-early", a_rest_begins_a_page_early, 1),
    Mutation("a-rest-is-asked-for-with-all-pages", a_rest_is_asked_for_with_all_pages, 6),
    Mutation("what-the-target-has-is-sent-again", what_the_target_has_is_sent_again, 6),
    Mutation("a-follower-is-never-put-back", a_follower_is_never_put_back, 7),
    Mutation("blocks-that-came-are-waited-for", blocks_that_came_are_waited_for, 0),
)
