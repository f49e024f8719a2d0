"""A process of the simulation: its timers, what it says, and what waits for it while it is stopped.

Knows nothing of what it computes.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from common.protocol.worker import WorkerToScheduler

Call = Callable[[], None]
After = Callable[[float, Call], None]
Reply = Callable[[WorkerToScheduler], None]


class SimProcess:
    """after: the world's clock, which goes on whatever stops. reply: where its words go."""

    def __init__(self, rng: random.Random, after: After, reply: Reply) -> None:
        self.is_dead = False
        self.is_stopped = False
        self._rng = rng
        self._clock = after
        self._reply = reply
        self._overdue: list[Call] = []
        self._arrived: list[Call] = []

    def stop(self) -> None:
        """As SIGSTOP does: nothing happens any more, what is due waits."""
        self.is_stopped = True

    def go_on(self) -> None:
        """What came from others lies in sockets and slots of their own: it is read before what its
        scheduler has said, or after."""
        self.is_stopped = False
        queues = [self._overdue, self._arrived]
        if self._rng.random() < 0.5:
            queues.reverse()
        for queue in queues:
            while queue and not self.is_stopped:
                queue.pop(0)()

    def after(self, delay: float, call: Call) -> None:
        """A timer of this process."""
        self._clock(delay, lambda: self.when_it_runs(call))

    def when_it_runs(self, call: Call) -> None:
        """At once, or when it goes on; behind what is overdue, as in the socket that it is read
        from."""
        if self.is_stopped or self._overdue:
            self._overdue.append(call)
        else:
            call()

    def beside(self, delay: float, call: Call) -> None:
        """Something that a device of this process does, until the process ends."""
        self._clock(delay, lambda: None if self.is_dead else call())

    def receive(self, delay: float, call: Call) -> None:
        """Something of somebody else's gets here after a while, and is read when it runs."""
        self._clock(delay, lambda: self._arrived.append(call) if self.is_stopped else call())

    def soon(self, message: WorkerToScheduler) -> None:
        self.after(self._rng.uniform(0.0001, 0.002), lambda: self.say(message))

    def say(self, message: WorkerToScheduler) -> None:
        if not self.is_dead:
            self._reply(message)
