"""Completion notifiers: report launched work to the I/O thread once it is computed, in order.

On a CPU a launch has computed when it returns, so `ImmediateNotifier` reports at once. On CUDA a
launch only queues work: `EventNotifier` records an event behind it, and a thread of its own waits
for one event after the other. The engine thread can't wait, because it launches the next step
meanwhile; the I/O thread can't wait either, and polling events would be late or in vain. The
waiting thread sleeps in the driver, without the interpreter lock. Knows nothing of models or
transfers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch

from common.engine.pending_step import PendingStep
from common.protocol.worker import StepDone
from common.worker.device_thread import DeviceThread
from common.worker.io_loop import EngineOutbox, Progress
from common.worker.sends import Computed
from common.worker.succession import SequencesForgotten

Launched = Computed | PendingStep | SequencesForgotten

SEND_TIMEOUT_S = 0.002
"""How long an engine on a CPU waits until the I/O thread has sent its tokens. On an idle machine
that takes a tenth of this."""


class CompletionNotifier(Protocol):
    """Called by the engine thread alone."""

    def start(self) -> None: ...

    def notify(self, layer_count: int, *launched: Launched) -> None:
        """Report `launched` once everything that this thread has launched so far is computed.

        layer_count: layers to count as finished then. A step is reported by its StepDone.
        """
        ...

    def end(self) -> None:
        """Returns after the last report."""
        ...


class ImmediateNotifier:
    """For devices where a launch has computed when it returns.

    The next step may be queued already. An engine that goes on with it holds the interpreter most
    of the time, and the tokens of the last step would leave milliseconds late. So the engine waits
    until the I/O thread has sent them.
    """

    def __init__(self, outbox: EngineOutbox, progress: Progress) -> None:
        self._outbox = outbox
        self._progress = progress

    def start(self) -> None:
        pass

    def notify(self, layer_count: int, *launched: Launched) -> None:
        _report(self._outbox, self._progress, layer_count, launched, self._put_answer)

    def _put_answer(self, answer: StepDone) -> None:
        self._outbox.put_and_wait(answer, SEND_TIMEOUT_S)

    def end(self) -> None:
        pass


class Mark(Protocol):
    """A CUDA event recorded behind the launches so far."""

    def synchronize(self) -> None:
        """Sleep until the device has computed everything before the mark."""
        ...


@dataclass(frozen=True, slots=True)
class _Marked:
    mark: Mark
    layer_count: int
    launched: tuple[Launched, ...]


class EventNotifier:
    """For devices where a launch returns before it has computed.

    The scheduler bounds the queue: a worker has two steps at most, each with one mark for every
    layer group and one behind the draw.
    """

    def __init__(
        self,
        outbox: EngineOutbox,
        progress: Progress,
        record: Callable[[], Mark],
        fail: Callable[[], None],
        device: torch.device,
    ) -> None:
        """record: makes a mark behind the launches of the calling thread. fail: ends the worker."""
        self._outbox = outbox
        self._progress = progress
        self._record = record
        self._marked: SimpleQueue[_Marked | None] = SimpleQueue()
        self._thread = DeviceThread("notifier", device, self._run, fail)

    def start(self) -> None:
        self._thread.start()

    def notify(self, layer_count: int, *launched: Launched) -> None:
        self._marked.put(_Marked(self._record(), layer_count, launched))

    def end(self) -> None:
        self._marked.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (marked := self._marked.get()) is not None:
            marked.mark.synchronize()  # raises the device's error, if it failed
            _report(
                self._outbox,
                self._progress,
                marked.layer_count,
                marked.launched,
                self._outbox.put,
            )


def start_notifier(
    device: torch.device, outbox: EngineOutbox, progress: Progress, fail: Callable[[], None]
) -> CompletionNotifier:
    """The notifier for launches of the calling thread on this device."""
    if device.type != "cuda":
        return ImmediateNotifier(outbox, progress)
    return EventNotifier(outbox, progress, _record_event, fail, device)


def _record_event() -> Mark:
    # Blocking: the waiting thread sleeps, and leaves its core to the threads that compute.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _report(
    outbox: EngineOutbox,
    progress: Progress,
    layer_count: int,
    launched: tuple[Launched, ...],
    put_answer: Callable[[StepDone], None],
) -> None:
    """put_answer: puts a step's StepDone into the outbox."""
    progress.layer_count += layer_count
    for one in launched:
        if isinstance(one, PendingStep):
            put_answer(one.finish())
        else:
            outbox.put(one)
