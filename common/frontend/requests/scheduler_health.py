"""Whether the scheduler answers and its engine moves, from what was heard and when. Pure.

Knows nothing of sockets or of time: it is told `now`, in seconds of a monotonic clock.
"""

from __future__ import annotations

from common.protocol.frontend import State
from common.scheduling.worker_health import SilenceTimer

# The scheduler is looked at every second or so. Where it was not, this process did not run, and
# what the scheduler said meanwhile has not been read yet.
LOOK_GAP_MAX_S = 2.5
SILENCE_MAX_S = 5.0  # several watch intervals; a scheduler step takes milliseconds
# A process that spoke so short a time ago is not looked at for each request: it ran then, and one
# that is taken just before a stop waits all the same.
JUST_HEARD_S = 0.05
GONE_AFTER_S = 10.0  # silent this long, its open requests are answered for it
STALL_MAX_S = 30.0  # far above one chunk of any model that is served, below a client's patience


class SchedulerHealth:
    """What the health checks ask. Starts out as heard from, and not ready.

    Silence and standstill count only while this process ran itself: a frontend that was stopped
    for a minute blames no scheduler.
    """

    def __init__(self, now: float) -> None:
        self.state: State | None = None
        self._silence = SilenceTimer(now, gap_max_s=LOOK_GAP_MAX_S)
        self._standstill = SilenceTimer(now, gap_max_s=LOOK_GAP_MAX_S)
        self._lost_reason = ""

    def hear(self, now: float) -> None:
        """Any message came."""
        self._silence.update(now)
        self._silence.hear()

    def hear_state(self, state: State, now: float) -> None:
        """A State came: the engine moved if it took a step or has none to take."""
        self._standstill.update(now)
        if self.state is None or state.step_count != self.state.step_count or not is_busy(state):
            self._standstill.hear()
        self.state = state

    def lose(self, reason: str) -> None:
        """The scheduler is gone for good; the first reason stays."""
        self._lost_reason = self._lost_reason or reason

    def is_gone(self, now: float) -> bool:
        """Whether no scheduler will answer the open requests any more."""
        return bool(self._lost_reason) or self._silence.update(now) > GONE_AFTER_S

    def trouble(self, now: float, *, is_started: bool) -> str:
        """Why the server is not healthy, "" if it is. A peer that is missing is no trouble here.

        To be asked at least every LOOK_GAP_MAX_S. A scheduler may be silent while it starts: it
        answers when its workers have their weights.
        """
        if self._lost_reason or not is_started:
            return self._lost_reason
        silent_s = self._silence.update(now)
        if silent_s > SILENCE_MAX_S:
            return f"the scheduler has not answered for {silent_s:.0f} s"
        if self.state is not None and self.state.trouble:
            return self.state.trouble
        stalled_s = self._standstill.update(now)
        if self.state is not None and is_busy(self.state) and stalled_s > STALL_MAX_S:
            return f"the engine has not finished a step for {stalled_s:.0f} s"
        return ""


def is_busy(state: State) -> bool:
    """Whether a forward pass is due: requests that run, or prompts that are being computed, unless
    they stand still by command."""
    return state.queues.get("running", 0) > 0 and not state.is_paused
