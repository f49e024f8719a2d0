"""Ranks that are driven step by step, with pages that the test itself gives out and copies.

Knows no scheduling: what a sequence that begins at token k takes over is worked out here from the
live rules alone, so that neither a scheduler nor an engine can hide what the other does wrong.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from common.clock import ManualClock
from common.engine.cache.kv_pool import KvPool
from common.engine.loader import load_model
from common.engine.model_runner import ModelRunner
from common.engine.models.registry import cache_components
from common.layout.cache_layout import PageGroup, ServerLayout
from common.layout.component import LiveKind
from common.layout.parallel import split_layers
from common.protocol.codec import decode_logprobs
from common.protocol.worker import NewSequence, PageCopies, PageGrant, PrefillChunk, Step, StepDone
from common.request import SamplingParams, TokenLogprobs
from tests.families.ranks import Crew, contexts
from tests.families.server import Shape

PAGE_COUNT = 1400
NAN_BYTE = 0xFF
"""Makes a NaN of every element type of a cache."""

Pages = list[dict[int, int]]
"""Per page group: logical page index -> page id."""


@dataclass
class Traced:
    """One sequence: what it computes, where its cache lies, and what came out.

    tokens: its prompt, and its output as it is drawn. start: where its first chunk begins.
    logprobs: of the prompt behind `start`, then of the output.
    """

    request_id: int
    tokens: list[int]
    prompt_count: int
    start: int
    pages: Pages
    computed: int = 0
    has_failed: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_count :]


class Ranks:
    """The ranks of one server. Memory that nobody wrote is NaN."""

    def __init__(self, checkpoint: Path, shape: Shape, seed: int = 0) -> None:
        ranks = contexts(shape.tp_size, shape.pp_size)
        self.meeting = ranks[0].meeting
        models = [load_model(checkpoint, parallel=rank) for rank in ranks]
        config = models[0].config
        self.layout = ServerLayout(
            components=cache_components(config, "auto"),
            tp_size=shape.tp_size,
            stages=split_layers(config.layer_count, shape.pp_size),
            page_size=shape.page_size,
            layer_group_count=shape.layer_group_count,
        )
        self.layout.check()
        self.groups = self.layout.groups
        counts = [PAGE_COUNT] * len(self.groups)
        self.pools = [KvPool.allocate(rank, counts, "cpu") for rank in self.layout.ranks]
        self.runners = [
            ModelRunner(model, pool, ManualClock())
            for model, pool in zip(models, self.pools, strict=True)
        ]
        self._crew = Crew(ranks)
        self._rng = random.Random(seed)
        self._free = [list(range(1, PAGE_COUNT + 1)) for _ in self.groups]
        for free in self._free:
            self._rng.shuffle(free)
        self._next_id = 1
        self._copies: list[PageCopies] = []
        self._opened: list[tuple[Traced, int]] = []
        self.spoil_all_but([])

    # ---- pages -----------------------------------------------------------------------------------

    def fresh(self, token_count: int, start: int = 0) -> Pages:
        """New pages for a sequence of so many tokens, of which the first ones are computed."""
        return [
            self._take(index, range(group.page_first(start), group.page_end(token_count)))
            for index, group in enumerate(self.groups)
        ]

    def private(self, count: int) -> Pages:
        """New pages for what a sequence needs to go on behind `count` tokens, beside whole pages of
        what grows with every token."""
        return [
            self._take(index, private_pages(group, count))
            for index, group in enumerate(self.groups)
        ]

    def copy(self, source: Pages, target: Pages) -> None:
        """Let the next step copy: every page of `target` from the same place in `source`, if it has
        one."""
        for index, (given, taken) in enumerate(zip(source, target, strict=True)):
            places = [place for place in taken if place in given and given[place] != taken[place]]
            self._rng.shuffle(places)
            self._copies.append(
                PageCopies(index, [given[p] for p in places], [taken[p] for p in places])
            )

    def spoil(self, group: int, page: int) -> None:
        """Fill a page with NaN, on every rank."""
        for pool in self.pools:
            nbytes = pool.layout.groups[group].page_nbytes
            pool.buffers[group].view(-1)[page * nbytes : (page + 1) * nbytes] = NAN_BYTE

    def spoil_all_but(self, kept: list[Pages]) -> None:
        """Fill every other page with NaN, the scratch page too."""
        for index in range(len(self.groups)):
            pages = sorted({page for one in kept for page in one[index].values()})
            for pool in self.pools:
                nbytes = pool.layout.groups[index].page_nbytes
                if nbytes == 0:
                    continue
                rows = pool.buffers[index].view(-1, nbytes)
                contents = rows[pages].clone()
                rows.fill_(NAN_BYTE)
                rows[pages] = contents

    # ---- sequences -------------------------------------------------------------------------------

    def open(self, prompt: list[int], pages: Pages, start: int, told_from: int) -> Traced:
        """A sequence whose first chunk begins at `start`; log-probabilities of the prompt's tokens
        behind `told_from` are wanted."""
        assert start <= told_from < len(prompt)
        traced = Traced(self._next_id, list(prompt), len(prompt), start, pages, computed=start)
        self._next_id += 1
        self._opened.append((traced, told_from))
        return traced

    def step(self, chunks: list[tuple[Traced, int]], decode: list[Traced] | None = None) -> None:
        """One step on all ranks: the next tokens of prompts up to a count each, and decodes."""
        decode = decode or []
        opened, self._opened = self._opened, []
        step = Step(
            step_id=1,
            new=[
                NewSequence(t.request_id, list(t.tokens), t.prompt_count, greedy(told_from + 1))
                for t, told_from in opened
            ],
            grants=[grant for traced, _ in opened for grant in grants_of(traced)],
            chunks=[
                PrefillChunk(t.request_id, t.computed, stop, is_last=stop == len(t.tokens))
                for t, stop in chunks
            ],
            decode=[t.request_id for t in decode],
            decode_tokens=[t.tokens[-1] for t in decode],
            copies=self._copies,
        )
        self._copies = []
        for traced, stop in chunks:
            traced.computed = stop
        for traced in decode:
            traced.computed = len(traced.tokens)
        done = self._run(step)
        by_id = {traced.request_id: traced for traced in [*(t for t, _ in chunks), *decode]}
        for request_id, told in done.prompt_logprobs.items():
            by_id[request_id].logprobs += decode_logprobs(told)
        for request_id, token_id in zip(done.request_ids, done.token_ids, strict=True):
            traced = by_id[request_id]
            traced.has_failed |= request_id in done.failed
            traced.tokens.append(token_id)
            if request_id in done.logprobs:
                traced.logprobs.append(done.logprobs[request_id])

    def decode(self, sequences: list[Traced], count: int) -> None:
        for _ in range(count):
            self.step([], decode=sequences)

    def forget(self, sequences: list[Traced]) -> None:
        """End sequences; their pages stay as they are."""
        self._run(Step(step_id=1, retired=[traced.request_id for traced in sequences]))

    # ----------------------------------------------------------------------------------------------

    def _take(self, group: int, places: range) -> dict[int, int]:
        return {place: self._free[group].pop() for place in places}

    def _run(self, step: Step) -> StepDone:
        answers = self._crew.run(lambda rank: self.runners[rank].run(step))
        last = answers[-self.layout.tp_size :]
        assert all(answer.token_ids == last[0].token_ids for answer in last)
        return last[0]


def grants_of(traced: Traced) -> list[PageGrant]:
    grants = []
    for group, pages in enumerate(traced.pages):
        if pages:
            first = min(pages)
            page_ids = [pages[first + offset] for offset in range(len(pages))]
            grants.append(PageGrant(traced.request_id, group, first, page_ids))
    return grants


def whole_page_count(group: PageGroup, count: int) -> int:
    """Pages, from the first, that `count` tokens have filled for good: others may read them too."""
    match group.live.kind:
        case LiveKind.FULL:
            return count // group.page_items
        case LiveKind.BLOCK:
            return count // group.live.size // group.page_items
        case LiveKind.WINDOW | LiveKind.TAIL | LiveKind.SLOT:
            return 0


def private_pages(group: PageGroup, count: int) -> range:
    """Places of the pages that a sequence behind `count` tokens reads and can't share."""
    if group.live.is_streamable:
        return range(whole_page_count(group, count), group.page_end(count))
    return range(group.page_first(count), group.page_end(count))


def whole_pages(groups: tuple[PageGroup, ...], pages: Pages, count: int) -> Pages:
    """Those of `pages` that `count` tokens have filled for good."""
    return [
        {place: page for place, page in of_group.items() if place < whole_page_count(group, count)}
        for group, of_group in zip(groups, pages, strict=True)
    ]


def joined(first: Pages, second: Pages) -> Pages:
    """Both; where both have a page, the first one's."""
    return [two | one for one, two in zip(first, second, strict=True)]


def greedy(told_from: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=256,
        temperature=0.0,
        ignore_eos=True,
        seed=0,
        return_logprob=True,
        logprob_start_len=told_from,
        top_logprobs_num=3,
    )
