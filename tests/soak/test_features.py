"""Counters that show whether the features of a soak were used."""

from __future__ import annotations

from tests.soak.features import WATCHED, CounterLog, Feature, flags_of

ALL = list(Feature)


def test_a_restarted_server_counts_on() -> None:
    log = CounterLog(ALL)
    log.take("prefill", 100, {"returns_kept": 3.0})
    log.take("prefill", 100, {"returns_kept": 5.0})
    log.take("prefill", 200, {})
    log.take("prefill", 200, {"returns_kept": 2.0})
    assert log.total("prefill", "returns_kept") == 7
    assert log.total("decode", "returns_kept") == 0


def test_a_feature_that_was_not_used_is_named_unless_it_is_off() -> None:
    log = CounterLog(ALL)
    for role in ("prefill", "decode"):
        risen = [one.name for one in WATCHED if one.side == role and one.must_rise]
        log.take(role, 1, dict.fromkeys(risen, 1.0))
    assert log.unused() == []
    log.take("decode", 1, {"returns_sent": 1.0, "host_saved_tokens": 1.0})
    assert log.unused() == ["decode host_loaded_tokens"]
    log.features = [Feature.RETURNS]
    assert log.unused() == []


def test_flags_are_those_of_the_features() -> None:
    assert flags_of([]) == flags_of([Feature.SAMPLES]) == ()
    assert flags_of([Feature.TIER])[0] == "--host-cache-gb"
