"""The load tool against a real HTTP server that does what the test says."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path

import pytest
from aiohttp import web

from bench.serve.cli import main
from bench.serve.client import LoadClient
from bench.serve.dialects import OpenAiDialect, SglangDialect
from bench.serve.outcome import Outcome, Run
from bench.serve.settings import parse_settings
from bench.serve.workload import make_workload
from tests.bench.scripted_server import (
    ANSWERS,
    Handler,
    begin_stream,
    end_stream,
    send_event,
    serving,
    token_event,
)

SMALL = ("--random-input-len", "4", "--random-output-len", "3")
DEMO_CHECKPOINT = Path(__file__).parents[2] / "demo" / "checkpoint"


def send(url: str, *flags: str) -> Run:
    settings = parse_settings(["--base-url", url, *SMALL, *flags])
    asks = make_workload(settings, 100)
    return asyncio.run(LoadClient(settings, SglangDialect(settings)).run(asks, ignore))


def ignore(outcome: Outcome) -> None:
    pass


async def answer_three(request: web.Request) -> web.StreamResponse:
    response = await begin_stream(request)
    for count in (1, 2, 3):
        await send_event(response, token_event(count))
    return await end_stream(response)


def test_slow_answers_hold_no_arrival_back() -> None:
    """Nobody is answered before all have come: a client that waited for answers would hang."""
    count = 40
    arrived: list[None] = []
    all_here = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        arrived.append(None)
        if len(arrived) == count:
            all_here.set()
        await all_here.wait()
        return await answer_three(request)

    with serving(handler) as url:
        run = send(url, "--num-prompts", str(count), "--request-rate", "2000")
    assert [outcome.error_kind for outcome in run.outcomes] == [""] * count
    assert all(outcome.sent_s >= outcome.due_s for outcome in run.outcomes)
    assert max(outcome.sent_s for outcome in run.outcomes) < min(o.ended_s for o in run.outcomes)


def test_max_concurrency_is_never_exceeded() -> None:
    under_way = [0, 0]  # now, most so far
    three_here = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        under_way[0] += 1
        under_way[1] = max(under_way)
        if under_way[0] == 3:
            three_here.set()
        await three_here.wait()
        response = await begin_stream(request)
        await send_event(response, token_event(3))
        under_way[0] -= 1
        return await end_stream(response)

    with serving(handler) as url:
        run = send(url, "--num-prompts", "30", "--max-concurrency", "3")
    assert under_way[1] == 3
    assert all(outcome.is_good for outcome in run.outcomes)
    assert max(outcome.sent_s - outcome.began_s for outcome in run.outcomes) > 0


def test_times_lie_between_what_the_server_heard_and_wrote() -> None:
    """Both clocks are this process's, so causes come before effects on it."""
    heard: list[float] = []
    wrote: list[float] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        heard.append(time.perf_counter())
        response = await begin_stream(request)
        for count in (1, 2, 3):
            await asyncio.sleep(0.005)
            wrote.append(time.perf_counter())
            await send_event(response, token_event(count))
        return await end_stream(response)

    with serving(handler) as url:
        began_at = time.perf_counter()
        run = send(url, "--num-prompts", "1")
    (outcome,) = run.outcomes
    assert 0 <= outcome.sent_s <= heard[0] - began_at
    times_s = [at_s for at_s, _ in outcome.arrivals]
    assert times_s == sorted(times_s) and times_s[-1] <= outcome.ended_s
    assert times_s[0] - outcome.sent_s >= wrote[0] - heard[0]
    assert times_s[-1] - outcome.sent_s >= wrote[2] - heard[0]
    assert (outcome.prompt_count, outcome.output_count) == (4, 3)


async def refuse(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "queue is full"}}, status=503)


async def fail_in_stream(request: web.Request) -> web.StreamResponse:
    response = await begin_stream(request)
    await send_event(response, token_event(1))
    await send_event(response, {"error": {"message": "the peer is gone"}})
    return await end_stream(response)


async def abort_in_stream(request: web.Request) -> web.StreamResponse:
    response = await begin_stream(request)
    event = token_event(1)
    event["meta_info"] = {"finish_reason": {"type": "abort", "message": "out of time"}}
    await send_event(response, event)
    return await end_stream(response)


