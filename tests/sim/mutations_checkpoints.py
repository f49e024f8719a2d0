"""Bugs of checkpoints: what they hold, whom they fit, and whose their pages are.

Knows nothing of stories.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as List

import pytest

from common.protocol.worker import PageCopies, PrefillChunk
from common.scheduling.cached_sequences import CachedSequences
from common.scheduling.checkpoints import Checkpoints
from common.scheduling.prefix_cache import Match, PrefixCache
from common.scheduling.prefix_tree import Checkpoint, Node
from common.scheduling.sequence import Sequence
from common.scheduling.step_checkpoints import StepCheckpoints
from tests.sim.planted import Mutation

Patch = pytest.MonkeyPatch


# ---- whom they fit -------------------------------------------------------------------------------


def a_checkpoint_is_of_one_token_more(patch: Patch) -> None:
    """It is found for prompts that it lacks a token of."""
    end = CachedSequences.end_checkpoint

    def end_longer(self: CachedSequences, sequence: Sequence, checkpoint: Checkpoint) -> None:
        assert self.cache is not None
        count, blocks = checkpoint.token_count + 1, checkpoint.block_count
        if self.cache.blocks_in(count) == blocks and count <= len(sequence.token_ids):
            checkpoint.token_count = count
            checkpoint.rest = tuple(sequence.token_ids[blocks * self.cache.block_tokens : count])
        end(self, sequence, checkpoint)

    patch.setattr(CachedSequences, "end_checkpoint", end_longer)


def the_last_token_counts_as_computed(patch: Patch) -> None:
    """What a sequence leaves behind is told to be of one token more than it computed."""
    leave = CachedSequences._leave_checkpoint

    def leave_longer(self: CachedSequences, sequence: Sequence, cache: PrefixCache) -> None:
        sequence.computed_count += sequence.computed_count < len(sequence.token_ids)
        leave(self, sequence, cache)

    patch.setattr(CachedSequences, "_leave_checkpoint", leave_longer)


def the_rest_of_a_checkpoint_is_not_compared(patch: Patch) -> None:
    """Whoever has its blocks takes it, however the tokens behind them go on."""
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


def a_prefix_goes_on_without_its_checkpoint(patch: Patch) -> None:
    """Blocks alone are enough: windows, tails and slots are whatever lies in the pages."""

    def without(self: PrefixCache, match: Match) -> Match:
        return Match(match.node, match.block_count, match.block_count * self.block_tokens)

    patch.setattr(PrefixCache, "without_checkpoint", without)


# ---- what they hold ------------------------------------------------------------------------------


def a_checkpoint_is_not_copied(patch: Patch) -> None:
    """A sequence goes on from one and has what lay in its own pages."""
    patch.setattr(CachedSequences, "copy_checkpoint", lambda self, sequence: None)


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


def copies_go_with_the_step_behind(patch: Patch) -> None:
    """The step that they were for has computed on by then."""
    take = Sequence.take_copies
    late: dict[int, list[PageCopies]] = {}

    def take_late(self: Sequence) -> list[PageCopies]:
        due, late[id(self)] = late.pop(id(self), []), take(self)
        return due

    patch.setattr(Sequence, "take_copies", take_late)


# ---- whose their pages are -----------------------------------------------------------------------


def a_checkpoint_is_evicted_while_it_is_copied(patch: Patch) -> None:
    """Its pages have another owner by the time of the step."""

    def use_loosely(self: Checkpoints, checkpoint: Checkpoint) -> None:
        self.used_count += 1

    patch.setattr(Checkpoints, "use", use_loosely)
    patch.setattr(Checkpoints, "let_go", lambda self, checkpoint: None)


def a_page_handed_over_is_given_back(patch: Patch) -> None:
    """What a sequence leaves to a checkpoint is free as well."""
    leave = CachedSequences._leave_checkpoint

    def leave_and_keep(self: CachedSequences, sequence: Sequence, cache: PrefixCache) -> None:
        pages = [list(span.page_ids) for span in sequence.spans]
        leave(self, sequence, cache)
        for span, before in zip(sequence.spans, pages, strict=True):
            span.page_ids = before

    patch.setattr(CachedSequences, "_leave_checkpoint", leave_and_keep)


def pages_of_an_evicted_checkpoint_are_lost(patch: Patch) -> None:
    """It is forgotten, and its pages are nobody's."""

    def give_up(self: Checkpoints, checkpoint: Checkpoint) -> None:
        self.count -= 1

    patch.setattr(Checkpoints, "give_up", give_up)


def a_state_inside_a_chunk_is_not_kept(patch: Patch) -> None:
    """Its checkpoint is found, and the workers never heard of its page."""
    keep = StepCheckpoints.keep_inside

    def keep_nothing(
        self: StepCheckpoints,
        chunks: list[PrefillChunk],
        prompts: Mapping[int, Sequence],
        checkpoints: list[tuple[Sequence, Checkpoint]],
    ) -> list[PrefillChunk]:
        keep(self, chunks, prompts, checkpoints)
        return chunks

    patch.setattr(StepCheckpoints, "keep_inside", keep_nothing)


MUTATIONS = (
    Mutation("a-checkpoint-is-of-one-token-more", a_checkpoint_is_of_one_token_more, 0),
    Mutation("the-last-token-counts-as-computed", the_last_token_counts_as_computed, 0),
    Mutation("rest-of-a-checkpoint-not-compared", the_rest_of_a_checkpoint_is_not_compared, 0),
    Mutation("a-prefix-without-its-checkpoint", a_prefix_goes_on_without_its_checkpoint, 0),
    Mutation("a-checkpoint-is-not-copied", a_checkpoint_is_not_copied, 0),
    Mutation("a-checkpoint-is-made-of-nothing", a_checkpoint_is_made_of_nothing, 2),
    Mutation("copies-go-with-the-step-behind", copies_go_with_the_step_behind, 0),
    Mutation("evicted-while-it-is-copied", a_checkpoint_is_evicted_while_it_is_copied, 2),
    Mutation("a-page-handed-over-is-given-back", a_page_handed_over_is_given_back, 0),
    Mutation("pages-of-a-checkpoint-are-lost", pages_of_an_evicted_checkpoint_are_lost, 0),
    Mutation("a-state-inside-a-chunk-is-not-kept", a_state_inside_a_chunk_is_not_kept, 2),
)
