"""A transfer engine that isn't there or dies costs its own rows and no others."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import numpy as np
import pytest

from bench import transfers
from bench.report import NotRun, Row
from bench.transfer_peers import Contender, ContenderFailed, plans
from common.planner.copy_plan import CopyPlan

ZERO = np.zeros(1, dtype=np.int64)
PLAN = CopyPlan(ZERO, ZERO, ZERO, ZERO, ZERO + 1_000_000_000)


def serve_target(link: str, nbytes: int, pipe: Connection) -> None:
    pipe.send(f"{link} {nbytes}")
    pipe.recv()


def serve_one_plan(link: str, nbytes: int, pipe: Connection) -> None:
    assert pipe.recv() == f"{link} {nbytes}"
    pipe.send("ready")
    for _ in plans(pipe):
        pipe.send(0.5)
        os._exit(3)


def serve_nothing(link: str, nbytes: int, pipe: Connection) -> None:
    os._exit(7)


def start_mortal(link: str, nbytes: int) -> Contender:
    return Contender(serve_target, serve_one_plan, link, nbytes)


def start_dead(link: str, nbytes: int) -> Contender:
    return Contender(serve_target, serve_nothing, link, nbytes)


def start_absent(link: str, nbytes: int) -> Contender:
    raise ContenderFailed("it is not installed")


def start_paced(link: str, nbytes: int) -> Contender:
    return Contender(serve_target, serve_paced, link, nbytes)


def serve_paced(link: str, nbytes: int, pipe: Connection) -> None:
    pipe.recv()
    pipe.send("ready")
    for _ in plans(pipe):
        pipe.send(0.5)


@pytest.mark.slow
def test_only_the_rows_of_those_that_fail_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    makers = {
        "paced": start_paced, "mortal": start_mortal, "dead": start_dead, "absent": start_absent
    }  # fmt: skip
    monkeypatch.setattr(transfers, "CONTENDERS", makers)
    monkeypatch.setitem(transfers.RATIO_MIN, "shm", dict.fromkeys(makers, 1.5))
    with transfers.Contenders("shm") as contenders:
        for _ in range(2):
            contenders.sample("transfer_shm_4KiB", PLAN)
        row, *missing = contenders.results({"transfer_shm_4KiB": [4.0, 4.0]})
    assert isinstance(row, Row) and row.name == "transfer_shm_4KiB_over_paced"
    assert (row.value, row.reference_value, row.ratio, row.is_met) == (4.0, 2.0, 2.0, True)
    assert {one.name: one.reason for one in missing if isinstance(one, NotRun)} == {
        "transfer_shm_*_over_mortal": "its process ended with code 3",
        "transfer_shm_*_over_dead": "its process ended with code 7",
        "transfer_shm_*_over_absent": "it is not installed",
    }
