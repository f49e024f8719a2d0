"""Servers of different models or dtypes refuse each other, both say why, and both go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.facts import is_right, make_question
from tests.e2e.fleet import CHECKPOINT, Body, Fleet, Node, error_message

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@dataclass
class House:
    """One prefill server, and decode servers of which only one fits. words: what differs."""

    prefill: Node
    matching: Node
    others: dict[str, Node]


WORDS = {
    "dtype": ("dtype", "float32", "bfloat16"),
    "model": ("architecture", "weights", "vocab_size"),
}


@pytest.fixture(scope="module")
def house(fleet: Fleet, tiny_checkpoint: Callable[[str], Path]) -> Iterator[House]:
    prefill = fleet.prefill("--dtype", "float32")
    matching = fleet.decode([prefill], "--dtype", "float32", name="matching")
    model = tiny_checkpoint("llama")
    tokenizer = ("--tokenizer-path", str(CHECKPOINT))
    flags = ("--dtype", "float32")
    others = {
        "dtype": fleet.decode([prefill], "--dtype", "bfloat16", name="other-dtype"),
        "model": fleet.decode([prefill], *flags, *tokenizer, name="other-model", model=model),
    }
    prefill.wait_ready()
    matching.wait_ready()
    for other in others.values():
        other.wait_refused()
    yield House(prefill, matching, others)


@pytest.mark.parametrize("what", WORDS)
def test_a_refused_decode_server_tells_every_difference(house: House, what: str) -> None:
    other = house.others[what]
    (refused,) = other.refusals()
    assert refused.address == house.prefill.bootstrap
    response = other.get("/health")
    assert response.status_code == 503
    for word in WORDS[what]:
        assert word in refused.detail
        assert word in error_message(response)
        assert word in other.log


@pytest.mark.parametrize("what", WORDS)
def test_the_prefill_server_tells_whom_it_refused_and_why(house: House, what: str) -> None:
    details = [peer.detail for peer in house.prefill.refusals()]
    assert any(all(word in detail for word in WORDS[what]) for detail in details), details
    assert all(word in house.prefill.log for word in WORDS[what])


def test_a_refusal_is_told_once_and_not_at_every_attempt(house: House) -> None:
    for node in (house.prefill, *house.others.values()):
        lines = [line.partition("] ")[2] for line in node.log.splitlines() if "refused" in line]
        assert lines and len(lines) == len(set(lines))


def test_the_matching_decode_server_is_served(house: House) -> None:
    question = make_question(950, 12)
    body: Body = {"text": question.prompt, "sampling_params": {"temperature": 0}}
    assert is_right(question, house.matching.generate(body).text)
