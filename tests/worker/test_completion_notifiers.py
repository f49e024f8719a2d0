"""Launched work is reported when it is computed, in order, and never before."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest
import torch

from common.clock import ManualClock
from common.engine.pending_step import PendingStep
from common.protocol.worker import StepDone
from common.worker.completion_notifiers import EventNotifier, ImmediateNotifier
from common.worker.io_loop import EngineOutbox, Progress
from common.worker.sends import Computed

HANG_TIMEOUT_S = 20.0


class ManualMark:
    """A mark that the test completes. is_awaited: the notifier thread waits for it."""

    def __init__(self) -> None:
        self.is_awaited = threading.Event()
        self.is_done = threading.Event()
        self.error: RuntimeError | None = None

    def synchronize(self) -> None:
        self.is_awaited.set()
        assert self.is_done.wait(HANG_TIMEOUT_S)
        if self.error is not None:
            raise self.error


class Rig:
    def __init__(self) -> None:
        self.marks = [ManualMark() for _ in range(3)]
        self.outbox = EngineOutbox()
        self.progress = Progress()
        self.has_failed = threading.Event()
        marks = iter(self.marks)
        self.notifier = EventNotifier(
            self.outbox,
            self.progress,
            lambda: next(marks),
            self.has_failed.set,
            torch.device("cpu"),
        )
        self.notifier.start()

    def put_step(self) -> None:
        """Two layer groups of two layers each, and the end of the step."""
        self.notifier.notify(2, Computed(7, 1))
        self.notifier.notify(2, Computed(7, 2))
        self.notifier.notify(1, Computed(7, 2), pending_step(7))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    for mark in rig.marks:
        mark.is_done.set()
    rig.notifier.end()
    rig.outbox.close()


def pending_step(step_id: int) -> PendingStep:
    return PendingStep(step_id, ManualClock(), 0.0)


def done(step_id: int) -> StepDone:
    return pending_step(step_id).finish()


def test_a_layer_group_is_reported_when_computed_and_not_when_launched(rig: Rig) -> None:
    rig.put_step()
    assert rig.marks[0].is_awaited.wait(HANG_TIMEOUT_S)
    assert rig.outbox.take() == [] and rig.progress.count() == 0
    rig.marks[2].is_done.set()  # given: done first, awaited last
    rig.marks[0].is_done.set()
    assert rig.marks[1].is_awaited.wait(HANG_TIMEOUT_S)
    assert rig.outbox.take() == [Computed(7, 1)] and rig.progress.count() == 2


def test_end_returns_after_all_that_was_launched_is_reported(rig: Rig) -> None:
    rig.put_step()
    for mark in rig.marks:
        mark.is_done.set()
    rig.notifier.end()
    assert rig.outbox.take() == [Computed(7, 1), Computed(7, 2), Computed(7, 2), done(7)]
    assert rig.progress.count() == 5


def test_a_device_that_fails_ends_the_worker_and_nothing_more_is_reported(rig: Rig) -> None:
    rig.put_step()
    rig.marks[1].error = RuntimeError("an illegal memory access was encountered")
    for mark in rig.marks:
        mark.is_done.set()
    assert rig.has_failed.wait(HANG_TIMEOUT_S)
    assert rig.outbox.take() == [Computed(7, 1)]


def test_where_a_launch_computes_it_is_reported_at_once() -> None:
    outbox, progress = EngineOutbox(), Progress()
    ImmediateNotifier(outbox, progress).notify(3, Computed(1, 2), pending_step(1))
    assert outbox.take() == [Computed(1, 2), done(1)] and progress.count() == 3
    outbox.close()


def test_an_engine_goes_on_when_its_tokens_are_sent_or_after_the_timeout() -> None:
    outbox, sent = EngineOutbox(), threading.Event()

    def send() -> None:
        select.select([outbox], [], [], HANG_TIMEOUT_S)
        assert outbox.take() == [done(1)]
        sent.set()
        outbox.note_sent()

    thread = threading.Thread(target=send)
    thread.start()
    outbox.put_and_wait(done(1), HANG_TIMEOUT_S)
    assert sent.is_set()
    thread.join()
    outbox.put_and_wait(done(2), timeout_s=0.0)
    assert outbox.take() == [done(2)]
    outbox.close()
