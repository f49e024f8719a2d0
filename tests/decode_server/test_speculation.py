"""Proposals on the real cores of a pair: where first ones go, and how clients are told of runs."""

from __future__ import annotations

import pytest

from common.protocol.frontend import Tokens
from common.protocol.worker import NewSequence, Step
from common.scheduling.events import ToFrontend, ToWorkers
from tests.decode_server.test_samples import Pair

GUESS_COUNT = 3


@pytest.fixture
def pair() -> Pair:
    pair = Pair()
    pair.decode.proposal_max, pair.decode.right_rate = 4, 0.8
    pair.world.begin()
    return pair


def steps_of(pair: Pair) -> list[Step]:
    return [
        effect.message
        for node, effect in pair.told
        if node == "d0" and isinstance(effect, ToWorkers) and isinstance(effect.message, Step)
    ]


def test_first_proposals_of_the_prefill_server_reach_the_workers_with_the_sequence() -> None:
    """Its workers guess behind the first token, and all right."""
    pair = Pair()
    pair.decode.proposal_max, pair.prefill.guess_count = 4, GUESS_COUNT
    pair.world.begin()
    (client,) = pair.submit(1)
    pair.end(client)
    new: list[NewSequence] = [one for step in steps_of(pair) for one in step.new]
    (first,) = [one.proposals for one in new if one.request_id > 0]
    assert first == client.output[1 : 1 + GUESS_COUNT]


def test_without_a_draft_nothing_is_guessed_behind_a_prompt(pair: Pair) -> None:
    (client,) = pair.submit(1)
    pair.end(client)
    assert not any(one.proposals for step in steps_of(pair) for one in step.new)


def test_a_client_has_all_tokens_of_a_step_in_one_message(pair: Pair) -> None:
    (client,) = pair.submit(1)
    pair.end(client)
    told = [
        effect.message
        for _, effect in pair.told
        if isinstance(effect, ToFrontend)
        and isinstance(effect.message, Tokens)
        and effect.message.request_id == client.request_id
    ]
    assert [token for message in told for token in message.token_ids] == client.output
    counts = [len(message.token_ids) for message in told]
    assert max(counts) > 1 and len(told) == 1 + sum(bool(step.decode) for step in steps_of(pair))
    assert [message.offset for message in told] == [sum(counts[:i]) for i in range(len(counts))]
    (trace,) = [message.trace for message in told if message.trace is not None]
    assert trace.speculated.accepted_count == sum(counts) - len(counts)
    assert trace.speculated.step_count <= len(counts) - 1 <= trace.speculated.proposed_count


def test_a_step_is_sent_when_the_one_before_has_returned(pair: Pair) -> None:
    pair.submit(3)
    pair.world.run(pair.world.now + 4.0)
    assert pair.world.tally["steps sent ahead"] == 0
    assert any(step.draft_counts for step in steps_of(pair))
