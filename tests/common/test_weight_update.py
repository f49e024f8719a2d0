"""Every rank has other weights before any rank computes with them, or nothing has changed."""

from __future__ import annotations

from common.protocol.frontend import CallDone, UpdateWeights
from common.protocol.weights import DropWeights, LoadWeights, WeightsLoaded
from common.protocol.worker import SchedulerToWorker
from common.runtime.weight_update import WeightUpdate
from common.weights import ServedWeights


class Rig:
    def __init__(self, rank_count: int = 2, why_not: str = "") -> None:
        self.told: list[SchedulerToWorker] = []
        self.answers: list[CallDone] = []
        self.update = WeightUpdate(rank_count, why_not, self.told.append, self.answers.append)

    def ask(self, call_id: int, load_id: str) -> ServedWeights:
        weights = ServedWeights("/b", version="b", load_id=load_id)
        self.update.begin(UpdateWeights(call_id, weights, "inc"))
        return weights


def test_it_is_there_once_all_ranks_have_loaded() -> None:
    rig = Rig()
    weights = rig.ask(1, "x")
    assert rig.told == [LoadWeights(weights)]
    rig.update.note_loaded(WeightsLoaded(1, "x"))
    rig.update.note_loaded(WeightsLoaded(1, "x"))
    assert rig.update.loaded_id == ""
    rig.update.note_loaded(WeightsLoaded(0, "x"))
    assert rig.update.loaded_id == "x" and rig.answers == []


def test_one_rank_that_fails_has_all_of_them_drop_what_they_loaded() -> None:
    rig = Rig()
    rig.ask(1, "x")
    rig.update.note_loaded(WeightsLoaded(0, "x"))
    rig.update.note_loaded(WeightsLoaded(1, "x", "no such tensor"))
    assert rig.answers == [CallDone(1, False, "no such tensor")]
    assert rig.told[1:] == [DropWeights()] and rig.update.loaded_id == ""
    rig.ask(2, "y")  # another try
    rig.update.note_loaded(WeightsLoaded(0, "x"))  # of an earlier one
    for rank in range(2):
        rig.update.note_loaded(WeightsLoaded(rank, "y"))
    assert rig.update.loaded_id == "y"


def test_one_update_at_a_time() -> None:
    rig = Rig()
    rig.ask(1, "x")
    rig.ask(2, "y")
    assert rig.answers == [CallDone(2, False, "another update of the weights is under way")]
    assert len(rig.told) == 1


def test_a_server_that_can_t_says_why() -> None:
    rig = Rig(why_not="of several machines")
    rig.ask(1, "x")
    assert rig.answers == [CallDone(1, False, "of several machines")] and rig.told == []
