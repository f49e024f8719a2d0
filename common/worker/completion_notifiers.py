"""The engine's word to the I/O thread: what was launched, told as soon as it is computed, in order.

On a CPU a launch has computed when it returns, and is told at once. On CUDA it has only asked for
it: an event is recorded behind it, and a thread of its own waits for one event after the other. The
engine thread can't wait, it launches the next step meanwhile; the I/O thread can't either, and to
look at events again and again would be late or in vain. A thread that waits sleeps in the driver,
without the interpreter lock. Knows nothing of models or transfers.
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
from common.worker.io_loop import Outbox, Progress
from common.worker.sends import Computed

Launched = Computed | PendingStep

TOLD_TIMEOUT_S = 0.002
"""How long an engine that computes on a CPU waits for its tokens to leave: ten times what it takes
where nothing else is to do."""


class CompletionNotifier(Protocol):
    """Used by the engine thread alone."""

    def start(self) -> None: ...

    def put(self, layer_count: int, *launched: Launched) -> None:
        """Once all that this thread has launched so far is computed, count these layers as finished
        and tell the I/O thread; of a step, its answer."""
        ...

    def end(self) -> None:
        """Tell what is left and return then."""
        ...


class ImmediateNotifier:
    """Where a launch has computed when it returns.

    The next step may be here already, and an engine that goes on with it has the interpreter most
    of the time: tokens of the last step would leave milliseconds late. So they are waited for.
    """

    def __init__(self, outbox: Outbox, progress: Progress) -> None:
        self._outbox = outbox
        self._progress = progress

    def start(self) -> None:
        pass

    def put(self, layer_count: int, *launched: Launched) -> None:
        _tell(self._outbox, self._progress, layer_count, launched, self._put_answer)

    def _put_answer(self, answer: StepDone) -> None:
        self._outbox.put_and_wait(answer, TOLD_TIMEOUT_S)

    def end(self) -> None:
        pass


class Mark(Protocol):
    """A place behind what is launched so far; a CUDA event."""

    def synchronize(self) -> None:
        """Sleep until the device has come that far."""
        ...


@dataclass(frozen=True, slots=True)
class _Marked:
    mark: Mark
    layer_count: int
    launched: tuple[Launched, ...]


class EventNotifier:
    """Where a launch returns before it has computed.

    Its queue is bounded by the scheduler: two steps at most are with a worker, each with one mark
    for every layer group and one behind the draw.
    """

    def __init__(
        self,
        outbox: Outbox,
        progress: Progress,
        record: Callable[[], Mark],
        fail: Callable[[], None],
        device: torch.device,
    ) -> None:
        """record: a mark behind what the calling thread has launched. fail: ends the worker."""
        self._outbox = outbox
        self._progress = progress
        self._record = record
        self._marked: SimpleQueue[_Marked | None] = SimpleQueue()
        self._thread = DeviceThread("notifier", device, self._run, fail)

    def start(self) -> None:
        self._thread.start()

    def put(self, layer_count: int, *launched: Launched) -> None:
        self._marked.put(_Marked(self._record(), layer_count, launched))

    def end(self) -> None:
        self._marked.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (marked := self._marked.get()) is not None:
            # Raises what the device failed with.
            marked.mark.synchronize()
            _tell(
                self._outbox,
                self._progress,
                marked.layer_count,
                marked.launched,
                self._outbox.put,
            )


def start_notifier(
    device: torch.device, outbox: Outbox, progress: Progress, fail: Callable[[], None]
) -> CompletionNotifier:
    """For launches of the calling thread on this device."""
    if device.type != "cuda":
        return ImmediateNotifier(outbox, progress)
    return EventNotifier(outbox, progress, _record_event, fail, device)


def _record_event() -> Mark:
    # Blocking: whoever waits sleeps, and leaves its core to those that compute.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _tell(
    outbox: Outbox,
    progress: Progress,
    layer_count: int,
    launched: tuple[Launched, ...],
    put_answer: Callable[[StepDone], None],
) -> None:
    """put_answer: how a step's answer gets into the outbox."""
    progress.layer_count += layer_count
    for one in launched:
        if isinstance(one, PendingStep):
            put_answer(one.finish())
        else:
            outbox.put(one)
