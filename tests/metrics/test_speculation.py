"""Accepted proposals under vLLM's and SGLang's names; nothing of them where nothing is proposed."""

from __future__ import annotations

import pytest

from common.config import EngineType, MetricsNames
from common.metrics.server import ServerMetrics
from common.metrics.snapshot import Snapshot
from common.protocol.worker import Accepted, StepDone
from common.request import SamplingParams
from common.scheduling.batch_limits import BatchLimits
from common.scheduling.page_account import PageAccount
from common.scheduling.proposals import Proposals
from common.scheduling.sequence import Sequence

LIMITS = BatchLimits(64, 8, 4096, frozenset(), proposal_max=3)


def exposed(counters: dict[str, float]) -> list[str]:
    metrics = ServerMetrics("m", EngineType.DECODE, MetricsNames.BOTH)
    return metrics.expose(Snapshot(counters=counters)).decode().splitlines()


def value_of(lines: list[str], name: str, *labels: str) -> float:
    (line,) = [
        one
        for one in lines
        if one.startswith((f"{name}{{", f"{name} ")) and all(label in one for label in labels)
    ]
    return float(line.rpartition(" ")[2])


@pytest.fixture
def counted() -> Proposals:
    """Three steps of a sequence: of 3, 3 and 2 proposals 3, 1 and none were accepted."""
    proposals = Proposals(PageAccount([], [], has_prefix_cache=False))
    sequence = Sequence(7, [1], 1, SamplingParams(max_new_tokens=64, seed=1), [])
    for step, (count, tokens) in enumerate(((3, [5, 6, 7]), (3, [8]), (2, []))):
        done = StepDone(step, [7], [4], accepted={7: Accepted(count, tokens)})
        proposals.append(sequence, 4, done, LIMITS)
    return proposals


def test_each_name_has_its_number(counted: Proposals) -> None:
    lines = exposed(counted.counters)
    for name, value in (
        ("vllm:spec_decode_num_drafts_total", 3),
        ("vllm:spec_decode_num_draft_tokens_total", 8),
        ("vllm:spec_decode_num_accepted_tokens_total", 4),
        ("sglang:spec_accept_length", 1 + 4 / 3),
        ("sglang:spec_accept_rate", 0.5),
    ):
        assert value_of(lines, name) == pytest.approx(value), name
    per_place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    for place, value in enumerate((2, 1, 1)):
        assert value_of(lines, per_place, f'position="{place}"') == value


def test_a_server_that_verifies_nothing_shows_no_lengths() -> None:
    lines = exposed({})
    assert not [line for line in lines if "spec_accept" in line and not line.startswith("#")]
    assert value_of(lines, "vllm:spec_decode_num_drafts_total") == 0
