"""Requests that wait for a prefill server that is missing, or that none takes.

    held cache lost -> any server; no server for a while -> computed here where that is allowed;
    no server for longer -> 503; longer than any server takes -> 400, or computed here

A server that is not connected yet, or not any more, may come back: it is waited for. Knows nothing
of pages. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.failures import Failure, FailureKind
from common.transfers.connection import Address
from common.transfers.transfers import Transfers
from decode_server.decisions import Fail, KeepHere, Unbind, WaitingDecision
from decode_server.request import DecodeRequest
from decode_server.requests import Requests

# How long a request waits for a prefill server when none is connected, before it is answered 503;
# long enough for a restarted one to come back.
PEER_WAIT_S = 10.0
# How often the queue is looked through for such requests. A new request is checked when it comes.
REVIEW_INTERVAL_S = 0.25
# How long it waits before this server computes its prompt itself, if it may, or another one does
# what the missing one had done: a restarted prefill server is back by then.
FALLBACK_WAIT_S = 2.0
# Servers that an error message names.
NAMED_COUNT_MAX = 8


class MissingServers:
    """is_local: this server computes all prompts. may_fall_back: it may compute those that no
    prefill server can be found for.

    absent_since: by address, None for any, when a server was first found missing and a request
    waits for it. untakeable_since: by request id, when a request was first found to wait for a
    server that is missing, although others are connected.
    """

    def __init__(
        self, transfers: Transfers, requests: Requests, *, is_local: bool, may_fall_back: bool
    ) -> None:
        self._links = transfers.links
        self._requests = requests
        self._is_local = is_local
        self._may_fall_back = may_fall_back
        self._absent_since: dict[str | None, float] = {}
        self._untakeable_since: dict[int, float] = {}
        self._next_peers_at = 0.0
        self._next_limits_at = 0.0

    def review(self, now: float) -> Iterator[WaitingDecision]:
        """One decision after the other, each applied before the next one is made."""
        yield from self._lost_holds(now)
        if self._may_fall_back:
            yield from self._fall_back(now)
        if not self._is_local:
            yield from self._without_server(now)
        yield from self._too_long(now)

    def named_links(self) -> set[str]:
        """Of the prefill servers that have something which a waiting request needs."""
        queue = self._requests.queue
        found = {request.tested_link for request in queue if request.tested_link}
        for request in queue:
            place = request.bootstrap
            if place is not None and request.output_count == 0:
                found.add(self._links.resolve(f"{place.host}:{place.port}", place.engine))
        return found

    # ---- servers that are missing ----------------------------------------------------------------

    def _lost_holds(self, now: float) -> Iterator[Unbind]:
        """A cache that is held by a server that is gone, or missing for long, is computed anew. One
        that said that it stops has taken what it held with it."""
        for request in self._requests.queue:
            bootstrap = request.bootstrap
            if bootstrap is None or not request.is_held:
                continue
            source = None if self._is_local else self._links.find(bootstrap)
            is_here = source is not None and source.incarnation == bootstrap.engine
            is_late = now - request.waiting_since >= FALLBACK_WAIT_S
            is_late = is_late or bootstrap.engine in self._links.connections.stopped
            if not is_here and (source is not None or is_late or self._is_local):
                yield Unbind(request)

    def _fall_back(self, now: float) -> Iterator[KeepHere]:
        """A request that has waited for any prefill server long enough is computed here."""
        if any(source.breaker.allows(now) for source in self._links.connections.sources()):
            return
        for request in self._requests.queue:
            is_bound = request.bootstrap_link is not None
            if not is_bound and now - request.waiting_since >= FALLBACK_WAIT_S:
                yield KeepHere(request)

    def _without_server(self, now: float) -> Iterator[Fail]:
        """Answer requests that no prefill server was there for long enough.

        The time runs from when a server is first found missing and a request waits for it, however
        long it had waited for pages before.
        """
        if now < self._next_peers_at and not self._absent_since:
            return
        takers = self._links.connections.takers()
        there: set[str | None] = {taker.link for taker in takers}
        if any(taker.is_source for taker in takers):
            there.add(None)
        self._absent_since = {
            address: since
            for address, since in self._absent_since.items()
            if not self._is_there(address, there)
        }
        if now < self._next_peers_at:
            return
        self._next_peers_at = now + REVIEW_INTERVAL_S
        absent_since: dict[str | None, float] = {}
        for request in list(self._requests.queue):
            address = self._address_of(request)
            if request.is_computed_here or self._is_there(address, there):
                continue
            absent_since[address] = self._absent_since.get(address, now)
            if now - max(absent_since[address], request.waiting_since) >= PEER_WAIT_S:
                found = self._links.describe(address)
                text = f"no prefill server could be used for {PEER_WAIT_S:.0f} s: {found}"
                yield Fail(request, Failure(FailureKind.NO_PREFILL_SERVER, text))
        self._absent_since = absent_since

    def _address_of(self, request: DecodeRequest) -> str | None:
        """Of the one prefill server that a request waits for, dialled if need be; None if any can
        serve it, as any can compute a held cache again."""
        if request.is_held:
            return None
        if request.bootstrap is not None and request.bootstrap_link is not None:
            self._links.find(request.bootstrap)
        return request.bootstrap_link

    def _is_there(self, address: str | None, there: set[str | None]) -> bool:
        """there: of all prefill servers that take requests which name them; None if others can be
        asked as well."""
        return (address if address is None else self._links.resolve(address)) in there

    # ---- prompts that are longer than servers take -----------------------------------------------

    def _too_long(self, now: float) -> Iterator[WaitingDecision]:
        if now < self._next_limits_at:
            return
        self._next_limits_at = now + REVIEW_INTERVAL_S
        sources, queue = self._links.connections.sources(), self._requests.queue
        connected_max = max((source.request_token_max for source in sources), default=0)
        kept = {i: at for i, at in self._untakeable_since.items() if i in queue}
        self._untakeable_since = kept
        for request in list(queue):
            if len(request.token_ids) > connected_max:
                decision = self.check_length(request, now)
                if decision is not None:
                    yield decision

    def check_length(self, request: DecodeRequest, now: float) -> KeepHere | Fail | None:
        """Whether a request is longer than any server takes that it could go to. One that a router
        bound to a server is not checked: that server refuses it itself."""
        if request.is_computed_here or request.bootstrap_link is not None:
            return None
        token_count = len(request.token_ids)
        sources = self._links.connections.sources()
        if any(token_count <= source.request_token_max for source in sources):
            self._untakeable_since.pop(request.request_id, None)
            return None
        missing = [one for one in self._links.addresses.missing() if _may_take(one, token_count)]
        if missing:
            return self._wait_for(request, missing, now) if sources else None
        known = [
            one
            for one in self._links.addresses.all()
            if one.request_token_max
            and (one.is_dialled or one.is_source)
            and not (one.is_idle and one.is_refused)
        ]
        return self._end(request, known) if known else None

    def _wait_for(
        self, request: DecodeRequest, missing: list[Address], now: float
    ) -> KeepHere | Fail | None:
        waited_s = now - self._untakeable_since.setdefault(request.request_id, now)
        if self._may_fall_back and waited_s >= FALLBACK_WAIT_S:
            return KeepHere(request)
        if waited_s < PEER_WAIT_S:
            return None
        text = (
            f"no prefill server that takes {len(request.token_ids)} tokens could be used for "
            f"{PEER_WAIT_S:.0f} s: {', '.join(address.shown for address in missing)}"
        )
        return Fail(request, Failure(FailureKind.NO_PREFILL_SERVER, text))

    def _end(self, request: DecodeRequest, known: list[Address]) -> KeepHere | Fail:
        if self._may_fall_back:
            return KeepHere(request)
        limits = [f"{one.request_token_max} ({one.link})" for one in known[:NAMED_COUNT_MAX]]
        limits += [f"{len(known) - NAMED_COUNT_MAX} more"] if len(known) > NAMED_COUNT_MAX else []
        text = f"prefill servers take at most {', '.join(limits)}"
        if request.output_count:
            # Others needed its pages; its client asked for nothing that was not allowed.
            text = f"{len(request.token_ids)} tokens to compute again: {text}"
            return Fail(request, Failure(FailureKind.NO_PREFILL_SERVER, text))
        text = f"prompt of {len(request.token_ids)} tokens: {text}"
        return Fail(request, Failure(FailureKind.BAD_REQUEST, text))


def _may_take(address: Address, token_count: int) -> bool:
    """Whether a server takes a prompt once it is connected; one that never was may take any."""
    return not address.request_token_max or token_count <= address.request_token_max
