"""A workload on servers that exist as a profile only; what comes out is what a client would note.

What is modelled: cores that their jobs share evenly; arrivals as they are drawn or recorded; steps
with continuous batching and chunked prompts; pages that are reserved for the whole request; a
prefill server chosen by its open tokens; messages and transfers that take time; a router that
deals requests out in turns.

What is not, and would have to be seen in the measurement: prefix caches (every prompt is computed
whole), requests that fail or are aborted, links that transfers have to share, retractions (pages
are reserved for a whole output instead), and sampling other than one token a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bench.serve.outcome import Outcome, Run
from bench.serve.workload import Ask
from bench.simulator.machine import Machine
from bench.simulator.profile import Profile
from bench.simulator.servers import DecodeServer, Place, PrefillServer, Request
from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Plan:
    """Where servers live. No prefill servers: each decode server is a single server.

    client: the core of the client that the profile's client_token_s is spent on; None: not one of
        these.
    """

    prefills: tuple[Place, ...]
    decodes: tuple[Place, ...]
    client: int | None = None


def own_cards(prefill_count: int, decode_count: int) -> Plan:
    """Every server with a card and a host of its own."""
    places = [Place(2 * index, 2 * index + 1) for index in range(prefill_count + decode_count)]
    return Plan(tuple(places[:prefill_count]), tuple(places[prefill_count:]))


def simulate(profile: Profile, plan: Plan, asks: Sequence[Ask]) -> Run:
    """Raises: ConfigError for a request that a decode server has no room for."""
    for ask in asks:
        if len(ask.prompt) + ask.output_count > profile.token_capacity:
            raise ConfigError(
                f"request {ask.index}: {len(ask.prompt)} + {ask.output_count} tokens: must be at "
                f"most {profile.token_capacity}, what a decode server of the profile holds"
            )
    return _Simulation(profile, plan).run(asks)


class _Simulation:
    """One run: the servers, and the client that notes what they send."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self._profile = profile
        self._client = plan.client
        self._machine = machine = Machine()
        prefills = [PrefillServer(machine, profile, p, self._transfer) for p in plan.prefills]
        self._decodes = [
            DecodeServer(machine, profile, place, prefills, self._note) for place in plan.decodes
        ]

    def run(self, asks: Sequence[Ask]) -> Run:
        outcomes = [Outcome(ask, ask.arrival_s, ask.arrival_s, ask.arrival_s) for ask in asks]
        for index, outcome in enumerate(outcomes):
            ask = outcome.ask
            request = Request(index, outcome, len(ask.prompt), ask.output_count)
            self._machine.at(ask.arrival_s, partial(self._home_of(request).submit, request))
        self._machine.run()
        return Run(outcomes, max(outcome.ended_s for outcome in outcomes), [])

    def _home_of(self, request: Request) -> DecodeServer:
        return self._decodes[request.index % len(self._decodes)]

    def _transfer(self, request: Request) -> None:
        delay_s = self._profile.transferred_s(request.prompt_count)
        self._machine.after(delay_s, partial(self._home_of(request).receive, request))

    def _note(self, requests: list[Request]) -> None:
        now_s = self._machine.now_s
        for one in requests:
            one.outcome.arrivals.append((now_s, one.given_count))
            one.outcome.output_count = one.given_count
            one.outcome.ended_s = now_s
        if self._client is not None and self._profile.client_token_s:
            self._machine.work(self._client, len(requests) * self._profile.client_token_s, _nothing)


def _nothing() -> None:
    pass
