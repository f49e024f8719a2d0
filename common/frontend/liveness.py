"""Whether the scheduler answers and its engine moves, from what was heard and when. Pure.

Knows nothing of sockets or of time: it is told `now`, in seconds of a monotonic clock.
"""

from __future__ import annotations

from common.protocol.frontend import State

SILENCE_MAX_S = 5.0  # several watch intervals; a scheduler step takes milliseconds
GONE_AFTER_S = 10.0  # silent this long, its open requests are answered for it
STALL_MAX_S = 30.0  # far above one chunk of any model that is served, below a client's patience


class Liveness:
    """What the health checks ask. Starts out as heard from, and not ready."""

    def __init__(self, now: float) -> None:
        self.state: State | None = None
        self._heard_at = now
        self._moved_at = now
        self._lost_reason = ""

    def hear(self, now: float) -> None:
        """Any message came."""
        self._heard_at = now

    def hear_state(self, state: State, now: float) -> None:
        """A State came: the engine moved if it took a step or has none to take."""
        if self.state is None or state.step_count != self.state.step_count or not is_busy(state):
            self._moved_at = now
        self.state = state

    def lose(self, reason: str) -> None:
        """The scheduler is gone for good; the first reason stays."""
        self._lost_reason = self._lost_reason or reason

    def is_gone(self, now: float) -> bool:
        """Whether nobody will answer the open requests any more."""
        return bool(self._lost_reason) or now - self._heard_at > GONE_AFTER_S

    def trouble(self, now: float, *, is_started: bool) -> str:
        """Why the server is not healthy, "" if it is. A peer that is missing is no trouble here.

        A scheduler may be silent while it starts: it answers when its workers have their weights.
        """
        if self._lost_reason or not is_started:
            return self._lost_reason
        silent_s = now - self._heard_at
        if silent_s > SILENCE_MAX_S:
            return f"the scheduler has not answered for {silent_s:.0f} s"
        if self.state is not None and self.state.trouble:
            return self.state.trouble
        stalled_s = now - self._moved_at
        if self.state is not None and is_busy(self.state) and stalled_s > STALL_MAX_S:
            return f"the engine has not finished a step for {stalled_s:.0f} s"
        return ""


def is_busy(state: State) -> bool:
    """Whether a forward pass is due: requests that run, or prompts that are being computed."""
    return state.queues.get("running", 0) > 0
