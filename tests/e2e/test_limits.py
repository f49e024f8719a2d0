"""What is bounded: pages, queues and time. A pool that is too small slows requests down and loses
none; a full queue and a used-up time budget are told at once and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from demo.facts import Ask, make_question
from tests.e2e.fleet import Body, Fleet, Node, error_message, reply_of
from tests.e2e.replies import Reply

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

# Three requests of this length need 45 pages; the small pool has 40.
SMALL_POOL_TOKENS = 640
OUTPUT_COUNT = 180
REQUEST_COUNT = 6
SHORT_COUNT = 40
SHORT: Body = {"text": "Facts:", "sampling_params": {"max_new_tokens": 64, "regex": "[a-z]"}}
QUEUE_MAX = 2
HASTY_TIMEOUT_S = 2
LONG: Body = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}


@dataclass
class Limited:
    """One prefill server, and decode servers that are each short of something."""

    prefill: Node
    small: Node
    narrow: Node
    hasty: Node


@pytest.fixture(scope="module")
def started(fleet: Fleet) -> Limited:
    # float32, so that tokens do not depend on what else is in a batch.
    flags = ("--dtype", "float32")
    prefill = fleet.prefill(*flags)
    pool = ("--max-total-tokens", str(SMALL_POOL_TOKENS))
    queue = ("--max-running-requests", "1", "--max-queued-requests", str(QUEUE_MAX))
    haste = ("--request-timeout", str(HASTY_TIMEOUT_S))
    small = fleet.decode([prefill], *flags, *pool, name="small")
    narrow = fleet.decode([prefill], *flags, *queue, name="narrow")
    hasty = fleet.decode([prefill], *flags, *haste, name="hasty")
    fleet.wait_ready()
    return Limited(prefill, small, narrow, hasty)


@pytest.fixture
def limited(started: Limited, fleet: Fleet) -> Iterator[Limited]:
    """The servers at rest; they must be at rest again after each test."""
    yield started
    fleet.wait_at_rest()


def pressing_body(index: int) -> Body:
    """A prompt whose answer needs all of it; every second one is sampled with a seed, every third
    one must follow a grammar."""
    sampling: Body = {"max_new_tokens": OUTPUT_COUNT, "ignore_eos": True, "temperature": 0}
    if index % 2:
        sampling |= {"temperature": 0.8, "seed": index}
    if index % 3 == 2:
        sampling |= {"regex": f"([a-z]{{1,9}} ){{{OUTPUT_COUNT}}}"}
    question = make_question(700 + index, 8, ask=Ask.ALL)
    return {"text": question.prompt, "sampling_params": sampling}


def test_pressure_on_the_pool_changes_no_output_and_loses_nothing(
    fleet: Fleet, limited: Limited
) -> None:
    bodies = [pressing_body(index) for index in range(REQUEST_COUNT)]
    unpressed = [limited.small.generate(body).output_ids for body in bodies]
    # It has to expect less than these need, or it would not run so many of them at a time.
    for _ in range(SHORT_COUNT):
        limited.small.generate(SHORT)
    counted_before = limited.small.info().counters["retracted"]
    streamed: list[Reply] = []
    with limited.small.stream(bodies[0]) as events:
        pending = [fleet.in_background(limited.small, body) for body in bodies[1:]]
        streamed += events
    replies = [streamed[-1], *(reply_of(future.result()) for future in pending)]
    assert [reply.output_ids for reply in replies] == unpressed
    retracted = sum(reply.meta_info.num_retractions for reply in replies)
    assert retracted > 0
    assert limited.small.info().counters["retracted"] - counted_before == retracted
    lengths = [len(event.output_ids) for event in streamed]
    assert lengths == sorted(lengths), "a streamed token was taken back"


def test_a_prompt_larger_than_the_pool_is_refused_at_once(limited: Limited) -> None:
    body: Body = {"input_ids": [5] * SMALL_POOL_TOKENS, "sampling_params": LONG}
    assert f"{SMALL_POOL_TOKENS - 1}" in limited.small.refused("/generate", body, 400)


def test_a_full_queue_is_told_while_the_others_still_run(fleet: Fleet, limited: Limited) -> None:
    body: Body = {"text": "Facts:", "sampling_params": LONG}
    with ExitStack() as stack:
        running = stack.enter_context(limited.narrow.stream(body))
        assert next(running).meta_info.finish_reason is None
        waiting = [fleet.in_background(limited.narrow, body)]
        limited.narrow.wait_queued("ready")  # who comes now waits until it has a place
        waiting += [fleet.in_background(limited.narrow, body) for _ in range(QUEUE_MAX)]
        limited.narrow.wait_queued("waiting", QUEUE_MAX)
        response = limited.narrow.post("/generate", body)
        assert response.status_code == 503, response.text
        assert "queue full" in response.text
        assert int(response.headers["Retry-After"]) > 0
        assert next(running).meta_info.finish_reason is None
        assert not any(future.done() for future in waiting)
        limited.narrow.post("/abort_request", {"abort_all": True})
    assert all(reply_of(future.result()).finish.type == "abort" for future in waiting)


def test_a_used_up_time_budget_is_a_typed_error(limited: Limited) -> None:
    body: Body = {"text": "Facts:", "sampling_params": LONG}
    assert "time budget" in limited.hasty.refused("/generate", body, 504)
    sent = {"model": "default", "prompt": "Facts:", "max_tokens": 1900, "ignore_eos": True}
    response = limited.hasty.post("/v1/completions", sent)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "timed_out"


def test_a_used_up_time_budget_ends_a_stream_with_its_error(limited: Limited) -> None:
    with limited.hasty.stream({"text": "Facts:", "sampling_params": LONG}) as events:
        last = list(events)[-1]
    assert last.finish.type == "abort"
    assert (last.finish.status_code, last.finish.err_type) == (504, "timed_out")
    assert len(last.output_ids) > 1


def test_a_decode_half_alone_fails_within_its_budget(limited: Limited) -> None:
    body: Body = {"text": "Facts:", "sampling_params": LONG}
    body |= {"bootstrap_host": "127.0.0.1", "bootstrap_room": 1}
    body |= {"bootstrap_port": limited.prefill.bootstrap_port}
    response = limited.hasty.post("/generate", body)
    # Both servers know the budget; whichever looks at its clock first says so.
    assert response.status_code in (500, 504), response.text
    assert error_message(response) in (
        "the other half of the room never came",
        "the request's time budget is used up",
    )
