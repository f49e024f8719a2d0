"""Bugs of samples that share a prompt's cache, planted into the real scheduler cores.

Knows nothing of stories.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from common.protocol.worker import PageCopies
from common.request import TokenLogprobs
from common.scheduling.fork_copies import ForkCopies
from common.scheduling.forks import Forks, SamplePages
from common.scheduling.prefix_cache import PrefixCache
from common.scheduling.prefix_tree import Node
from common.scheduling.sequence import Sequence
from decode_server.request import DecodeRequest
from decode_server.requests import Requests
from decode_server.samples import Samples
from tests.sim.planted import Mutation

Patch = pytest.MonkeyPatch


def a_shared_block_is_given_back_once_too_often(patch: Patch) -> None:
    """Each sample gives back what it reads, and nobody counted it."""
    share = Forks._share

    def share_uncounted(
        self: Forks, first: Sequence, token_count: int, sample: Sequence, own: SamplePages
    ) -> list[PageCopies]:
        def not_locked(cache: PrefixCache, node: Node, block_count: int) -> Node:
            return node

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(PrefixCache, "lock", not_locked)
            return share(self, first, token_count, sample, own)

    patch.setattr(Forks, "_share", share_uncounted)


def a_fork_copies_after_the_first_write(patch: Patch) -> None:
    """A step too late."""
    take = ForkCopies.take

    def take_late(self: ForkCopies) -> tuple[list[PageCopies], list[Sequence]]:
        late: tuple[list[PageCopies], list[Sequence]] | None = getattr(self, "late", None)
        patch.setattr(self, "late", take(self), raising=False)
        return late or ([], [])

    patch.setattr(ForkCopies, "take", take_late)


def a_source_closes_before_it_is_copied(patch: Patch) -> None:
    patch.setattr(ForkCopies, "is_source", lambda self, sequence: False)


def a_target_that_left_is_copied_to(patch: Patch) -> None:
    patch.setattr(ForkCopies, "drop", lambda self, sequence: False)


def samples_take_each_other_s_tokens(patch: Patch) -> None:
    """By arrival, where one has left and the others move up."""
    fork = Requests.fork

    def fork_in_order(
        self: Requests,
        parent: DecodeRequest,
        tokens: Mapping[int, int],
        logprobs: Mapping[int, TokenLogprobs],
        now: float,
        *,
        is_known: bool,
    ) -> None:
        mixed = dict(zip(tokens, reversed(tokens.values()), strict=True))
        fork(self, parent, mixed, logprobs, now, is_known=is_known)

    patch.setattr(Requests, "fork", fork_in_order)


def samples_are_admitted_as_one_request(patch: Patch) -> None:
    """Their own pages are not counted before they are taken."""
    needs = Samples.needs

    def none(self: Samples, request: DecodeRequest) -> list[int]:
        return [0 for _ in needs(self, request)]

    patch.setattr(Samples, "needs", none)


def a_sample_that_leaves_keeps_its_pages(patch: Patch) -> None:
    def leave(self: Samples, child: DecodeRequest) -> DecodeRequest | None:
        parent, child.parent = child.parent, None
        if parent is not None:
            parent.children.remove(child)
        return parent

    patch.setattr(Samples, "leave", leave)


def a_sample_copies_one_page_too_few(patch: Patch) -> None:
    """The block that is open at the prompt's end, or the newest page of a window."""
    own_indices = Forks.own_indices

    def shorter(self: Forks, token_count: int, held_count: int) -> list[range]:
        ranges = own_indices(self, token_count, held_count)
        if token_count == held_count:
            return [one[:-1] for one in ranges]
        return ranges

    patch.setattr(Forks, "own_indices", shorter)


def a_sample_nobody_drew_for_is_forgotten(patch: Patch) -> None:
    def forget(self: Requests, child: DecodeRequest, parent: DecodeRequest, now: float) -> None:
        self.samples.leave(child)

    patch.setattr(Requests, "_wait_alone", forget)


MUTATIONS = (
    Mutation("a-shared-block-is-not-counted", a_shared_block_is_given_back_once_too_often, 0),
    Mutation("a-fork-copies-after-the-first-write", a_fork_copies_after_the_first_write, 0),
    Mutation("a-source-closes-before-it-is-copied", a_source_closes_before_it_is_copied, 261),
    Mutation("a-target-that-left-is-copied-to", a_target_that_left_is_copied_to, 121),
    Mutation("samples-take-each-other-s-tokens", samples_take_each_other_s_tokens, 1),
    Mutation("samples-are-admitted-as-one-request", samples_are_admitted_as_one_request, 0),
    Mutation("a-sample-that-leaves-keeps-its-pages", a_sample_that_leaves_keeps_its_pages, 8),
    Mutation("a-sample-copies-one-page-too-few", a_sample_copies_one_page_too_few, 1),
    Mutation("a-sample-nobody-drew-for-is-forgotten", a_sample_nobody_drew_for_is_forgotten, 15),
)
