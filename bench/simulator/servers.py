"""A prefill and a decode server as a simulation sees them: queues, pages, and steps that take time.

Both batch as `common/scheduling/batcher.py` does: one step at a time, with every running sequence
and prompt tokens up to a budget, shared as there. What they leave out stands in `simulate.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.serve.outcome import Outcome
from bench.simulator.machine import Machine
from bench.simulator.profile import Profile
from common.scheduling.chunks import share_step


@dataclass(frozen=True, slots=True)
class Place:
    """Which cores a server lives on: where its steps run, and where its frontend and scheduler do.
    The same one if there is no other."""

    engine: int
    host: int


@dataclass(slots=True)
class Request:
    """index: of the workload. computed_count: of its prompt. given_count: tokens that the client
    has been given."""

    index: int
    outcome: Outcome
    prompt_count: int
    output_count: int
    computed_count: int = 0
    given_count: int = 0

    @property
    def cached_count(self) -> int:
        return self.prompt_count + self.given_count - 1

    @property
    def token_max(self) -> int:
        return self.prompt_count + self.output_count


class Engine:
    """Steps of one server, on one core.

    on_prompt: called with a prompt whose last chunk is done. on_tokens: called after each step with
    the sequences that have a new token.
    """

    def __init__(
        self,
        machine: Machine,
        profile: Profile,
        core: int,
        on_prompt: Callable[[Request], None],
        on_tokens: Callable[[list[Request]], None],
    ) -> None:
        self._machine = machine
        self._profile = profile
        self._core = core
        self._on_prompt = on_prompt
        self._on_tokens = on_tokens
        self._prompts: dict[int, Request] = {}
        self._running: dict[int, Request] = {}
        self._is_computing = False
        self.step_count = 0

    def add_prompt(self, request: Request) -> None:
        self._prompts[request.index] = request
        self._start_step()

    def add_running(self, request: Request) -> None:
        """A sequence whose prompt is computed, and that has a token."""
        self._running[request.index] = request
        self._start_step()

    def _start_step(self) -> None:
        if self._is_computing or not (self._prompts or self._running):
            return
        running = list(self._running.values())
        budget = max(1, self._profile.chunk_token_max - len(running))
        chunks: list[tuple[Request, int, int]] = []
        prompts = list(self._prompts.values())
        left = [prompt.prompt_count - prompt.computed_count for prompt in prompts]
        for prompt, count in zip(prompts, share_step(left, left, budget), strict=True):
            if count:
                chunks.append((prompt, prompt.computed_count, prompt.computed_count + count))
        self._is_computing = True
        self.step_count += 1
        context_count = sum(one.cached_count for one in running)
        spans = [(start, stop) for _, start, stop in chunks]
        work_s = self._profile.step_s(spans, len(running), context_count)
        self._machine.work(self._core, work_s, lambda: self._end_step(chunks, running))

    def _end_step(self, chunks: list[tuple[Request, int, int]], running: list[Request]) -> None:
        done = [prompt for prompt, _, stop in chunks if stop == prompt.prompt_count]
        for prompt, _, stop in chunks:
            prompt.computed_count = stop
        for prompt in done:
            del self._prompts[prompt.index]
            self._on_prompt(prompt)
        for one in running:
            one.given_count += 1
            if one.given_count == one.output_count:
                del self._running[one.index]
        self._on_tokens(running)
        self._is_computing = False  # only now: what comes of this step joins the next one together
        self._start_step()


class PrefillServer:
    """on_done: called with a request whose prompt is computed."""

    def __init__(
        self, machine: Machine, profile: Profile, place: Place, on_done: Callable[[Request], None]
    ) -> None:
        self._machine = machine
        self._profile = profile
        self._place = place
        self._on_done = on_done
        self._engine = Engine(machine, profile, place.engine, self._end, _never)
        self.unsettled_count = 0  # prompt tokens that it was asked for and is not done with

    def ask(self, request: Request) -> None:
        """A request that was counted as unsettled already."""
        self._machine.work(
            self._place.host, self._profile.dispatch_s, lambda: self._engine.add_prompt(request)
        )

    def _end(self, request: Request) -> None:
        self.unsettled_count -= request.prompt_count
        self._on_done(request)


class DecodeServer:
    """Takes requests in, has their prompts computed by the least loaded prefill server, or here if
    there is none, and generates the rest.

    on_tokens: called with requests that have a new token.
    """

    def __init__(
        self,
        machine: Machine,
        profile: Profile,
        place: Place,
        prefills: list[PrefillServer],
        on_tokens: Callable[[list[Request]], None],
    ) -> None:
        self._machine = machine
        self._profile = profile
        self._place = place
        self._prefills = prefills
        self._on_tokens = on_tokens
        self._engine = Engine(machine, profile, place.engine, self._take_first, self._take)
        self._waiting: deque[Request] = deque()
        self._active_count = 0
        self._reserved_count = 0

    def submit(self, request: Request) -> None:
        profile = self._profile
        assert request.token_max <= profile.token_capacity, "the workload was checked"
        work_s = profile.frontend_s + request.prompt_count * profile.frontend_token_s
        self._machine.work(self._place.host, work_s, lambda: self._queue(request))

    def _queue(self, request: Request) -> None:
        self._waiting.append(request)
        self._admit()

    def _admit(self) -> None:
        """First come, first served, while there are pages."""
        profile = self._profile
        while self._waiting and self._active_count < profile.running_max:
            request = self._waiting[0]
            if self._reserved_count + request.token_max > profile.token_capacity:
                return
            self._waiting.popleft()
            self._active_count += 1
            self._reserved_count += request.token_max
            if not self._prefills:
                self._engine.add_prompt(request)
                continue
            chosen = min(self._prefills, key=lambda server: server.unsettled_count)
            # From now on, so that requests of one moment go to different servers.
            chosen.unsettled_count += request.prompt_count
            self._machine.after(profile.message_s, partial(chosen.ask, request))

    def receive(self, request: Request) -> None:
        """A prompt is computed elsewhere, and its cache is here."""
        self._take_first(request)

    def _take_first(self, request: Request) -> None:
        request.given_count = 1
        if request.output_count > 1:
            self._engine.add_running(request)
        self._take([request])

    def _take(self, requests: list[Request]) -> None:
        if not requests:
            return
        self._on_tokens(requests)
        for one in requests:
            if one.given_count == one.output_count:
                self._active_count -= 1
                self._reserved_count -= one.token_max
        self._admit()


def _never(requests: list[Request]) -> None:
    assert not requests, "a prefill server generates nothing"
