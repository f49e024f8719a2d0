"""One update of the weights, as the process around a scheduler core sees it: every worker loads,
and then another scheduler takes all of them on with what was loaded; or nothing has changed.

Pure: knows no sockets. What was loaded lies beside the weights that compute, so nothing waits for
it, and a failure leaves all as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from common.protocol.frontend import CallDone, UpdateWeights
from common.protocol.weights import DropWeights, LoadWeights, WeightsLoaded
from common.protocol.worker import SchedulerToWorker

log = logging.getLogger(__name__)


class WeightUpdate:
    """rank_count: workers that load. why_not: what this server's settings say against it, "" if
    nothing. tell_workers: sends a message to each of them. answer: tells the frontend.

    loaded_id: of the weights that all workers have loaded; "" until then.
    """

    def __init__(
        self,
        rank_count: int,
        why_not: str,
        tell_workers: Callable[[SchedulerToWorker], None],
        answer: Callable[[CallDone], None],
    ) -> None:
        self._rank_count = rank_count
        self._why_not = why_not
        self._tell_workers = tell_workers
        self._answer = answer
        self._asked: UpdateWeights | None = None
        self._errors: dict[int, str] = {}
        self.loaded_id = ""

    def begin(self, update: UpdateWeights) -> None:
        problem = self._why_not
        if self._asked is not None:
            problem = "another update of the weights is under way"
        if problem:
            self._answer(CallDone(update.call_id, False, problem))
            return
        self._asked, self._errors = update, {}
        self._tell_workers(LoadWeights(update.weights))

    def note_loaded(self, loaded: WeightsLoaded) -> None:
        """A worker has ended its part. One that was asked by an earlier scheduler is not heard."""
        asked = self._asked
        if asked is None or asked.weights.load_id != loaded.load_id or self.loaded_id:
            return
        self._errors[loaded.rank] = loaded.error
        if len(self._errors) < self._rank_count:
            return
        failed = [(rank, error) for rank, error in sorted(self._errors.items()) if error]
        if not failed:
            self.loaded_id = loaded.load_id
            return
        rank, error = failed[0]
        log.warning("rank %d can't load other weights: %s", rank, error)
        self._asked = None
        self._tell_workers(DropWeights())
        self._answer(CallDone(asked.call_id, False, error))
