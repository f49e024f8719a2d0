"""Several samples go on from the cache of one prompt.

    prompt     | b1 | b2 | b3 | p  |  w  s        blocks, a page in part, windows, slots
    sample 1     b1   b2   b3   p     w  s        takes the prompt's pages over
    sample 2     b1   b2   b3   p'    w' s'       blocks by count, copies of all else

Pages for the copies are there before the prompt is asked for or computed, so a fork can't fail.
Knows nothing of requests or steps.
"""

from __future__ import annotations

from collections.abc import Sequence as List

from common.protocol.worker import PageCopies
from common.scheduling.page_account import PageAccount
from common.scheduling.sequence import PageSpan, Sequence

# Per page group, the pages of one sample.
SamplePages = list[list[int]]


class Forks:
    """The pages that samples have of their own. account: with a prefix cache, which counts who
    uses a block."""

    def __init__(self, account: PageAccount) -> None:
        assert account.cache is not None
        self._account = account
        self._cache = account.cache

    def own_indices(self, token_count: int, held_count: int) -> list[range]:
        """Per group, the logical indices of the pages that a sample of a prompt of `token_count`
        tokens has for itself, once it holds `held_count` tokens."""
        blocks = self._cache.named_blocks(token_count)
        ranges: list[range] = []
        for group, each in zip(self._account.groups, self._cache.page_counts, strict=True):
            first = blocks * each if each else group.page_first(token_count)
            ranges.append(range(first, group.page_end(held_count)))
        return ranges

    def needs(self, token_count: int, count: int) -> list[int]:
        """Pages per group for `count` samples of a prompt and their first tokens, beside what the
        prompt and one sample take."""
        indices = self.own_indices(token_count, token_count + 1)
        return [max(0, count - 1) * len(one) for one in indices]

    def count_max(self, token_count: int) -> int:
        """Samples of a prompt that the pool has room for at a time, were it empty; at least 1."""
        account = self._account
        prompt = map(
            max,
            account.needs_of_prompt(token_count),
            account.needs_to_compute(token_count + 1),
        )
        counts = [
            (total - need) // each
            for total, need, each in zip(
                account.pool.page_counts, prompt, self.needs(token_count, 2), strict=True
            )
            if each
        ]
        return 1 + max(0, min(counts, default=0))

    def reserve(self, token_count: int, count: int) -> list[SamplePages]:
        """The pages of `needs`, which must be there, for each sample but one."""
        return [self._account.allocate(self.needs(token_count, 2)) for _ in range(count - 1)]

    def release(self, pages: SamplePages) -> None:
        """One sample will not be."""
        for group, of_group in enumerate(pages):
            self._account.pool.release(group, of_group)

    def fork(
        self, prompt: Sequence, samples: List[Sequence], pages: List[SamplePages]
    ) -> list[tuple[Sequence, list[PageCopies]]]:
        """Give each sample the prompt's cache: the first takes it over, each other one gets pages
        of its own.

        samples: without pages, with a prompt's tokens and one more. Returns what the next step has
        to copy from the first one.
        """
        first, *others = samples
        token_count = prompt.computed_count
        assert token_count == len(first.token_ids) - 1 and not prompt.making
        assert prompt.block_count == self._cache.named_blocks(token_count), "its blocks are found"
        _hand_over(prompt, first)
        shared = zip(others, pages, strict=True)
        return [(one, self._share(first, token_count, one, own)) for one, own in shared]

    def _share(
        self, first: Sequence, token_count: int, sample: Sequence, own: SamplePages
    ) -> list[PageCopies]:
        assert first.node is not None
        sample.node = self._cache.lock(first.node, first.block_count)
        sample.block_count = first.block_count
        blocks = self._cache.pages(sample.node, sample.block_count)
        indices = self.own_indices(token_count, token_count)
        copies: list[PageCopies] = []
        for group, (one, of_blocks) in enumerate(zip(indices, blocks, strict=True)):
            start = one.start if not self._cache.page_counts[group] else 0
            sample.spans[group] = PageSpan(start, of_blocks + own[group])
            if one:
                sources = first.spans[group].between(one)
                copies.append(PageCopies(group, sources, own[group][: len(one)]))
        sample.digests = first.digests
        sample.computed_count = first.computed_count
        sample.cached_count = first.cached_count
        sample.received_count = first.received_count
        return copies


def _hand_over(prompt: Sequence, sample: Sequence) -> None:
    """All that a sequence has becomes another one's; workers hear of its pages anew."""
    sample.spans, prompt.spans = prompt.spans, [PageSpan(0, []) for _ in prompt.spans]
    for span in sample.spans:
        span.granted_count = 0
    sample.copies, prompt.copies = prompt.copies, [[] for _ in prompt.spans]
    sample.node, prompt.node = prompt.node, None
    sample.block_count, prompt.block_count = prompt.block_count, 0
    sample.added_from, prompt.added_from = prompt.added_from, None
    sample.digests, prompt.digests = prompt.digests, b""
    sample.cuts, prompt.cuts = prompt.cuts, []
    sample.made, prompt.made = prompt.made, []
    sample.computed_count = prompt.computed_count
    sample.cached_count = prompt.cached_count
    sample.received_count = prompt.received_count
