"""How long it takes until a request's cache is there: asked of a prefill server, or computed here.

All from what was measured: steps of this server, and transfers that came. A server that nothing is
known of is taken to compute as fast as this one. Writes nothing but its own averages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from common.prefix_digests import DIGEST_NBYTES
from common.scheduling.batcher import Batcher
from common.scheduling.prefix_cache import MARK_NBYTES
from common.scheduling.rates import FORGOTTEN_SHARE
from common.transfers.connection import Connection
from common.transfers.incoming_transfer import CacheReady
from decode_server.request import DecodeRequest

# A step that decodes may take this much longer for a prompt that is computed beside it.
STEP_SHARE = 0.25
# Of a step that decodes, so many prompt tokens in any case: else a rest might never end.
STEP_TOKENS_MIN = 16
# Below this, what a prefill server took for a prompt is mostly something else.
TIMED_TOKENS_MIN = 16
# Requests that wait are looked at again with every event. Each of these keeps all that a server
# told of its cache at some time.
KNOWN_COUNT_MAX = 32


@dataclass(slots=True)
class _Source:
    """token_s: of a prompt that it computes, None if it has computed none. beside_s: what a
    transfer takes beside waiting and computing."""

    token_s: float | None = None
    beside_s: float | None = None


class ExpectedTime:
    """Of every prefill server, by its incarnation, and of this one."""

    def __init__(self, batcher: Batcher, digest_tokens: int) -> None:
        """digest_tokens: tokens that each digest of a prompt adds."""
        self._batcher = batcher
        self._digest_tokens = digest_tokens
        self._sources: dict[str, _Source] = {}

    def note_ready(self, ready: CacheReady, asked_at: float, now: float) -> None:
        """A cache has come that was asked for then."""
        trace = ready.done.trace
        source = self._sources.setdefault(ready.transfer.peer, _Source())
        computed_count = ready.done.token_count - trace.cached_token_count
        if computed_count >= TIMED_TOKENS_MIN and trace.prefill_s > 0:
            source.token_s = _mean(source.token_s, trace.prefill_s / computed_count)
        beside_s = max(0.0, now - asked_at - trace.queue_s - trace.prefill_s)
        source.beside_s = _mean(source.beside_s, beside_s)

    def forget(self, known: set[str]) -> None:
        """Servers that are not connected any more."""
        self._sources = {name: one for name, one in self._sources.items() if name in known}

    def asked_s(self, source: Connection, request: DecodeRequest) -> float:
        """Until a prefill server's cache is here, with the first token."""
        known = self._sources.get(source.incarnation, _Source())
        token_s = known.token_s if known.token_s is not None else self._batcher.rates.token_s
        lacking = len(request.token_ids) - self.cached_there(source, request)
        waiting = source.load_token_count
        return (waiting + max(1, lacking)) * (token_s or 0.0) + (known.beside_s or 0.0)

    def cached_there(self, source: Connection, request: DecodeRequest) -> int:
        """Tokens of a prompt that a prefill server has cached, as far as it tells."""
        if not source.cached_prefixes or not request.digests:
            return 0
        return _known_digests(request.digests, source.cached_prefixes) * self._digest_tokens

    def computed_s(self, token_count: int) -> float | None:
        """Until so many tokens are computed here, beside what is computed already; None if nothing
        has been measured."""
        rates = self._batcher.rates
        count = token_count + self._batcher.unplanned_count
        alone_s = rates.prompt_s(count)
        if alone_s is None or not self._batcher.running_count or rates.decode_s is None:
            return alone_s
        step_count = -(-count // self.step_tokens())
        return alone_s + step_count * rates.decode_s

    def step_tokens(self) -> int:
        """Prompt tokens in a step that decodes, so that streams keep their pace."""
        within = self._batcher.rates.tokens_within(STEP_SHARE)
        return max(STEP_TOKENS_MIN, within or 0)


@lru_cache(KNOWN_COUNT_MAX)
def _known_digests(digests: bytes, marks: frozenset[bytes]) -> int:
    """Number of the last digest that is among the marks; 0 if none is."""
    for number in range(len(digests) // DIGEST_NBYTES - 1, 0, -1):
        start = number * DIGEST_NBYTES
        if digests[start : start + MARK_NBYTES] in marks:
            return number
    return 0


def _mean(before: float | None, value: float) -> float:
    if before is None:
        return value
    return before + FORGOTTEN_SHARE * (value - before)
