"""The two request tables: which event leads from which state to which. Data and one function.

A transition happens through these tables or not at all; an event that a table does not have in a
state is our bug. A prefill request drains while a step or a put still uses its pages: its client
has been answered already. On a decode server the pages of such a request stay with its transfer.
"""

from __future__ import annotations

from enum import StrEnum


class DecodeState(StrEnum):
    WAITING = "waiting"
    TRANSFERRING = "transferring"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class DecodeEvent(StrEnum):
    RESERVED = "reserved"
    SCHEDULED_HERE = "scheduled here"
    DONE = "done"
    FORKED = "forked"
    PEER_FAILED = "peer failed"
    RETRACTED = "retracted"
    LAST_TOKEN = "last token"
    CANCELLED = "cancelled"


DECODE_TABLE: dict[tuple[DecodeState, DecodeEvent], DecodeState] = {
    (DecodeState.WAITING, DecodeEvent.RESERVED): DecodeState.TRANSFERRING,
    (DecodeState.WAITING, DecodeEvent.SCHEDULED_HERE): DecodeState.RUNNING,
    (DecodeState.WAITING, DecodeEvent.FORKED): DecodeState.RUNNING,
    (DecodeState.WAITING, DecodeEvent.CANCELLED): DecodeState.FAILED,
    (DecodeState.TRANSFERRING, DecodeEvent.DONE): DecodeState.RUNNING,
    (DecodeState.TRANSFERRING, DecodeEvent.PEER_FAILED): DecodeState.WAITING,
    (DecodeState.TRANSFERRING, DecodeEvent.CANCELLED): DecodeState.FAILED,
    (DecodeState.RUNNING, DecodeEvent.RETRACTED): DecodeState.WAITING,
    (DecodeState.RUNNING, DecodeEvent.LAST_TOKEN): DecodeState.FINISHED,
    (DecodeState.RUNNING, DecodeEvent.CANCELLED): DecodeState.FAILED,
}


class PrefillState(StrEnum):
    WAITING = "waiting"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HELD = "held"
    SENDING = "sending"
    DRAINING = "draining"
    FINISHED = "finished"
    FAILED = "failed"


class PrefillEvent(StrEnum):
    AHEAD = "ahead"
    PAIRED = "paired"
    SCHEDULED = "scheduled"
    LAST_CHUNK = "last chunk"
    COMPUTED_AHEAD = "computed ahead"
    SETTLED = "settled"
    CANCELLED = "cancelled"


PREFILL_TABLE: dict[tuple[PrefillState, PrefillEvent], PrefillState] = {
    (PrefillState.WAITING, PrefillEvent.AHEAD): PrefillState.QUEUED,
    (PrefillState.WAITING, PrefillEvent.PAIRED): PrefillState.QUEUED,
    (PrefillState.WAITING, PrefillEvent.CANCELLED): PrefillState.FAILED,
    (PrefillState.QUEUED, PrefillEvent.SCHEDULED): PrefillState.PREFILLING,
    (PrefillState.QUEUED, PrefillEvent.CANCELLED): PrefillState.FAILED,
    (PrefillState.PREFILLING, PrefillEvent.LAST_CHUNK): PrefillState.SENDING,
    (PrefillState.PREFILLING, PrefillEvent.COMPUTED_AHEAD): PrefillState.HELD,
    (PrefillState.PREFILLING, PrefillEvent.CANCELLED): PrefillState.DRAINING,
    (PrefillState.HELD, PrefillEvent.PAIRED): PrefillState.SENDING,
    (PrefillState.HELD, PrefillEvent.CANCELLED): PrefillState.DRAINING,
    (PrefillState.SENDING, PrefillEvent.SETTLED): PrefillState.FINISHED,
    (PrefillState.SENDING, PrefillEvent.CANCELLED): PrefillState.DRAINING,
    (PrefillState.DRAINING, PrefillEvent.SETTLED): PrefillState.FAILED,
}


def next_decode_state(state: DecodeState, event: DecodeEvent) -> DecodeState:
    assert (state, event) in DECODE_TABLE, f"decode request: {event} while {state}"
    return DECODE_TABLE[state, event]


def next_prefill_state(state: PrefillState, event: PrefillEvent) -> PrefillState:
    assert (state, event) in PREFILL_TABLE, f"prefill request: {event} while {state}"
    return PREFILL_TABLE[state, event]
