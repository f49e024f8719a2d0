"""What a trial of the copies says, where copies take known times."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from common.clock import ManualClock
from common.planner.copy_plan import Int64Array
from common.transport.copies import copy_runs
from common.transport.loader import load_ucx
from common.worker.staging import copy_trial
from common.worker.staging.copier import Bytes
from common.worker.staging.copy_trial import measure_copies

load_ucx("auto")

SLOT_NBYTES = 1 << 20
LAUNCH_S, BYTES_PER_S = 5e-5, 2e9


def test_pieces_and_bytes_are_priced_as_the_device_copies_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    first_s = iter((0.5, 0.0))  # whatever is done for the first time

    def timed(target: Bytes, source: Bytes, *runs: Int64Array) -> None:
        copy_runs(target, source, *runs)
        clock.advance(LAUNCH_S + float(runs[2].sum()) / BYTES_PER_S + next(first_s, 0.0))

    monkeypatch.setattr(copy_trial, "copy_runs", timed)
    costs = measure_copies(torch.zeros(4 * SLOT_NBYTES, dtype=torch.uint8), SLOT_NBYTES, clock)
    for cost in (costs.gather, costs.scatter):
        assert cost.piece_s == pytest.approx(LAUNCH_S, rel=0.05)
        assert cost.bandwidth == pytest.approx(BYTES_PER_S)


def test_a_full_piece_fills_its_slot_from_all_over_the_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    region = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 3 * SLOT_NBYTES, np.uint8))
    pages = region[SLOT_NBYTES:].clone()
    measure_copies(region, SLOT_NBYTES, clock)
    slot = region[:SLOT_NBYTES].view(-1, copy_trial.RUN_NBYTES)
    known = {run.numpy().tobytes(): i for i, run in enumerate(pages.view(-1, slot.shape[1]))}
    places = [known[run.numpy().tobytes()] for run in slot]
    assert len(set(places)) == len(slot) and max(places) > len(slot)
    assert sum(b == a + 1 for a, b in pairwise(places)) < len(slot) // 8
    assert torch.equal(region[SLOT_NBYTES:], pages)
