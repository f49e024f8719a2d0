"""A server without processes: real models, pools, scheduling and planner, its ranks as threads.

`transfer` moves a sequence from one server to another as workers do: every source rank plans its
copies to every target rank, and the bytes are copied from buffer to buffer. What is kept of prompts
between them is tested with `turns.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from common.clock import ManualClock
from common.engine.cache.kv_pool import KvPool
from common.engine.config.draft import split_stages
from common.engine.draft_loader import read_draft
from common.engine.loader import load_model, read_served_config
from common.engine.model_runner import ModelRunner
from common.engine.models.registry import cache_components
from common.engine.speculation.proposer import Proposer
from common.layout.cache_layout import ServerLayout
from common.layout.component import LiveKind
from common.planner.copies import plan_copies
from common.planner.pairing import TokenRange
from common.prefix_digests import extend_digests, prefix_seed
from common.protocol.worker import Step, StepDone
from common.request import SamplingParams
from common.scheduling.batch_limits import BatchLimits
from common.scheduling.batcher import Batcher
from common.scheduling.in_flight import IN_FLIGHT_MAX
from common.scheduling.page_account import PageAccount
from common.scheduling.sequence import Sequence
from common.speculative import SpeculativeAlgorithm
from common.worker.host_pages import HostPages
from common.worker.pools import page_counts_for
from tests.families.ranks import Crew, contexts

TOKEN_MAX = 4096
REQUEST_MAX = 48
SPECULATING_MAX = 3
"""Less than decode at a time in tests: some sequences find no spare slots."""

PageLists = list[tuple[int, list[int]]]
"""Per page group: the logical index of the first page, and page ids."""


@dataclass(frozen=True)
class Shape:
    """How a server is cut and paged. chunk: prompt tokens that are computed at once."""

    tp_size: int = 1
    pp_size: int = 1
    page_size: int = 16
    chunk: int = 64
    layer_group_count: int = 1

    def __str__(self) -> str:
        return f"tp{self.tp_size} pp{self.pp_size} page{self.page_size}"


class Server:
    """One server. Its pools start as NaN: nothing may read what nobody wrote.

    checkpoint_max: of its prefix cache; None if it has no prefix cache. host_share: how large its
    tier in host memory is against its pool; 0 for none. proposer: of every rank; with one, steps
    verify up to proposal_max tokens ahead, with so many spare slots as if that many requests ran.
    algorithm, head: of a draft, which proposes instead; head: of EAGLE-3, its checkpoint.
    token_max: tokens that its pool has room for.
    """

    def __init__(
        self,
        checkpoint: Path,
        shape: Shape,
        checkpoint_max: int | None = None,
        host_share: float = 0.0,
        proposer: Callable[[], Proposer] | None = None,
        proposal_max: int = 0,
        algorithm: SpeculativeAlgorithm = SpeculativeAlgorithm.OFF,
        head: Path | None = None,
        token_max: int = TOKEN_MAX,
    ) -> None:
        self.shape = shape
        ranks = contexts(shape.tp_size, shape.pp_size)
        config, draft_path = read_served_config(checkpoint), str(head or "")
        draft = read_draft(config, algorithm, draft_path)
        models = [
            load_model(checkpoint, parallel=rank, draft=draft, draft_path=draft_path)
            for rank in ranks
        ]
        self.lookahead = 0 if draft is None else 1
        self._guess_count = 0 if draft is None else proposal_max
        self.layout = ServerLayout(
            components=cache_components(config, "auto", draft),
            tp_size=shape.tp_size,
            stages=split_stages(config, shape.pp_size, draft),
            page_size=shape.page_size,
            layer_group_count=shape.layer_group_count,
        )
        self.layout.check()
        counts = page_counts_for(
            self.layout.ranks[0], token_max, REQUEST_MAX, shape.chunk, checkpoint_max or 0
        )
        spare_count = SPECULATING_MAX * proposal_max
        is_slot = [group.live.kind is LiveKind.SLOT for group in self.layout.groups]
        held = [n + spare_count * own for n, own in zip(counts, is_slot, strict=True)]
        self.pools = [KvPool.allocate(rank, held, "cpu") for rank in self.layout.ranks]
        for pool in self.pools:
            for buffer in pool.buffers:
                buffer.view(torch.float32).fill_(float("nan"))
        host_counts = [int(count * host_share) for count in counts] if host_share else []
        self.host_pages = [HostPages(pool, host_counts) for pool in self.pools]
        self.account = PageAccount(
            self.layout.groups,
            counts,
            has_prefix_cache=checkpoint_max is not None,
            chunk_token_max=shape.chunk,
            checkpoint_max=checkpoint_max or 0,
            host_page_counts=host_counts,
            digest_lookahead=self.lookahead,
        )
        # Stages without the head are told what was drawn, so nothing can be planned ahead.
        in_flight_max = IN_FLIGHT_MAX if shape.pp_size == 1 and not proposal_max else 1
        limits = BatchLimits(
            shape.chunk,
            REQUEST_MAX,
            TOKEN_MAX,
            frozenset(),
            in_flight_max,
            proposal_max=proposal_max,
        )
        self.batcher = Batcher(self.account, limits)
        self._sent: deque[Step] = deque()
        self._runners = [
            ModelRunner(
                model,
                pool,
                ManualClock(),
                proposer=None if proposer is None else proposer(),
                spare_count=spare_count,
            )
            for model, pool in zip(models, self.pools, strict=True)
        ]
        self._crew = Crew(ranks)
        self._retracted: deque[Sequence] = deque()
        self.drawn: dict[int, dict[int, int]] = {}  # first tokens of samples, by their prompt's id
        self._next_id = 1

    # ---- what a prefill server does --------------------------------------------------------------

    def open(self, prompt: list[int], output_count: int) -> Sequence:
        """A prompt to be computed here; its tokens come with `run`."""
        return self.open_sampled(prompt, greedy(output_count))

    def open_sampled(self, prompt: list[int], sampling: SamplingParams) -> Sequence:
        """As `open`. It goes on from what the prefix cache has, if there is one."""
        digests = digests_of(prompt, self.lookahead)
        match = self.account.match(digests, prompt, len(prompt) - 1)
        sequence = self.account.open(
            self.take_id(), list(prompt), len(prompt), sampling, digests, match
        )
        assert sequence is not None, "the pool is too small for the test"
        self.batcher.add(sequence)
        return sequence

    def prefill(self, prompts: list[list[int]], output_count: int) -> list[Sequence]:
        """Compute prompts and their first tokens; their pages stay until `close`."""
        sequences = [self.open(prompt, output_count) for prompt in prompts]
        self.compute(sequences)
        return sequences

    def compute(self, sequences: list[Sequence]) -> None:
        """Compute prompts that are open and their first tokens."""
        waiting = set(map(id, sequences))
        self._limit(is_prompt_only=True)
        while waiting:
            for sequence in self._step():
                self.batcher.stop(sequence)
                waiting.discard(id(sequence))
        self._limit(is_prompt_only=False)

    def close(self, sequence: Sequence) -> None:
        self.account.close(sequence)

    # ---- what a decode server does ---------------------------------------------------------------

    def receive(self, source: Server, sequence: Sequence) -> tuple[Sequence, int]:
        """Take over a sequence that `source` has computed; with the number of bytes that took."""
        token_count = sequence.computed_count
        spans = self.account.spans_for_prompt(token_count)
        needs = self.account.needs(spans, token_count)
        for span, pages in zip(spans, self.account.allocate(needs), strict=True):
            span.page_ids.extend(pages)
        taken = Sequence(
            self.take_id(),
            list(sequence.token_ids),
            sequence.prompt_count,
            sequence.sampling,
            spans,
            computed_count=token_count,
            first_proposals=list(sequence.first_proposals),
        )
        tokens = TokenRange(0, token_count, True)
        nbytes = transfer(source, sequence.page_lists(), self, taken.page_lists(), tokens)
        self.batcher.add(taken)
        return taken, nbytes

    def decode(self, bring_back: Callable[[Sequence], object] | None = None) -> int:
        """Decode until every sequence has all of its tokens, and give their pages back.

        bring_back: begins again one whose pages others needed, once there is room for all that it
        lacks; None if no pages may run short. Returns: how often that was.
        """
        count = 0
        while self.batcher.running_count or self.batcher.prompt_count or self._retracted:
            while self._retracted and self._has_room_for(self._retracted[0]):
                assert bring_back is not None, "the pool is too small for the test"
                bring_back(self._retracted.popleft())
                count += 1
            for sequence in self._step():
                if self.batcher.limits.finish_of(sequence) is not None:
                    self.batcher.remove(sequence)
        return count

    def _has_room_for(self, sequence: Sequence) -> bool:
        """Whether one that was retracted would find pages for all of its tokens."""
        token_count = sequence.prompt_count + sequence.sampling.max_new_tokens
        return self.account.can_allocate(
            self.account.needs(self.account.spans_for_prompt(token_count), token_count)
        )

    def generate(self, prompts: list[list[int]], output_count: int) -> list[list[int]]:
        """Tokens of prompts that this server computes alone."""
        sequences = [self.open(prompt, output_count) for prompt in prompts]
        self.decode()
        return [sequence.token_ids[sequence.prompt_count :] for sequence in sequences]

    def step(self, count: int) -> None:
        """Decode `count` tokens of every sequence."""
        for _ in range(count):
            self._step()

    def give_up(self, sequences: list[Sequence]) -> None:
        """Compute no further, while steps that were sent still do."""
        for sequence in sequences:
            self.batcher.remove(sequence)
        while self._sent:
            self.batcher.apply_done(self._run(self._sent.popleft()))

    # ----------------------------------------------------------------------------------------------

    def _step(self) -> list[Sequence]:
        """One step on all ranks, while the next is planned; the sequences that have a new token."""
        while True:
            planned = self.batcher.plan_step()
            self._retracted += planned.retracted
            if planned.step is None:
                break
            self._sent.append(planned.step)
        outcome = self.batcher.apply_done(self._run(self._sent.popleft()))
        assert not outcome.failed, outcome.failed
        for drawn in outcome.samples:
            self.drawn[drawn.sequence.request_id] = drawn.tokens
        return [token.sequence for token in (*outcome.tokens, *outcome.samples)]

    def _limit(self, *, is_prompt_only: bool) -> None:
        """As the batcher of a prefill server has it, or of another one."""
        guess_count = self._guess_count if is_prompt_only else 0
        self.batcher.limits = replace(
            self.batcher.limits, is_prompt_only=is_prompt_only, guess_count=guess_count
        )

    def _run(self, step: Step) -> StepDone:
        answers = self._crew.run(lambda rank: self._runners[rank].run(step))
        last = answers[-self.shape.tp_size :]
        assert all(answer.token_ids == last[0].token_ids for answer in last)
        return last[0]

    def take_id(self) -> int:
        self._next_id += 1
        return self._next_id


def transfer(
    source: Server, given: PageLists, target: Server, taken: PageLists, tokens: TokenRange
) -> int:
    """Copy the cache of a sequence from all ranks to all ranks; the number of bytes copied."""
    nbytes = 0
    for source_rank, source_pool in zip(source.layout.ranks, source.pools, strict=True):
        for target_rank, target_pool in zip(target.layout.ranks, target.pools, strict=True):
            plan = plan_copies(source_rank, target_rank, given, taken, tokens)
            nbytes += plan.total_nbytes
            for region, offset, target_region, target_offset, count in zip(
                plan.source_region.tolist(),
                plan.source_offset.tolist(),
                plan.target_region.tolist(),
                plan.target_offset.tolist(),
                plan.nbytes.tolist(),
                strict=True,
            ):
                part = source_pool.buffers[region][offset : offset + count]
                target_pool.buffers[target_region][target_offset : target_offset + count] = part
    return nbytes


def least_nbytes(layout: ServerLayout, token_count: int, token_start: int = 0) -> int:
    """What the ranks of a target lack of a request, each byte once per rank that holds it.

    token_start: tokens of which they have all that is kept for good.
    """
    total = 0
    for component in layout.components:
        item_count = len(component.live.items(token_count))
        if component.live.is_streamable:
            item_count -= len(component.live.items(token_start))
        for segment in component.segments:
            # Ranks of a stage that hold one unit, or parts of the units, add up to this many.
            held = segment.unit_count
            if component.shard == "replicate":
                held *= layout.tp_size
            elif segment.unit_count < layout.tp_size:
                held = layout.tp_size
            total += held * segment.unit_nbytes * item_count * len(component.layers)
    return total


@dataclass(frozen=True)
class Place:
    """Where one plane of one layer of a sequence lies, on a server of one rank.

    places: int64[item, payload], of its live items' bytes in the buffer.
    """

    component: str
    segment: str
    layer: int
    buffer: Tensor
    places: Tensor

    def read(self) -> Tensor:
        """uint8[item, payload]."""
        return self.buffer[self.places]

    def write(self, values: Tensor) -> None:
        self.buffer[self.places] = values


def places_of(server: Server, sequence: Sequence) -> list[Place]:
    """Every plane of a sequence, in the same order for every layout; all units side by side."""
    (pool,) = server.pools
    (rank,) = server.layout.ranks
    found: list[Place] = []
    for index, (group, span) in enumerate(zip(rank.groups, sequence.spans, strict=True)):
        live, rows = group.group.live, group.group.page_items
        pages, row_numbers = [], []
        for item in live.items(sequence.computed_count):
            page = item // rows if live.is_paged else 0
            pages.append(span.page_ids[page - span.first_index])
            row_numbers.append(item % rows)
        if not pages:
            continue
        for cell in group.cells:
            units = torch.arange(len(cell.units)) * cell.unit_stride
            first = torch.tensor(pages) * group.page_nbytes + cell.offset
            first += torch.tensor(row_numbers) * cell.item_nbytes
            starts = first[:, None] + units
            places = starts[:, :, None] + torch.arange(cell.item_nbytes)
            found.append(
                Place(
                    cell.component,
                    cell.segment,
                    cell.layer,
                    pool.buffers[index],
                    places.flatten(1),
                )
            )
    return sorted(found, key=lambda place: (place.component, place.segment, place.layer))


def digests_of(token_ids: list[int], lookahead: int = 0) -> bytes:
    """As a frontend makes them of a prompt."""
    return extend_digests(prefix_seed({"model": "tiny"}), token_ids, lookahead=lookahead)


def greedy(output_count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=output_count, temperature=0.0, ignore_eos=True, seed=0)
