"""A worker whose cache is arrays of token ids: a wrong or missing page changes the output.

It keeps the real worker's contract: steps run one after the other, as they were sent, and write
their pages when they end. The next token is a digest of what is read through the page table, so the
oracle needs no pages at all. `sim_transfers` has its transfers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from common.protocol.digests import Digest, Digested
from common.protocol.worker import (
    Accepted,
    CancelSends,
    ClosePeer,
    CloseTransfer,
    ConnectPeer,
    Expect,
    Forget,
    MovePages,
    OpenPeer,
    OpenTransfer,
    ReclaimPeer,
    SchedulerToWorker,
    Send,
    Step,
    StepDone,
    WorkerBeat,
)
from common.scheduling.facts import ServerFacts
from tests.sim import speculation
from tests.sim.digests import digest_pages
from tests.sim.oracle import seen
from tests.sim.sim_cache import Known, SimCache
from tests.sim.sim_process import After, Reply, SimProcess
from tests.sim.sim_tier import SimTier
from tests.sim.sim_transfers import SimTransfers

END_POLL_S = 0.002


class SimWorker:
    """All ranks of one simulated server; those behind the first cache nothing.

    slow_step_rate: of steps, how many take long. right_rate: of proposals, how many are right.
    """

    def __init__(
        self,
        facts: ServerFacts,
        rng: random.Random,
        after: After,
        reply: Reply,
        transport: str,
        tally: Counter[str],
        predecessor: SimWorker | None = None,
    ) -> None:
        """predecessor: the same worker, for the scheduler before."""
        self.facts = facts
        self.process = SimProcess(rng, after, reply)
        self.cache = SimCache(facts.layout.groups, facts.page_counts)
        if predecessor is not None:
            self.cache = predecessor.cache
        self.transfers = SimTransfers(facts, self.process, self.cache, rng, transport, tally)
        if predecessor is not None:
            self.transfers.writers = predecessor.transfers.writers
        own = random.Random(f"{facts.incarnation} {facts.page_counts}")
        self.tier = SimTier(facts, self.cache, self.process, tally, own)
        self.slow_step_rate = 0.0
        self.right_rate = 0.0
        self._tally = tally
        self._rng = rng
        self._known: dict[int, Known] = {}
        self._steps: list[Step] = []
        self._is_computing = False
        self._finished_step = 0

    def handle(self, message: SchedulerToWorker, find: Callable[[str], SimWorker | None]) -> None:
        if not self.process.is_dead:
            self.process.when_it_runs(lambda: self._take(message, find))

    def _take(self, message: SchedulerToWorker, find: Callable[[str], SimWorker | None]) -> None:
        def find_target(incarnation: str) -> SimTransfers | None:
            worker = find(incarnation)
            return worker.transfers if worker is not None else None

        match message:
            case Step():
                self._tally["steps sent ahead"] += self._is_computing
                self._steps.append(message)
                self._compute_next()
            case OpenTransfer():
                self.transfers.open_transfer(message)
            case CloseTransfer():
                self.transfers.close_transfer(message)
            case Send():
                self.transfers.send(message, self._finished_step)
            case CancelSends():
                self.transfers.cancel(message.transfer_id)
            case Expect():
                self.transfers.expect(message)
            case Forget():
                self.transfers.forget(message)
            case Digest():
                self.process.after(self._rng.uniform(0.0001, 0.01), lambda: self._compare(message))
            case MovePages():
                self.tier.move(message)
            case OpenPeer():
                self.transfers.open(message)
            case ConnectPeer():
                self.transfers.connect(message, find_target)
            case ClosePeer():
                self.transfers.close(message)
            case ReclaimPeer():
                self.transfers.writers.pop(message.peer, None)

    def end_session(self, then: Callable[[], None], *, is_quiet: bool = False) -> None:
        """End what a scheduler that is gone has begun. is_quiet: its last word was that no peer can
        write here any more."""

        def look() -> None:
            is_busy = self._is_computing or self._steps or self.tier.is_moving
            if self.process.is_dead:
                return
            if is_busy or not self.transfers.has_ended:
                self.process.after(END_POLL_S, look)
                return
            if is_quiet:
                self.transfers.writers.clear()
            then()

        def begin() -> None:
            self.transfers.end()
            look()

        self.process.when_it_runs(begin)

    def stop(self) -> None:
        self.process.stop()

    def go_on(self) -> None:
        self.process.go_on()

    def beats(self) -> list[WorkerBeat]:
        """What its ranks say now; nothing while it is stopped."""
        ranks = range(0 if self.process.is_stopped else self.facts.rank_count)
        return [WorkerBeat(rank, self._finished_step) for rank in ranks]

    def _compute_next(self) -> None:
        if self._is_computing or not self._steps:
            return
        self._is_computing = True
        step = self._steps.pop(0)
        duration_s = self._rng.uniform(0.001, 0.02)
        if self.slow_step_rate and self._rng.random() < self.slow_step_rate:
            duration_s = self._rng.uniform(0.05, 0.6)
            self._tally["slow steps"] += 1
        self.process.after(duration_s, lambda: self._finish_step(step, duration_s))

    def _finish_step(self, step: Step, duration_s: float) -> None:
        if self.process.is_dead:
            return
        for request_id in step.retired:
            del self._known[request_id]
        for new in step.new:
            assert new.request_id not in self._known
            pages: list[dict[int, int]] = [{} for _ in self.cache.lives]
            self._known[new.request_id] = Known(list(new.token_ids), pages, new.sampling.seed)
        for chunk in step.chunks:
            for sample in chunk.samples:
                assert sample.request_id not in self._known
                tokens = list(self._known[chunk.request_id].tokens)
                none: list[dict[int, int]] = [{} for _ in self.cache.lives]
                self._known[sample.request_id] = Known(tokens, none, sample.seed)
        for grant in step.grants:
            granted = self._known[grant.request_id].pages[grant.group]
            granted.update(enumerate(grant.page_ids, grant.first_index))
        for copies in step.copies:
            self.cache.copy(copies.group, copies.source_ids, copies.target_ids)
            self._tally["pages copied"] += len(copies.source_ids)
        accepted: dict[int, Accepted] = {}
        sampled = self._compute(step, accepted)
        for request_id, token in sampled.items():
            more = accepted.get(request_id, Accepted(0)).token_ids
            self._known[request_id].tokens += [token, *more]
        self._is_computing = False
        self._finished_step = step.step_id
        self.transfers.apply_step(step.step_id)
        tokens = list(sampled.values())
        done = StepDone(
            step.step_id,
            list(sampled),
            tokens,
            seconds=duration_s,
            accepted=accepted,
            guesses=self._guesses(step, sampled),
        )
        self.process.say(done)
        self._compute_next()

    def _compute(self, step: Step, accepted: dict[int, Accepted]) -> dict[int, int]:
        """The tokens that are drawn, by request; those behind them are put into `accepted`."""
        cache = self.cache
        sampled: dict[int, int] = {}
        for chunk in step.chunks:
            known = self._known[chunk.request_id]
            for position in range(chunk.start, chunk.stop):
                cache.write(known, position)
            # Tokens inside a prompt draw nothing, so what they read is compared here.
            for group, live in enumerate(cache.lives):
                count = chunk.start + 1 if live.is_paged else chunk.stop
                read = cache.read(known, group, count)
                expected = seen(known.tokens[:count], live)
                assert read == expected, f"request {chunk.request_id} at {count}, group {group}"
            for group, page in enumerate(chunk.state_pages):
                if page:
                    cache.copy(group, [known.pages[group][0]], [page])
                    self._tally["states kept inside steps"] += 1
            for request_id in chunk.drawing:
                seed = self._known[request_id].seed
                sampled[request_id] = cache.sample(
                    Known(known.tokens, known.pages, seed), chunk.stop
                )
            self._tally["samples drawn from one row"] += len(chunk.samples)
        counts = step.draft_counts or [0] * len(step.decode)
        for request_id, count in zip(step.decode, counts, strict=True):
            known = self._known[request_id]
            proposed, drawn = speculation.decode(cache, known, count, self.right_rate, self._tally)
            sampled[request_id] = drawn[0]
            if proposed:
                accepted[request_id] = Accepted(proposed, drawn[1:])
        return sampled

    def _guesses(self, step: Step, sampled: dict[int, int]) -> dict[int, list[int]]:
        """Behind the first token of each prompt that ended, and all right."""
        guesses: dict[int, list[int]] = {}
        for chunk in step.chunks if step.guess_count else []:
            if chunk.is_last and not chunk.samples:
                known = self._known[chunk.request_id]
                tokens = [*known.tokens[: chunk.stop], sampled[chunk.request_id]]
                guesses[chunk.request_id] = speculation.continuation(
                    self.cache, Known(tokens, known.pages, known.seed), step.guess_count, 1.0
                )
        return guesses

    def _compare(self, job: Digest) -> None:
        """What lies in the pages by now, as the real one reads them while others are written."""

        def value(group: int, item: int) -> int:
            return self.cache.peek(job.pages, group, item)

        for rank, digests in digest_pages(self.facts.layout, job, value):
            self.process.say(Digested(job.transfer_id, rank, digests))
