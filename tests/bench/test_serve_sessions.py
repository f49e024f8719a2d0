"""Sessions go on with what was really said, one turn after the other, beside each other."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from aiohttp import web

from bench.serve.cli import main
from bench.serve.client import LoadClient
from bench.serve.conversation import ChatConversation, TokenConversation
from bench.serve.dialects import OpenAiDialect, SglangDialect
from bench.serve.outcome import Outcome, Run
from bench.serve.sessions import Session, make_sessions
from bench.serve.settings import parse_settings
from bench.serve.summary import summarize
from tests.bench.scripted_server import begin_stream, end_stream, send_event, serving

VOCAB_SIZE = 1000
DRAWN = (
    *("--dataset-name", "sessions", "--num-sessions", "2", "--session-turns", "3"),
    *("--random-input-len", "20", "--session-turn-len", "5", "--random-output-len", "3"),
)


def ignore(outcome: Outcome) -> None:
    pass


def sessions_of(*flags: str) -> list[Session]:
    settings = parse_settings(["--dataset-name", "sessions", *flags])
    return make_sessions(settings, VOCAB_SIZE)[0]


def replay(url: str, *flags: str, is_openai: bool = False) -> Run:
    settings = parse_settings(["--base-url", url, *DRAWN, *flags])
    sessions, source = make_sessions(settings, VOCAB_SIZE)
    dialect = OpenAiDialect(settings, "tiny", None) if is_openai else SglangDialect(settings)
    return asyncio.run(LoadClient(settings, dialect).replay(sessions, source, ignore))


class Server:
    """Answers three tokens of its own to each prompt, and remembers the prompts.

    cuts: every event has the new ids only, not all so far.
    """

    def __init__(self, *, cuts: bool = False, cached_count: int | None = 16) -> None:
        self.prompts: list[list[int]] = []
        self.answers: list[list[int]] = []
        self._cuts = cuts
        self._cached_count = cached_count

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        is_openai = request.path == "/v1/completions"
        prompt = body["prompt" if is_openai else "input_ids"]
        number = len(self.prompts)
        answer = [VOCAB_SIZE + 10 * number + place for place in range(3)]
        self.prompts.append(prompt)
        self.answers.append(answer)
        response = await begin_stream(request)
        for count in (1, 2, 3):
            new = answer[count - 1 : count]
            if is_openai:
                assert body["return_token_ids"] is True
                details = {"cached_tokens": self._cached_count}
                usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
                usage |= {"prompt_tokens_details": details}  # type: ignore[dict-item]
                choice = {"index": 0, "text": "a", "token_ids": new}
                await send_event(response, {"choices": [choice], "usage": usage})
                continue
            meta = {
                "completion_tokens": count,
                "prompt_tokens": len(prompt),
                "cached_tokens": self._cached_count,
            }
            ids = new if self._cuts else answer[:count]
            await send_event(response, {"text": "", "output_ids": ids, "meta_info": meta})
        return await end_stream(response)

    def exchanges(self) -> dict[tuple[int, ...], list[tuple[list[int], list[int]]]]:
        """Prompts and answers by their first tokens, in the order in which they came."""
        found: dict[tuple[int, ...], list[tuple[list[int], list[int]]]] = defaultdict(list)
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            found[tuple(prompt[:20])].append((prompt, answer))
        return found


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("is_openai", [False, True])
def test_a_prompt_is_all_before_it_with_the_servers_own_answers(
    *, cuts: bool, is_openai: bool
) -> None:
    server = Server(cuts=cuts)
    with serving(server.answer) as url:
        run = replay(url, is_openai=is_openai)
    assert all(outcome.is_good for outcome in run.outcomes)
    sessions = server.exchanges()
    assert len(sessions) == 2
    for exchanges in sessions.values():
        assert [len(prompt) for prompt, _ in exchanges] == [20, 28, 36]
        for (before, answer), (prompt, _) in pairwise(exchanges):
            assert prompt[: len(before) + 3] == before + answer
    new = [tuple(prompt[-5:]) for prompt in server.prompts]
    assert len(set(new)) == 6  # all turns of both say something else


def test_a_next_turn_leaves_after_the_last_answer_and_the_think_time() -> None:
    with serving(Server().answer) as url:
        run = replay(url, "--think-time", "0.02")
    turns = [outcome.ask.turn for outcome in run.outcomes]
    assert turns == [0, 1, 2] * 2
    for before, outcome in pairwise(run.outcomes):
        if outcome.ask.turn:
            assert outcome.due_s == before.ended_s + 0.02
            assert outcome.sent_s >= outcome.due_s


def test_sessions_run_beside_each_other_and_no_more_than_allowed() -> None:
    """No first answer ends before three have come: fewer side by side would hang."""
    under_way, peak = 0, 0
    three_here = asyncio.Event()
    server = Server()

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal under_way, peak
        under_way += 1
        peak = max(peak, under_way)
        if under_way == 3:
            three_here.set()
        await three_here.wait()
        response = await server.answer(request)
        under_way -= 1
        return response

    with serving(handler) as url:
        run = replay(url, "--num-sessions", "7", "--max-sessions", "3")
    assert peak == 3
    assert len(run.outcomes) == 21 and all(outcome.is_good for outcome in run.outcomes)
    # A session that has waited for its place is not late.
    first = [outcome for outcome in run.outcomes if outcome.ask.turn == 0]
    assert sum(outcome.due_s > 0 for outcome in first) == 4


def test_a_failed_turn_ends_its_session_and_no_other() -> None:
    server = Server()

    async def handler(request: web.Request) -> web.StreamResponse:
        if len((await request.json())["input_ids"]) == 28 and not failed:
            failed.append(None)
            return web.json_response({"error": {"message": "full"}}, status=503)
        return await server.answer(request)

    failed: list[None] = []
    with serving(handler) as url:
        run = replay(url)
    assert sorted(outcome.error_kind for outcome in run.outcomes) == ["", "", "", "", "http 503"]
    assert run.unsent_count == 1
    assert summarize(run, (50.0,), {}).unsent_count == 1


def test_answers_without_ids_can_not_be_continued() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        await send_event(response, {"text": "abc", "meta_info": {"completion_tokens": 3}})
        return await end_stream(response)

    with serving(handler) as url:
        run = replay(url)
    assert [outcome.error_kind for outcome in run.outcomes] == ["no token ids"] * 2
    assert "0 token ids for 3 tokens" in run.outcomes[0].error


def test_the_summary_is_by_turn_and_has_the_hit_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "out.json"
    flags = ("--vocab-size", "1000", "--disable-tqdm", "--save-detailed")
    with serving(Server().answer) as url:
        code = main(["--base-url", url, *DRAWN, *flags, "--result-file", str(result)])
    told = json.loads(result.read_text())
    assert code == 0
    assert [row["prompt_tokens"] for row in told["turns"]] == [20, 28, 36]
    assert [row["turn"] for row in told["turns"]] == [1, 2, 3]
    assert [row["request_count"] for row in told["turns"]] == [2, 2, 2]
    assert [row["hit_rate"] for row in told["turns"]] == [16 / 20, 16 / 28, 16 / 36]
    assert all(0 < row["ttft_p50"] <= row["ttft_p99"] for row in told["turns"])
    assert told["cached_token_count"] == 96
    assert told["hit_rate"] == 96 / told["input_token_count"] == 96 / 168
    assert [row["turn"] for row in told["requests"]] == [1, 2, 3] * 2
    assert [row["prompt_tokens"] for row in told["requests"]] == [20, 28, 36] * 2
    shown = capsys.readouterr().out
    assert "hit rate" in shown and "57.1%" in shown and "requests per s" in shown


def test_a_server_that_does_not_count_cached_tokens_has_no_hit_rate() -> None:
    with serving(Server(cached_count=None).answer) as url:
        summary = summarize(replay(url), (50.0,), {})
    assert (summary.hit_rate, summary.cached_token_count) == (None, None)
    assert [turn.hit_rate for turn in summary.turns] == [None] * 3


def answered(prompt_count: int, ids: list[int]) -> Outcome:
    """An answer of these tokens."""
    settings = parse_settings([*DRAWN])
    sessions, source = make_sessions(settings, VOCAB_SIZE)
    ask = TokenConversation(sessions[0], source, 0).ask(0, 0.0)
    return Outcome(
        ask, 0.0, output_count=len(ids), output_ids=ids, prompt_count=prompt_count, text="said"
    )


def written(path: Path, requests: list[dict[str, object]], scope: str = "local") -> Path:
    content = {"block_size": 4, "hash_id_scope": scope, "requests": requests}
    path.write_text(json.dumps(content))
    return path


def turn_of(at_s: float, length: int, output: int, ids: list[int]) -> dict[str, object]:
    return {"t": at_s, "in": length, "out": output, "hash_ids": ids, "api_time": 1.0}


def test_a_recorded_session_keeps_as_much_as_its_blocks_show(tmp_path: Path) -> None:
    """Two turns append, the third one begins anew behind the first block, as after a compaction."""
    path = written(
        tmp_path / "a.json",
        [
            turn_of(0.0, 9, 2, [1, 2]),
            turn_of(3.0, 16, 2, [1, 2, 7, 8]),
            turn_of(9.0, 10, 2, [1, 5]),
        ],
    )
    settings = parse_settings(["--dataset-name", "sessions", "--dataset-path", str(path)])
    (session,), source = make_sessions(settings, VOCAB_SIZE)
    assert [turn.think_s for turn in session.turns] == [0.0, 2.0, 5.0]
    conversation = TokenConversation(session, source, 0)
    first = conversation.ask(0, 0.0).prompt
    assert conversation.hear(answered(9, [501, 502])) == ""
    second = conversation.ask(1, 0.0).prompt
    assert second[:11] == (*first, 501, 502) and len(second) == 16
    assert conversation.hear(answered(16, [503, 504])) == ""
    third = conversation.ask(2, 0.0).prompt
    assert third[:4] == first[:4] and third[4:8] != second[4:8] and len(third) == 10


def test_new_tokens_of_equal_blocks_are_equal_in_all_sessions(tmp_path: Path) -> None:
    requests = [turn_of(0.0, 8, 1, [1, 2]), turn_of(3.0, 12, 1, [1, 2, 7])]
    for name in ("a.json", "b.json"):
        written(tmp_path / name, requests, scope="global")
    settings = parse_settings(["--dataset-name", "sessions", "--dataset-path", str(tmp_path)])
    sessions, source = make_sessions(settings, VOCAB_SIZE)
    prompts = []
    for session in sessions:
        conversation = TokenConversation(session, source, 0)
        conversation.ask(0, 0.0)
        conversation.hear(answered(8, [501]))
        prompts.append(conversation.ask(1, 0.0).prompt)
    assert prompts[0] == prompts[1]


def test_sessions_without_ids_append_while_their_prompts_grow(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Request tokens,Response tokens\n"
        "10,x,2,100,20\n11,y,1,50,5\n20,x,2,150,20\n21.5,x,1,30,20\n"
    )
    first, second = sessions_of("--dataset-path", str(path), "--trace-slowdown-factor", "2")
    assert [turn.kept_max for turn in first.turns] == [0, 150, 0]
    # The answer before the third request had not ended when it came.
    assert [turn.think_s for turn in first.turns] == [0.0, 16.0, 0.0]
    assert (first.begin_s, second.begin_s) == (0.0, 2.0)
    assert [turn.input_length for turn in second.turns] == [50]


def test_sessions_of_a_trace_can_begin_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("timestamp,input_length,output_length\n0,5,1\n5000,5,1\n9000,5,1\n")

    def begun(*flags: str) -> list[float]:
        return [one.begin_s for one in sessions_of("--dataset-path", str(path), *flags)]

    assert begun() == [0.0, 5.0, 9.0]
    assert begun("--request-rate", "inf", "--num-sessions", "2") == [0.0, 0.0]


def test_a_chat_goes_on_with_its_messages() -> None:
    settings = parse_settings([*DRAWN])
    sessions, source = make_sessions(settings, VOCAB_SIZE)
    conversation = ChatConversation(sessions[0], source, 0, lambda ids: f"{len(ids)} tokens")
    assert conversation.ask(0, 0.0).messages == ()
    # The server's template made 24 tokens of the 20, and the answer is 3 more.
    conversation.hear(answered(24, [1, 2, 3]))
    ask = conversation.ask(1, 0.0)
    assert ask.messages == (("user", "20 tokens"), ("assistant", "said"))
    assert len(ask.prompt) == 28 - 24 - 3
    body = OpenAiDialect(settings, "tiny", lambda ids: f"{len(ids)} tokens").body(ask)
    assert body["messages"] == [
        {"role": "user", "content": "20 tokens"},
        {"role": "assistant", "content": "said"},
        {"role": "user", "content": "1 tokens"},
    ]
