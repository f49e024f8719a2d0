"""What the frontend's row stands on: an engine that keeps its pace, and numbers that are right."""

from __future__ import annotations

import pytest

from bench.frontend import Sample, rows_of
from bench.http_load import body_of
from bench.instant_engine import InstantEngine
from common.protocol.frontend import Cancel, Failed, Outputs, Submit, Tokens
from common.request import SamplingParams


def submit(request_id: int, token_count: int) -> Submit:
    sampling = SamplingParams(max_new_tokens=token_count, seed=0)
    return Submit(request_id, [1, 2], sampling, budget_s=1.0)


def tokens_of(message: object) -> list[Tokens]:
    assert isinstance(message, Outputs)
    return [item for item in message.items if isinstance(item, Tokens)]


def test_a_step_is_one_token_of_each_and_waits_until_the_last_one_is_read() -> None:
    engine = InstantEngine([7, 8])
    assert engine.handle(submit(1, 3)) == engine.handle(submit(2, 2)) == []
    assert engine.step() == Outputs([Tokens(1, [7]), Tokens(2, [7])])
    engine.read(1)
    assert engine.step() is None
    engine.read(1)
    one, two = tokens_of(engine.step())
    assert (one.token_ids, one.offset, one.finish) == ([8], 1, None)
    assert two.finish is not None and two.trace is not None
    assert (two.trace.prompt_token_count, two.trace.output_token_count) == (2, 2)
    engine.read(2)
    assert [message.token_ids for message in tokens_of(engine.step())] == [[7]]
    engine.read(1)
    assert engine.step() is None


def test_a_single_token_is_answered_at_once() -> None:
    engine = InstantEngine([7])
    (message,) = engine.handle(submit(1, 1))
    (answer,) = tokens_of(message)
    assert answer.finish is not None
    assert engine.step() is None


def test_a_cancelled_request_ends_once() -> None:
    engine = InstantEngine([7])
    engine.handle(submit(1, 3))
    aborted = Failed(1, 499, "aborted", "aborted by the client")
    assert engine.handle(Cancel(1)) == [Outputs([aborted])]
    assert engine.handle(Cancel(1)) == []
    assert engine.step() is None


def test_rows_compare_tokens_and_answers_of_the_same_run() -> None:
    taken = {
        "stream": [Sample(wall_s=4.0, cpu_s=3.0, answer_count=100, event_count=1_000_000)],
        "bare stream": [Sample(wall_s=2.0, cpu_s=1.0, answer_count=100, event_count=1_000_000)],
        "whole": [Sample(wall_s=2.0, cpu_s=0.5, answer_count=1000, event_count=0)],
        "bare whole": [Sample(wall_s=1.0, cpu_s=0.25, answer_count=1000, event_count=0)],
    }
    rows = {row.name: row for row in rows_of(taken)}
    overhead = rows["frontend_overhead_per_token"]
    assert (overhead.value, overhead.reference_value) == pytest.approx((2.0, 1.0))
    told = {name: (row.value, row.ratio) for name, row in rows.items() if row is not overhead}
    assert told == {
        "frontend_tokens_per_cpu_s": (pytest.approx(1e6 / 3), pytest.approx(1 / 3)),
        "frontend_stream_requests": (25.0, 0.5),
        "frontend_short_per_cpu_s": (2000.0, 0.5),
        "frontend_short_requests": (500.0, 0.5),
    }


def test_a_body_is_put_together_from_its_chunks() -> None:
    chunked = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab\n\r\n1\r\n\n\r\n0\r\n\r\n"
    )
    assert body_of(chunked) == b"ab\n\n"
    assert body_of(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab") == b"ab"
