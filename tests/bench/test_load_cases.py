"""A closed loop tells what it found by names that others' figures have, and what is missing."""

from __future__ import annotations

from aiohttp import web

from bench.load_cases import LoadCase, figures_of, send_case, why_unfinished
from tests.bench.scripted_server import begin_stream, end_stream, send_event, serving, token_event

CASE = LoadCase(input_length=4, output_length=2, stream_count=3, request_count=7)


async def answer_two(request: web.Request) -> web.StreamResponse:
    response = await begin_stream(request)
    for count in (1, 2):
        await send_event(response, token_event(count))
    return await end_stream(response)


def test_a_case_is_sent_in_so_many_streams_after_as_many_that_warm_up() -> None:
    lengths: list[int] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        lengths.append(len((await request.json())["input_ids"]))
        return await answer_two(request)

    with serving(handler) as url:
        summary = send_case(CASE, url, 100)
    assert lengths == [4] * (3 + 7)
    assert why_unfinished(CASE, summary) == ""
    assert summary.peak_concurrency <= 3
    assert list(figures_of(summary)) == [
        *("output tokens/s", "ITL p50, ms", "ITL p99, ms", "TTFT p50, ms", "TTFT p99, ms"),
        "client's lag p99, ms",
    ]
    assert figures_of(summary)["output tokens/s"] == 7 * 2 / summary.duration_s


def test_a_request_that_is_not_answered_is_missed() -> None:
    seen: list[None] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(None)
        return (
            web.Response(status=503, text="full") if len(seen) == 10 else await answer_two(request)
        )

    with serving(handler) as url:
        summary = send_case(CASE, url, 100)
    assert why_unfinished(CASE, summary) == "6 of 7 answered: 1 http 503 (full)"


def test_answers_that_are_too_short_are_missed() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        await send_event(response, token_event(1))
        return await end_stream(response)

    with serving(handler) as url:
        summary = send_case(CASE, url, 100)
    assert why_unfinished(CASE, summary) == "7 tokens of 14"
    assert "ITL p50, ms" not in figures_of(summary)
