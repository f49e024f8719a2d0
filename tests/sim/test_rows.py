"""The state tables of both servers: the stories reach every row, and nothing else is possible."""

from __future__ import annotations

from itertools import product

import pytest

import decode_server.requests as decode_requests
import prefill_server.requests as prefill_requests
from common.scheduling.transitions import (
    DECODE_TABLE,
    PREFILL_TABLE,
    DecodeEvent,
    DecodeState,
    PrefillEvent,
    PrefillState,
    next_decode_state,
    next_prefill_state,
)
from tests.sim.__main__ import has_two_steps
from tests.sim.story import run_story

SEEDS = range(100)


def test_stories_reach_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: set[object] = set()

    def next_decode(state: DecodeState, event: DecodeEvent) -> DecodeState:
        reached.add((state, event))
        return next_decode_state(state, event)

    def next_prefill(state: PrefillState, event: PrefillEvent) -> PrefillState:
        reached.add((state, event))
        return next_prefill_state(state, event)

    monkeypatch.setattr(decode_requests, "next_decode_state", next_decode)
    monkeypatch.setattr(prefill_requests, "next_prefill_state", next_prefill)
    rows = {*DECODE_TABLE, *PREFILL_TABLE}
    for seed in SEEDS:
        run_story(seed, has_two_steps=has_two_steps(seed))
        if reached == rows:
            break
    assert rows - reached == set()


@pytest.mark.parametrize(
    ("state", "event"),
    [pair for pair in product(DecodeState, DecodeEvent) if pair not in DECODE_TABLE],
)
def test_no_other_event_moves_a_decode_request(state: DecodeState, event: DecodeEvent) -> None:
    with pytest.raises(AssertionError, match=f"{event} while {state}"):
        next_decode_state(state, event)


@pytest.mark.parametrize(
    ("state", "event"),
    [pair for pair in product(PrefillState, PrefillEvent) if pair not in PREFILL_TABLE],
)
def test_no_other_event_moves_a_prefill_request(state: PrefillState, event: PrefillEvent) -> None:
    with pytest.raises(AssertionError, match=f"{event} while {state}"):
        next_prefill_state(state, event)