async def cut_off(request: web.Request) -> web.StreamResponse:
    response = await begin_stream(request)
    await send_event(response, token_event(1))
    assert request.transport is not None
    request.transport.close()
    return response


async def end_early(request: web.Request) -> web.StreamResponse:
    response = await begin_stream(request)
    await send_event(response, token_event(1))
    await response.write_eof()
    return response


async def say_nothing(request: web.Request) -> web.StreamResponse:
    return await end_stream(await begin_stream(request))


async def babble(request: web.Request) -> web.StreamResponse:
    response = await begin_stream(request)
    await response.write(b"data: {]\n\n")
    return await end_stream(response)


async def mumble(request: web.Request) -> web.StreamResponse:
    response = await begin_stream(request)
    await response.write(b'data: {"error": {"message": "\x80"}}\n\n')
    return await end_stream(response)


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize(
    ("handler", "kind", "said"),
    [
        (refuse, "http 503", "queue is full"),
        (fail_in_stream, "failed", "the peer is gone"),
        (abort_in_stream, "failed", "out of time"),
        (cut_off, "cut off", ""),
        (end_early, "cut off", "without [DONE]"),
        (say_nothing, "no tokens", "no token"),
        (babble, "unreadable", ""),
        (mumble, "unreadable", ""),
        (hang, "timeout", "0.05 s"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_way_to_fail_has_a_kind(handler: Handler, kind: str, said: str) -> None:
    with serving(handler) as url:
        timeout = ("--request-timeout", "0.05") if kind == "timeout" else ()
        run = send(url, "--num-prompts", "2", *timeout)
    assert [outcome.error_kind for outcome in run.outcomes] == [kind] * 2
    assert said in run.outcomes[0].error


def test_nobody_there_is_a_failure_of_its_own() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening
        run = send(f"http://127.0.0.1:{taken.getsockname()[1]}", "--num-prompts", "1")
    assert run.outcomes[0].error_kind == "connect"


@pytest.mark.parametrize("backend", ["sglang", "openai", "openai-chat"])
@pytest.mark.parametrize("counts", [True, False])
def test_each_api_is_asked_and_understood(backend: str, *, counts: bool) -> None:
    bodies: list[dict[str, object]] = []
    paths: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        paths.append(request.path)
        if backend == "sglang":
            return await answer_three(request)
        response = await begin_stream(request)
        for count in (1, 2):
            text = {"delta": {"content": "a"}} if backend == "openai-chat" else {"text": "a"}
            usage = {"prompt_tokens": 4, "completion_tokens": count} if counts else None
            await send_event(response, {"choices": [{"index": 0, **text}], "usage": usage})
        last = {"prompt_tokens": 4, "completion_tokens": 3}
        await send_event(response, {"choices": [], "usage": last})
        return await end_stream(response)

    with serving(handler) as url:
        settings = parse_settings(
            [
                *("--base-url", url, "--backend", backend, *SMALL, "--num-prompts", "1"),
                *("--tokenizer", str(DEMO_CHECKPOINT), "--extra-request-body", '{"top_k": 3}'),
            ]
        )
        asks = make_workload(settings, 100)
        decode = (lambda ids: "four words of text") if backend == "openai-chat" else None
        dialect = (
            SglangDialect(settings)
            if backend == "sglang"
            else OpenAiDialect(settings, "tiny", decode)
        )
        run = asyncio.run(LoadClient(settings, dialect).run(asks, ignore))
    (outcome,) = run.outcomes
    assert (outcome.error_kind, outcome.prompt_count, outcome.output_count) == ("", 4, 3)
    body = bodies[0]
    assert body["stream"] is True and body["top_k"] == 3
    if backend == "sglang":
        assert paths == ["/generate"] and body["input_ids"] == list(asks[0].prompt)
        assert body["sampling_params"] == {
            "max_new_tokens": 3,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        return
    assert body["model"] == "tiny" and body["max_tokens"] == 3 and body["ignore_eos"] is True
    # The third token had no text, and nobody saw it come.
    assert [count for _, count in outcome.arrivals] == [1, 2]
    if backend == "openai":
        assert paths == ["/v1/completions"] and body["prompt"] == list(asks[0].prompt)
    else:
        assert paths == ["/v1/chat/completions"]
        assert body["messages"] == [{"role": "user", "content": "four words of text"}]


@pytest.mark.slow  # matplotlib
def test_a_run_leaves_a_result_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer abc"
        served.append(request.path)
        if len(served) == 4:
            return await refuse(request)
        return await answer_three(request)

    result, picture = tmp_path / "out.json", tmp_path / "out.svg"
    with serving(handler) as url:
        code = main(
            [
                *("--base-url", url, *SMALL, "--num-prompts", "6", "--request-rate", "500"),
                *("--api-key", "abc", "--goodput", "ttft:60000", "--disable-tqdm"),
                *("--result-file", str(result), "--save-detailed", "--picture", str(picture)),
            ]
        )
    told = json.loads(result.read_text())
    assert code == 1  # one of the six failed; the warm-up before them is not counted
    assert len(served) == 7
    assert told["errors"] == {"http 503": 1} and told["good_count"] == 5
    assert told["output_token_count"] == 15 and told["input_token_count"] == 20
    assert told["goodput"] == pytest.approx(5 / told["duration_s"])
    assert told["settings"]["request_rate"] == 500 and "abc" not in result.read_text()
    assert [row["index"] for row in told["requests"]] == list(range(6))
    drawn = picture.read_text()
    assert drawn.rstrip().endswith("</svg>")
    assert "time to first token" in drawn and "failed" in drawn
    shown = capsys.readouterr().out
    assert "5 of 6" in shown and "queue is full" in shown


def test_a_server_that_refuses_the_first_request_is_not_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(refuse) as url:
        code = main(["--base-url", url, *SMALL, "--num-prompts", "3", "--disable-tqdm"])
    assert code == 2
    assert "http 503" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "content", "flags", "said"),
    [
        ("/server_info", b"<html>", (), "give --vocab-size or --tokenizer"),
        ("/server_info", b'{"vocab_size": "many"}', (), "give --vocab-size or --tokenizer"),
        ("/server_info", b"{}", (), "give --vocab-size or --tokenizer"),
        ("/v1/models", b"<html>", ("--backend", "openai"), "give --model"),
        ("/v1/models", b'{"data": []}', ("--backend", "openai"), "give --model"),
        ("/v1/models", b'{"data": [{"id": "\x80"}]}', ("--backend", "openai"), "give --model"),
    ],
)
def test_an_answer_that_can_not_be_read_names_the_flag_that_spares_it(
    path: str,
    content: bytes,
    flags: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(answer_three, {**ANSWERS, path: content}) as url:
        code = main(["--base-url", url, *SMALL, "--disable-tqdm", *flags])
    told = capsys.readouterr().err
    assert code == 2
    assert f"{url}{path}" in told and said in told


@pytest.mark.parametrize("flags", [(), ("--flush-cache", "--vocab-size", "100")])
def test_a_server_that_does_not_answer_in_time_is_said_to(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both questions are asked over a socket that nobody accepts from."""
    monkeypatch.setattr("bench.serve.cli.ASK_TIMEOUT_S", 0.01)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code = main(["--base-url", url, "--warmup-requests", "0", "--disable-tqdm", *flags])
    assert code == 2
    assert "no answer in 0.01 s" in capsys.readouterr().err


def test_a_tokenizer_that_can_not_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    assert main(["--tokenizer", str(tmp_path)]) == 2
    assert f"--tokenizer {tmp_path}" in capsys.readouterr().err


def test_who_can_not_be_reached_is_not_told_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.serve.client.CONNECT_TIMEOUT_S", 0.05)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        taken = [socket.socket() for _ in range(3)]
        try:
            for one in taken:  # more than wait to be accepted: the next one gets no answer
                one.setblocking(False)
                one.connect_ex(address)
            run = send(f"http://127.0.0.1:{address[1]}", "--num-prompts", "1")
        finally:
            for one in taken:
                one.close()
    assert run.outcomes[0].error_kind == "connect"
    assert "0.05 s" in run.outcomes[0].error
