"""A small scheduler for tests of the model runner: pages in random order, one step per call."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.clock import ManualClock
from common.engine.cache.kv_pool import KvPool
from common.engine.loader import load_model
from common.engine.model_runner import ModelRunner
from common.engine.models.causal_lm import CausalLm
from common.engine.models.registry import cache_components
from common.engine.speculation.proposer import Proposer
from common.grammar import GrammarCompiler
from common.layout.cache_layout import ServerLayout
from common.layout.parallel import split_layers
from common.protocol.codec import decode_logprobs
from common.protocol.worker import NewSequence, PageGrant, PrefillChunk, Step, StepDone
from common.request import SamplingParams, TokenLogprobs

PAGE_SIZE = 8
PAGE_COUNT = 400


def greedy(**changes: object) -> SamplingParams:
    values: dict[str, object] = {"max_new_tokens": 64, "seed": 5, "temperature": 0.0, **changes}
    return SamplingParams(**values)  # type: ignore[arg-type]


@dataclass
class Tracked:
    """What the driver knows of one sequence. tokens: prompt and output so far. proposals: that come
    with it. verified: (tokens proposed, tokens accepted) of each step that had any."""

    request_id: int
    tokens: list[int]
    prompt_count: int
    sampling: SamplingParams
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    is_known: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    proposals: list[int] = field(default_factory=list)
    verified: list[tuple[int, int]] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_count :]


def layout_of(model: CausalLm, page_size: int = PAGE_SIZE) -> ServerLayout:
    return ServerLayout(
        components=cache_components(model.config, "auto"),
        tp_size=1,
        stages=split_layers(model.config.layer_count, 1),
        page_size=page_size,
    )


class Driver:
    """A runner over a fresh pool, and the least scheduler that can drive it."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        page_size: int = PAGE_SIZE,
        seed: int = 0,
        grammars: GrammarCompiler | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        model = load_model(checkpoint, dtype="float32")
        self.page_size = page_size
        self.pool = KvPool.allocate(layout_of(model, page_size).rank(0, 0), [PAGE_COUNT], "cpu")
        self.runner = ModelRunner(model, self.pool, ManualClock(), grammars, proposer=proposer)
        self.vocab_size = model.config.vocab_size
        self._free = list(range(1, PAGE_COUNT + 1))
        random.Random(seed).shuffle(self._free)
        self._next_step_id = 1

    def step(
        self,
        chunks: list[tuple[Tracked, int]] | None = None,
        decode: list[Tracked] | None = None,
        retired: list[Tracked] | None = None,
        drafts: int = 0,
    ) -> StepDone:
        """One step: (sequence, how many tokens to compute) each, and sequences to decode, with at
        most so many proposals each."""
        chunks, decode, retired = chunks or [], decode or [], retired or []
        for tracked in retired:
            self._free += tracked.pages
            tracked.pages, tracked.is_known, tracked.computed = [], False, 0
        new: list[NewSequence] = []
        grants: list[PageGrant] = []
        prefill: list[PrefillChunk] = []
        for tracked, count in chunks:
            self._prepare(tracked, tracked.computed + count, new, grants)
            stop = tracked.computed + count
            is_last = stop == len(tracked.tokens)
            prefill.append(PrefillChunk(tracked.request_id, tracked.computed, stop, is_last))
            tracked.computed = stop
        for tracked in decode:
            self._prepare(tracked, len(tracked.tokens) + drafts, new, grants)
            tracked.computed = len(tracked.tokens)
        step = Step(
            self._next_step_id,
            new,
            grants,
            prefill,
            [tracked.request_id for tracked in decode],
            [tracked.request_id for tracked in retired],
            draft_counts=[drafts] * len(decode) if drafts else [],
        )
        self._next_step_id += 1
        done = self.runner.run(step)
        due = [tracked for tracked, _ in chunks if tracked.computed == len(tracked.tokens)] + decode
        assert done.step_id == step.step_id
        assert done.request_ids == [tracked.request_id for tracked in due]
        for tracked, _ in chunks:
            if tracked.request_id in done.prompt_logprobs:
                told = done.prompt_logprobs[tracked.request_id]
                tracked.prompt_logprobs += decode_logprobs(told)
        for tracked, token_id in zip(due, done.token_ids, strict=True):
            if tracked.request_id in done.failed:
                continue
            tracked.tokens.append(token_id)
            if tracked.request_id in done.logprobs:
                tracked.logprobs.append(done.logprobs[tracked.request_id])
            accepted = done.accepted.get(tracked.request_id)
            if accepted is not None:
                tracked.computed += len(accepted.token_ids)
                tracked.tokens += accepted.token_ids
                tracked.logprobs += accepted.logprobs
                tracked.verified.append((accepted.proposed_count, len(accepted.token_ids)))
        return done

    def prefill(self, tracked: Tracked, chunk: int | None = None) -> None:
        while tracked.computed < (target := len(tracked.tokens)):
            left = target - tracked.computed
            self.step(chunks=[(tracked, min(left, chunk or left))])
            if len(tracked.tokens) > target:
                return

    def decode(self, tracked: list[Tracked], count: int) -> None:
        for _ in range(count):
            self.step(decode=tracked)

    def take_pages(self, tracked: Tracked, token_count: int) -> list[int]:
        """Pages that the sequence lacks for `token_count` tokens."""
        needed = -(-token_count // self.page_size) - len(tracked.pages)
        pages = [self._free.pop() for _ in range(max(0, needed))]
        tracked.pages += pages
        return pages

    def _prepare(
        self, tracked: Tracked, token_count: int, new: list[NewSequence], grants: list[PageGrant]
    ) -> None:
        if not tracked.is_known:
            tracked.is_known = True
            new.append(
                NewSequence(
                    tracked.request_id,
                    list(tracked.tokens),
                    tracked.prompt_count,
                    tracked.sampling,
                    tracked.proposals,
                )
            )
            if tracked.pages:
                grants.append(PageGrant(tracked.request_id, 0, 0, list(tracked.pages)))
        first = len(tracked.pages)
        pages = self.take_pages(tracked, token_count)
        if pages:
            grants.append(PageGrant(tracked.request_id, 0, first, pages))


def track(request_id: int, prompt: list[int], sampling: SamplingParams | None = None) -> Tracked:
    return Tracked(request_id, list(prompt), len(prompt), sampling or greedy())


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()
