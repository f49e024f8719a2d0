"""Two servers that keep prompts: turns of conversations through both, or on the second one alone,
and answers that go back.

In the order of the real schedulers: the decode side finds blocks, keeps them and reserves the rest;
the prefill side finds what it has itself, and what of that is asked for leaves before its first
step. `Kept` says what has to be found, from the tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from common.layout.cache_layout import PageGroup
from common.layout.component import LiveKind
from common.planner.pairing import TokenRange
from common.request import SamplingParams
from common.scheduling.cached_sequences import HeldPrefix
from common.scheduling.prefix_cache import Match
from common.scheduling.sequence import PageSpan, Sequence
from tests.families.server import PageLists, Server, digests_of, greedy, transfer

NAN_BYTE = 0xFF
# A server that is offered a cache knows the tokens before its last block by digests alone.
UNKNOWN_TOKEN = 0


@dataclass
class Kept:
    """What a server has of token lists that were computed there, as nothing was evicted.

    block_tokens: of a block. lists: the tokens of each; where one ends, a prompt goes on from it.
    needs_checkpoint: whether one goes on from nowhere else, as something does not grow with the
    tokens. windows: those groups that move along with the tokens.
    """

    block_tokens: int
    needs_checkpoint: bool
    has_slots: bool
    windows: list[PageGroup]
    lists: list[list[int]] = field(default_factory=list)

    @staticmethod
    def of(server: Server) -> Kept:
        cache, groups = server.account.cache, server.layout.groups
        assert cache is not None
        return Kept(
            cache.block_tokens,
            not all(group.live.is_streamable for group in groups),
            any(group.live.kind is LiveKind.SLOT for group in groups),
            [group for group in groups if group.live.kind is LiveKind.WINDOW],
        )

    def blocks(self, prompt: list[int], most: int) -> int:
        """Tokens in whole blocks that a prompt has in common with a list."""
        found = [common_count(one, prompt[:most]) for one in self.lists]
        return max(found, default=0) // self.block_tokens * self.block_tokens

    def note_computed(self, prompt: list[int], start: int) -> None:
        """A prompt is computed from a token on. Where it leaves what is there, one more ends, and
        with slots another one at the last block that an equal prompt can go on from."""
        known = self.blocks(prompt, len(prompt) - 1)
        self.lists += [prompt[:known]] * (self.needs_checkpoint and known > start)
        last = (len(prompt) - 1) // self.block_tokens * self.block_tokens
        self.lists += [prompt[:last]] * (self.has_slots and last > start)
        self.lists.append(prompt)

    def note_received(self, prompt: list[int]) -> None:
        """A prompt's cache has come."""
        self.lists += [prompt] * self.needs_checkpoint

    def starts(self, prompt: list[int]) -> set[int]:
        """From where on a prompt may be computed; two where a page of a window may be gone."""
        most = len(prompt) - 1
        ends = [len(one) for one in self.lists if len(one) <= most and one == prompt[: len(one)]]
        start = max(ends, default=0)
        if not self.needs_checkpoint:
            start = max(start, self.blocks(prompt, most))
        if not any(self._goes_a_token_back(one, prompt) for one in self.lists):
            return {start}
        is_whole = all(w.page_first(most) == w.page_first(most + 1) for w in self.windows)
        return {most} if is_whole else {start, most}

    def _goes_a_token_back(self, one: list[int], prompt: list[int]) -> bool:
        """Whether a prompt goes on from all of a list but its last token, which it computes again.
        A recurrent state can't take a token back."""
        if self.has_slots or len(one) != len(prompt) or one[:-1] != prompt[:-1]:
            return False
        if len(one) % self.block_tokens:
            return True
        # The last token is in a block, which is found by its name and copied.
        return one == prompt and self.needs_checkpoint


