"""Who is silent and who stands still: only time in which we listened counts."""

from __future__ import annotations

from common.scheduling.worker_health import LOOK_GAP_MAX_S, SilenceTimer, WorkerHealth

STEP_S = 0.125  # exact in binary, so that sums are


def look(
    health: WorkerHealth, now: float, seconds: float, *, is_busy: bool, beats: str = ""
) -> float:
    """Look for some seconds while ranks beat: "+" one whose engine moves, "=" one that stands."""
    end = now + seconds
    while now < end:
        now += STEP_S
        for rank, kind in enumerate(beats):
            if kind in "+=":
                health.apply_beat(rank, int(1000 * now) if kind == "+" else 7)
        health.check(now, is_busy=is_busy)
    return now


def test_time_in_which_we_did_not_run_is_nobodys_silence() -> None:
    silence = SilenceTimer(0.0)
    assert silence.update(100.0) == LOOK_GAP_MAX_S
    silence.hear()
    assert silence.update(100.25) == 0.25


def test_an_engine_that_moves_is_well_however_long_its_step() -> None:
    health = WorkerHealth(2, stall_s=2.0, silence_s=1.0)
    look(health, 0.0, 60.0, is_busy=True, beats="+=")
    assert health.trouble == ""


def test_an_engine_that_stands_still_in_a_step_is_in_trouble_until_it_moves() -> None:
    health = WorkerHealth(2, stall_s=2.0, silence_s=1.0)
    now = look(health, 0.0, 1.5, is_busy=True, beats="==")
    assert health.trouble == ""
    now = look(health, now, 1.5, is_busy=True, beats="==")
    assert health.trouble == "the engine has not moved for 2 s"
    look(health, now, STEP_S, is_busy=True, beats="=+")
    assert health.trouble == ""


def test_an_idle_engine_may_stand_still() -> None:
    health = WorkerHealth(1, stall_s=2.0, silence_s=1.0)
    now = look(health, 0.0, 60.0, is_busy=False, beats="=")
    look(health, now, 1.5, is_busy=True, beats="=")
    assert health.trouble == ""


def test_one_silent_worker_is_trouble_although_the_engine_is_idle() -> None:
    health = WorkerHealth(2, stall_s=2.0, silence_s=1.0)
    now = look(health, 0.0, 0.75, is_busy=False, beats="=.")
    assert health.trouble == ""
    now = look(health, now, 0.75, is_busy=False, beats="=.")
    assert health.trouble == "worker 1 has been silent for 1 s"
    look(health, now, STEP_S, is_busy=False, beats="==")
    assert health.trouble == ""


def test_a_worker_that_is_stopped_is_given_half_the_time() -> None:
    health = WorkerHealth(2, stall_s=2.0, silence_s=1.0)
    health.stopped_ranks = (1,)
    now = look(health, 0.0, 0.5, is_busy=False, beats="=.")
    assert health.trouble == ""
    now = look(health, now, 0.25, is_busy=False, beats="=.")
    assert health.trouble == "worker 1 is stopped"
    health.stopped_ranks = ()
    look(health, now, STEP_S, is_busy=False, beats="==")
    assert health.trouble == ""
