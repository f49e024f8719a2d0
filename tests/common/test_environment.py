"""What a server tells its processes by their environment, and what it leaves to its own."""

from __future__ import annotations

import pytest

from common.environment import OMP_WAIT_VARIABLES, child_environment

SPIN, POLICY = OMP_WAIT_VARIABLES


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OMP_WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_threads_poll_for_a_short_time() -> None:
    assert 0 < int(child_environment("")[SPIN]) < 100_000


@pytest.mark.parametrize(("name", "value"), [(SPIN, "7"), (POLICY, "ACTIVE")])
def test_who_said_how_threads_wait_is_heard(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    told = child_environment("")
    assert {key: told.get(key) for key in OMP_WAIT_VARIABLES} == {
        SPIN: None,
        POLICY: None,
        name: value,
    }