def common_count(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    differing = (index for index, (mine, theirs) in enumerate(pairs) if mine != theirs)
    return next(differing, min(len(one), len(other)))


@dataclass
class Turned:
    """One turn through both servers. start: the first token that was asked for. cached_count: of
    the prompt, where it was computed. nbytes: that moved."""

    output: list[int]
    start: int
    cached_count: int
    nbytes: int


@dataclass
class _Reserved:
    """A cache that is on its way. held: what is here of it."""

    held: HeldPrefix | None
    spans: list[PageSpan]
    start: int
    nbytes: int = 0

    def asked_pages(self) -> PageLists:
        """What the other server is told: no page of what is here."""
        kept = self.held.prefix.pages if self.held is not None else [[] for _ in self.spans]
        return [
            (span.first_index + len(pages), span.page_ids[len(pages) :])
            for span, pages in zip(self.spans, kept, strict=True)
        ]


def turn(
    source: Server, target: Server, prompts: list[list[int]], samplings: list[SamplingParams]
) -> list[Turned]:
    """Compute prompts on one server, and what follows on the other one; all at once."""
    reserved = [_reserve(target, prompt) for prompt in prompts]
    given = list(map(source.open_sampled, prompts, samplings))
    cached_counts = [sequence.cached_count for sequence in given]
    for one, sequence in zip(reserved, given, strict=True):
        stop = source.account.cached.whole_blocks(sequence.cached_count)
        if stop > one.start:
            _send(source, sequence, target, one, TokenRange(one.start, stop, False))
    source.compute(given)
    taken = []
    for one, sequence, early in zip(reserved, given, cached_counts, strict=True):
        start = max(one.start, source.account.cached.whole_blocks(early))
        _send(source, sequence, target, one, TokenRange(start, sequence.computed_count, True))
        taken.append(_adopt(target, one, sequence))
        source.close(sequence)
    target.decode()
    return [
        Turned(sequence.token_ids[sequence.prompt_count :], one.start, cached_count, one.nbytes)
        for one, sequence, cached_count in zip(reserved, taken, cached_counts, strict=True)
    ]


def turn_alone(
    server: Server, prompts: list[list[int]], samplings: list[SamplingParams]
) -> list[Turned]:
    """The same on one server, which computes what it lacks of the prompts."""
    sequences = list(map(server.open_sampled, prompts, samplings))
    cached_counts = [sequence.cached_count for sequence in sequences]
    server.decode()
    return [
        Turned(sequence.token_ids[sequence.prompt_count :], 0, cached_count, 0)
        for sequence, cached_count in zip(sequences, cached_counts, strict=True)
    ]


@dataclass
class Returned:
    """A cache that went back. token_count: of prompt and answer. start, nbytes: as of a turn."""

    token_count: int
    start: int
    nbytes: int


def give_back(source: Server, target: Server, token_ids: list[int]) -> Returned:
    """Send what a server has of a prompt and its answer, to be found on the other one, as the
    `Returns` of the two schedulers do."""
    digests = digests_of(token_ids, source.lookahead)
    match = source.account.match(digests, token_ids, len(token_ids) - 1)
    lent = source.account.cached.lend(match)
    assert lent is not None, "something of what its last token leaves is not there"
    count = match.token_count
    block_stop = target.account.cached.whole_blocks(count)
    named_count = count + source.lookahead
    told = [UNKNOWN_TOKEN] * block_stop + token_ids[block_stop:named_count]
    digests = source.account.cached.digests_up_to(digests, named_count)
    one = _reserve(target, told, digests, count)
    tokens = TokenRange(one.start, count, True)
    nbytes = transfer(source, lent.pages, target, one.asked_pages(), tokens)
    source.account.cached.take_back(lent)
    sequence = target.account.adopt(
        target.take_id(), told, count, greedy(1), one.spans, count, digests, one.held
    )
    sequence.cuts.clear()
    target.close(sequence)
    return Returned(count, one.start, nbytes)


def _reserve(target: Server, prompt: list[int], digests: bytes = b"", count: int = 0) -> _Reserved:
    """count: tokens of the prompt that come, if not all."""
    account, count = target.account, count or len(prompt)
    digests = digests or digests_of(prompt, target.lookahead)
    match = account.match(digests, prompt, count)
    assert account.can_allocate(account.needs_to_receive(match, count))
    held = account.cached.hold(match)
    spans = account.spans_for_prompt(count)
    if held is not None:
        for span, pages in zip(spans, held.prefix.pages, strict=True):
            span.page_ids.extend(pages)
    needs = account.needs(spans, count)
    for span, pages in zip(spans, account.allocate(needs), strict=True):
        span.page_ids.extend(pages)
    return _Reserved(held, spans, held.token_count if held is not None else 0)


def _send(
    source: Server, given: Sequence, target: Server, one: _Reserved, tokens: TokenRange
) -> None:
    one.nbytes += transfer(source, given.page_lists(), target, one.asked_pages(), tokens)


def _adopt(target: Server, one: _Reserved, given: Sequence) -> Sequence:
    sequence = target.account.adopt(
        target.take_id(),
        list(given.token_ids),
        given.prompt_count,
        given.sampling,
        one.spans,
        given.computed_count,
        digests_of(given.token_ids[: given.prompt_count], target.lookahead),
        one.held,
    )
    sequence.first_proposals = list(given.first_proposals)
    target.batcher.add(sequence)
    if target.batcher.limits.finish_of(sequence) is not None:
        target.batcher.remove(sequence)
    return sequence


# ---- pages that are spoiled --------------------------------------------------------------------


def pages_found(server: Server, prompts: list[list[int]]) -> list[set[int]]:
    """Per group, the pages that prompts find on a server: to be computed there, or to be sent."""
    found: list[set[int]] = [set() for _ in server.layout.groups]
    for prompt in prompts:
        for most in (len(prompt) - 1, len(prompt)):
            digests = digests_of(prompt, server.lookahead)
            match = server.account.match(digests, prompt, most)
            for group, pages in enumerate(_pages_of(server, match)):
                found[group].update(pages)
    return found


def _pages_of(server: Server, match: Match) -> list[list[int]]:
    cache = server.account.cache
    assert cache is not None
    pages: list[list[int]] = [[] for _ in server.layout.groups]
    if match.node is not None:
        pages = cache.pages(match.node, match.block_count)
    if match.checkpoint is not None:
        own = match.checkpoint.pages
        pages = [[*one, *other] for one, other in zip(pages, own, strict=True)]
    return pages


def pages_kept(server: Server) -> list[set[int]]:
    """Per group, all pages that are found by somebody; of a server at rest, all that are used."""
    cache = server.account.cache
    assert cache is not None
    kept: list[set[int]] = [set() for _ in server.layout.groups]
    growing = [index for index, count in enumerate(cache.page_counts) if count]
    for node in cache.tree.nodes():
        for group, pages in zip(growing, node.pages, strict=True):
            kept[group].update(pages)
        for checkpoint in node.checkpoints:
            for group, own in enumerate(checkpoint.pages):
                kept[group].update(own)
    used_counts = map(server.account.pool.used_count, range(len(kept)))
    assert list(map(len, kept)) == list(used_counts)
    return kept


def spoil_all_but(server: Server, kept: list[set[int]]) -> None:
    """Fill every other page with NaN, the scratch page too."""
    counts = server.account.pool.page_counts
    others = [set(range(n + 1)) - pages for n, pages in zip(counts, kept, strict=True)]
    spoil(server, others)


def spoil(server: Server, chosen: list[set[int]], noise_seed: int | None = None) -> None:
    """Fill pages of every group, on all ranks, with NaN; or with noise, if a seed is given."""
    generator = torch.Generator().manual_seed(noise_seed or 0)
    for pool in server.pools:
        for index, group in enumerate(pool.layout.groups):
            pages = sorted(chosen[index])
            if not pages or not group.page_nbytes:
                continue
            rows = pool.buffers[index].view(-1, group.page_nbytes)
            if noise_seed is None:
                rows[pages] = NAN_BYTE
            else:
                noise = 20 * torch.randn((len(pages), group.page_nbytes // 4), generator=generator)
                rows[pages] = noise.view(torch.uint8)
