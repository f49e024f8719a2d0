"""What a pair computed and moved for a load, and the least that it had to. Knows nothing of time.

The servers say it of each request that has ended (`/requests`), on either side.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import msgspec

from bench.reuse_models import ReuseModel
from bench.serve.outcome import Outcome
from demo.servers import Pair

PAGE_TOKENS = 16  # of both servers: what is kept, is kept in whole pages
SETTLE_TIMEOUT_S = 10.0  # a prefill server hears of a transfer's end after the client
SETTLE_INTERVAL_S = 0.05


class _Request(msgspec.Struct):
    peer: str
    started_at: float
    status: str
    prompt_tokens: int
    cached_tokens: int
    bytes: int


class _Requests(msgspec.Struct):
    requests: list[_Request]


@dataclass(frozen=True, slots=True)
class Account:
    """computed_count: prompt tokens that either server computed. moved_nbytes: of caches."""

    computed_count: int
    moved_nbytes: int
    transfer_count: int


def account_since(pair: Pair, began_wall_s: float, request_count: int) -> Account:
    """Of the requests that arrived at the decode server since then, all of which have ended.

    Raises: RuntimeError if the servers don't tell of all of them, or of one that failed.
    """
    decoded = _told(pair.decode.url, began_wall_s)
    if len(decoded) != request_count or any(one.status != "ok" for one in decoded):
        statuses = sorted({one.status for one in decoded})
        raise RuntimeError(f"{len(decoded)} of {request_count} requests are told of: {statuses}")
    moved = [one for one in decoded if one.peer]
    sent = _wait_for_sent(pair, began_wall_s, len(moved))
    local = [one for one in decoded if not one.peer]
    return Account(
        computed_count=sum(one.prompt_tokens - one.cached_tokens for one in (*sent, *local)),
        moved_nbytes=sum(one.bytes for one in moved),
        transfer_count=len(moved),
    )


def _wait_for_sent(pair: Pair, began_wall_s: float, count: int) -> list[_Request]:
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        sent = _told(pair.prefill.url, began_wall_s)
        if len(sent) == count:
            return sent
        if time.monotonic() > deadline:
            raise RuntimeError(f"the prefill server tells of {len(sent)} of {count} transfers")
        time.sleep(SETTLE_INTERVAL_S)


def _told(url: str, began_wall_s: float) -> list[_Request]:
    content = httpx.get(f"{url}/requests", timeout=30.0).content
    found = msgspec.json.decode(content, type=_Requests).requests
    return [one for one in found if one.started_at >= began_wall_s]


@dataclass(frozen=True, slots=True)
class Least:
    """What no earlier turn of the same session had computed, or brought to the decode server.

    nbytes: counts whole pages, as a partial page is not kept.
    """

    token_count: int
    nbytes: int


def least_of(model: ReuseModel, outcomes: Sequence[Outcome]) -> Least:
    """outcomes: of sessions, one after the other, each in the order of its turns.

    An answer's last token is drawn and not computed, so no turn before has its cache.
    """
    token_count = nbytes = known = 0
    for outcome in outcomes:
        if not outcome.ask.turn:
            known = 0
        token_count += outcome.prompt_count - known
        kept = known // PAGE_TOKENS * PAGE_TOKENS
        nbytes += model.new_nbytes(outcome.prompt_count, kept)
        known = outcome.prompt_count + outcome.output_count - 1
    return Least(token_count, nbytes)
