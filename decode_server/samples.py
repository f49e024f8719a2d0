"""Samples of one prompt: which requests share the cache of which, until each has its first token.

    Submit, n samples ─► parent: waits, is asked for or computed, once
                         children: wait for it; each is a client's, and ends alone
    its cache is there ─► children run, parent has ended

Owner of `DecodeRequest.parent`, `children`, `seeds` and `sample_pages`. Knows nothing of states.
"""

from __future__ import annotations

from collections.abc import Sequence as List

import msgspec

from common.protocol.frontend import Sibling, Submit
from common.protocol.worker import PageCopies, SampleDraw
from common.scheduling.forks import Forks
from common.scheduling.page_account import PageAccount
from common.scheduling.sequence import PageSpan, Sequence
from common.scheduling.waiting_queue import WaitingQueue
from decode_server.request import DecodeRequest


class Samples:
    """The pages that samples have of their own are there as soon as their prompt's are."""

    def __init__(self, account: PageAccount) -> None:
        self._forks = Forks(account)
        self._groups = account.groups
        self._parents: dict[int, DecodeRequest] = {}  # those that have children

    def groups_of(self, submit: Submit) -> list[list[Sibling]]:
        """The samples of a body, as many together as the pool could ever hold beside their prompt.
        Without digests its blocks can't be shared."""
        samples, count = submit.samples, 1
        if submit.siblings and submit.prefix_digests:
            count = self._forks.count_max(len(submit.token_ids))
        return [samples[start : start + count] for start in range(0, len(samples), count)]

    def join(self, parent: DecodeRequest, children: list[DecodeRequest]) -> None:
        """They share a prompt from now on."""
        parent.children = children
        parent.seeds = tuple(child.sampling.seed for child in children)
        for index, child in enumerate(children):
            child.parent, child.sample_index = parent, index
        self._parents[parent.request_id] = parent

    def count_in(self, queue: WaitingQueue[DecodeRequest]) -> int:
        """Samples, and requests that have none, that wait in a queue."""
        grouped = (one for one in self._parents.values() if one.request_id in queue)
        return len(queue) + sum(one.sample_count - 1 for one in grouped)

    def needs(self, request: DecodeRequest) -> list[int]:
        """Pages per group that its samples take beside its own."""
        return self._forks.needs(len(request.token_ids), len(request.children))

    def reserve(self, parent: DecodeRequest) -> None:
        """Take those pages, which must be there."""
        if parent.children:
            count = len(parent.children)
            parent.sample_pages = self._forks.reserve(len(parent.token_ids), count)

    def give_back(self, parent: DecodeRequest) -> None:
        """The prompt's cache does not come now."""
        for pages in parent.sample_pages:
            self._forks.release(pages)
        parent.sample_pages = []

    def draws(self, parent: DecodeRequest) -> list[SampleDraw]:
        """What its last chunk draws."""
        return [SampleDraw(one.request_id, one.sampling.seed) for one in parent.children]

    def leave(self, child: DecodeRequest) -> DecodeRequest | None:
        """A sample goes on, or ends, without its prompt; returns that."""
        parent, child.parent = child.parent, None
        if parent is None:
            return None
        parent.children.remove(child)
        if not parent.children:
            del self._parents[parent.request_id]
        if parent.sample_pages and len(parent.sample_pages) >= max(1, len(parent.children)):
            self._forks.release(parent.sample_pages.pop())
        if parent.sequence is not None:
            parent.sequence.samples = self.draws(parent)
        return parent

    def begin(self, child: DecodeRequest, parent: DecodeRequest, *, is_first: bool) -> Sequence:
        """What is known of the prompt is known of a sample; its sequence has no pages yet. What
        the transfer moved counts once."""
        child.requested_at = parent.requested_at
        child.cached = parent.cached
        child.source_name = parent.source_name
        child.prompt_logprobs = parent.prompt_logprobs
        child.digests = parent.digests
        child.retraction_count = parent.retraction_count
        trace = parent.transfer_trace
        if not is_first:
            trace = msgspec.structs.replace(
                trace, nbytes=0, exposed_nbytes=0, run_count=0, wire_s=0.0
            )
        child.transfer_trace = trace
        spans = [PageSpan(0, []) for _ in self._groups]
        sequence = Sequence(
            child.request_id, child.token_ids, child.prompt_count, child.sampling, spans
        )
        sequence.priority = child.claim.priority
        return sequence

    def fork(
        self, parent: DecodeRequest, prompt: Sequence, samples: List[Sequence]
    ) -> list[tuple[Sequence, list[PageCopies]]]:
        """As `Forks.fork`, with the pages that were reserved."""
        pages, left = parent.sample_pages, max(0, len(samples) - 1)
        parent.sample_pages = pages[left:]
        self.give_back(parent)
        return self._forks.fork(prompt, samples, pages[:left]) if samples else []
