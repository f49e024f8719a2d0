"""What an operator asks of a decode server beside requests: pauses, a cache without prefixes, and a
scheduler that leaves its workers to another one.

Knows nothing of steps or of messages to peers.
"""

from __future__ import annotations

from common.failures import Failure, FailureKind
from common.protocol.frontend import Continue, FlushCache, Pause
from common.scheduling.batcher import Batcher
from common.scheduling.flush import Flushes
from common.scheduling.page_account import PageAccount
from common.scheduling.pauses import Pauses
from common.scheduling.peers import Outbox
from decode_server.requests import Requests

CUT_OFF = Failure(FailureKind.MOVED, "another scheduler goes on with the request")


class Interruptions:
    """Between what is asked and the requests that it meets."""

    def __init__(
        self, account: PageAccount, batcher: Batcher, outbox: Outbox, requests: Requests
    ) -> None:
        self._batcher = batcher
        self._requests = requests
        self._flushes = Flushes(account, batcher, outbox)
        self._pauses = Pauses(batcher, outbox)

    @property
    def is_paused(self) -> bool:
        return self._pauses.is_on

    def handle(self, message: FlushCache | Pause | Continue, now: float) -> None:
        match message:
            case FlushCache():
                self._flushes.handle(message, self._reader_count)
            case Pause():
                self._pauses.begin(message, now)
                if message.retracts:
                    self._retract_all(now)
            case Continue():
                self._pauses.end(message, now)

    def review(self) -> None:
        """Answer what can be answered by now."""
        self._pauses.review()
        if self._flushes.is_asked:
            self._flushes.answer(self._reader_count)

    def cut_off(self, now: float) -> None:
        """No cache comes any more. What waits or runs has nothing that another server writes to."""
        for request in self._requests.transferring:
            self._requests.fail(request, CUT_OFF, now)

    @property
    def _reader_count(self) -> int:
        """Requests that may be reading cached prefixes. In a pause those that wait don't begin."""
        count = self._requests.client_count
        return count - self._requests.waiting_count if self.is_paused else count

    def _retract_all(self, now: float) -> None:
        """All that decode wait again, and the pages that are in no block come back."""
        for sequence in list(self._batcher.sequences()):
            if not self._batcher.computes_prompt(sequence):
                request = self._requests.of_sequence(sequence)
                self._batcher.remove(sequence)
                self._requests.retract(request, now)
