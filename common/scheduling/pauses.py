"""What either scheduler does about Pause and Continue. Knows nothing of requests."""

from __future__ import annotations

from common.protocol.frontend import CallDone, Continue, Pause
from common.scheduling.batcher import Batcher
from common.scheduling.peers import Outbox


class Pauses:
    """is_on: no step is to be planned, and no request begun. Steps in flight return, and transfers
    go on: a pause is answered once nothing is computed."""

    def __init__(self, batcher: Batcher, outbox: Outbox) -> None:
        self._since: float | None = None
        self._batcher = batcher
        self._outbox = outbox
        self._waiting: list[int] = []

    @property
    def is_on(self) -> bool:
        return self._since is not None

    def begin(self, pause: Pause, now: float) -> None:
        self._since = now if self._since is None else self._since
        self._waiting.append(pause.call_id)

    def end(self, message: Continue, now: float) -> float:
        """Seconds that the pause has lasted. Whoever asked for it and was not told is told now."""
        since, self._since = self._since, None
        self._waiting.append(message.call_id)
        self._answer()
        return now - since if since is not None else 0.0

    def review(self) -> None:
        """Answer what can be answered by now."""
        if self._waiting and not self._batcher.is_computing:
            self._answer()

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for call_id in filter(None, waiting):
            self._outbox.to_frontend(CallDone(call_id, True, ""))
