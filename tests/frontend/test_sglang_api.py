"""/generate answers in SGLang's shapes."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import pytest

from common.config import Role
from common.frontend.bodies.fields import JsonObject
from common.protocol.frontend import Submit, Tokens, ToldFrontend
from common.request import FinishKind, FinishReason
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import (
    TOKENIZER,
    at,
    counted_text,
    counted_up,
    post,
    post_object,
    post_stream,
    run_generate,
    say_text,
    serve_http,
)
from tests.frontend.scripted_scheduler import count_up

GREEDY: JsonObject = {"temperature": 0, "max_new_tokens": 4}


def test_a_plain_answer_has_sglang_s_fields_and_a_timeline(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        prompt = TOKENIZER.encode("hello")
        body: JsonObject = {"text": "hello", "sampling_params": GREEDY, "rid": "r1"}
        reply = await post_object(rig, "/generate", body)
        assert reply["text"] == counted_text(prompt, 4)
        assert reply["output_ids"] == counted_up(prompt, 4)
        meta = reply["meta_info"]
        assert isinstance(meta, dict)
        assert meta["id"] == "r1"
        assert meta["finish_reason"] == {"type": "length", "length": 4}
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(prompt), 4)
        assert meta["cached_tokens"] == 0
        assert isinstance(meta["e2e_latency"], float) and meta["e2e_latency"] >= 0
        assert at(meta, "timeline", "transfer", "nbytes") == 10_000_000
        assert at(meta, "timeline", "reserve_s") == 0.001
        assert "input_token_logprobs" not in meta
        (submit,) = rig.scheduler.submits
        assert submit.token_ids == prompt and submit.budget_s == 60.0
        assert submit.bootstrap is None and submit.sampling.temperature == 0.0
        await post(rig, "/generate", {"input_ids": prompt, "timeout": 2.5})
        assert rig.scheduler.submits[-1].budget_s == 2.5

    run_generate(tmp_path, story)


def test_put_is_post(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        reply = await rig.http.put("/generate", json={"input_ids": [5], "sampling_params": GREEDY})
        assert reply.json()["output_ids"] == counted_up([5], 4)

    run_generate(tmp_path, story)


def test_a_batch_is_answered_in_order(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.holds = True
        params: JsonObject = {"max_new_tokens": 2, "n": 2, "sampling_seed": 1}
        body: JsonObject = {"input_ids": [[10], [20]], "sampling_params": params}
        asked = asyncio.create_task(post(rig, "/generate", body))
        await rig.until(lambda s: len(s.held) == 4)
        for request_id in reversed(rig.scheduler.held.copy()):
            rig.scheduler.release(request_id)
        reply = await asked
        assert isinstance(reply, list)
        texts = [at(item, "output_ids") for item in reply]
        assert texts == [counted_up([10], 2)] * 2 + [counted_up([20], 2)] * 2
        seeds = [submit.sampling.seed for submit in rig.scheduler.submits]
        assert seeds[0] == 1 and len(set(seeds[:2])) == 2 and seeds[:2] == seeds[2:]

    run_generate(tmp_path, story)


def test_a_stream_is_cumulative_and_ends_with_its_reason(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        events = await post_stream(rig, "/generate", {"input_ids": [9], "sampling_params": GREEDY})
        ids = [event["output_ids"] for event in events]
        assert ids[-1] == counted_up([9], 4)
        for before, after in pairwise(events):
            assert str(after["text"]).startswith(str(before["text"]))
            assert at(before, "meta_info", "finish_reason") is None
            assert "e2e_latency" not in before["meta_info"]  # type: ignore[operator]
        assert events[-1]["text"] == counted_text([9], 4)
        assert at(events[-1], "meta_info", "finish_reason", "type") == "length"
        assert all("index" not in event for event in events)

    run_generate(tmp_path, story)


def test_streamed_batches_tell_the_index_and_end_each(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        events = await post_stream(
            rig, "/generate", {"input_ids": [[10], [20]], "sampling_params": GREEDY}
        )
        for index, prompt in enumerate(([10], [20])):
            own = [event for event in events if event["index"] == index]
            assert own[-1]["output_ids"] == counted_up(prompt, 4)
            ended = [at(event, "meta_info", "finish_reason") is not None for event in own]
            assert ended == [False] * (len(own) - 1) + [True]

    run_generate(tmp_path, story)


def test_a_streamed_character_is_never_taken_back(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        text = "naïve 🚀 你 好"
        rig.scheduler.answer = say_text(text)
        rig.scheduler.holds = True
        params: JsonObject = {"max_new_tokens": 64}
        body: JsonObject = {"text": "a", "sampling_params": params}
        async with serve_http(rig) as served:
            request = served.http.stream("POST", "/generate", json={**body, "stream": True})
            asked = asyncio.create_task(request.__aenter__())
            await rig.until(lambda s: len(s.held) == 1)
            (submit,) = rig.scheduler.held.values()
            steps = rig.scheduler.answer(submit)
            rig.scheduler.send(steps[0])
            lines = (await asked).aiter_lines()
            shown = [json.loads((await anext(lines))[6:])]
            for step in steps[1:]:
                rig.scheduler.send(step)
                await anext(lines)  # the empty line between events
                shown.append(json.loads((await anext(lines))[6:]))
            await request.__aexit__(None, None, None)
        assert [len(at(item, "output_ids")) for item in shown] == [  # type: ignore[arg-type]
            i + 1 for i in range(len(steps))
        ]
        assert shown[-1]["text"] == text
        assert all(text.startswith(item["text"]) for item in shown)

    run_generate(tmp_path, story)


# ---- stop ----------------------------------------------------------------------------------------


def test_a_stop_string_across_tokens_ends_the_text_and_the_work(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        steps = say_text("one STOP two")
        rig.scheduler.holds = True
        params: JsonObject = {"stop": ["STOP"], "max_new_tokens": 64}
        asked = asyncio.create_task(
            post_object(rig, "/generate", {"text": "a", "sampling_params": params})
        )
        await rig.until(lambda s: len(s.held) == 1)
        (submit,) = rig.scheduler.held.values()
        for message in steps(submit)[:-1]:
            rig.scheduler.send(message)
        reply = await asked
        assert reply["text"] == "one "
        assert at(reply, "meta_info", "finish_reason") == {"type": "stop", "matched": "STOP"}
        (cancel,) = rig.scheduler.cancels
        assert cancel.request_id == submit.request_id
        taken = TOKENIZER.decode(reply["output_ids"])  # type: ignore[arg-type]
        assert taken.endswith("STOP"), "tokens after the match do not count"
        assert at(reply, "meta_info", "timeline", "status") == "ok"
        text = (await rig.http.get("/metrics")).text
        assert "e2e_request_latency_seconds_count{" in text

    run_generate(tmp_path, story)


@pytest.mark.parametrize(
    ("params", "text", "matched"),
    [
        ({"stop": "STOP"}, "a ", "STOP"),
        ({"stop": "STOP", "no_stop_trim": True}, "a STOP", "STOP"),
        ({"stop": ["b", "STOP b"]}, "a ", "STOP b"),
        ({"stop": "nowhere"}, "a STOP b", None),
        ({"stop": "STOP b and more"}, "a STOP b", None),
        ({"stop": "a", "min_new_tokens": 3}, "a STOP b", None),
    ],
)
@pytest.mark.parametrize("is_streaming", [False, True])
def test_stop_strings_cut_where_they_should(
    params: JsonObject, text: str, matched: str | None, is_streaming: bool, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text("a STOP b")
        body: JsonObject = {"text": "a", "sampling_params": {"max_new_tokens": 64, **params}}
        if is_streaming:
            events = await post_stream(rig, "/generate", body)
            assert all(text.startswith(str(event["text"])) for event in events)
            reply = events[-1]
        else:
            reply = await post_object(rig, "/generate", body)
        assert reply["text"] == text
        reason = at(reply, "meta_info", "finish_reason")
        assert isinstance(reason, dict)
        assert reason.get("matched") == matched
        assert reason["type"] == ("length" if matched is None else "stop")

    run_generate(tmp_path, story)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "hi"),
        ({"skip_special_tokens": False}, "hi"),
        ({"skip_special_tokens": False, "no_stop_trim": True}, "hi<|im_end|>"),
    ],
)
def test_the_token_that_ends_the_text_is_no_part_of_it(
    params: JsonObject, text: str, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        (end,) = TOKENIZER.encode("<|im_end|>")
        finish = FinishReason(FinishKind.STOP, matched=end)
        rig.scheduler.answer = say_text("hi<|im_end|>", finish)
        reply = await post_object(rig, "/generate", {"text": "a", "sampling_params": params})
        assert reply["text"] == text
        assert at(reply, "meta_info", "finish_reason") == {"type": "stop", "matched": end}
        assert at(reply, "output_ids", -1) == end, "it was generated all the same"

    run_generate(tmp_path, story)


# ---- log-probabilities ---------------------------------------------------------------------------


def test_log_probabilities_have_sglang_s_shapes(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {
            "input_ids": [8, 16],
            "sampling_params": {"max_new_tokens": 2},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 1,
            "token_ids_logprob": [24],
            "return_text_in_logprobs": True,
        }
        meta = at(await post_object(rig, "/generate", body), "meta_info")
        assert isinstance(meta, dict)
        text = TOKENIZER.token_text
        assert meta["input_token_logprobs"] == [[None, 8, text(8)], [-2.0, 16, text(16)]]
        outputs = counted_up([16], 2)
        assert meta["output_token_logprobs"] == [[-t / 8, t, text(t)] for t in outputs]
        assert meta["output_token_logprobs_length"] == 2
        assert meta["input_top_logprobs"] == [None, [[0.0, 0, text(0)]]]
        assert meta["output_top_logprobs"] == [[[0.0, 0, text(0)]]] * 2
        assert meta["input_token_ids_logprobs"] == [None, [[-3.0, 24, text(24)]]]
        assert meta["output_token_ids_logprobs"] == [[[-3.0, 24, text(24)]]] * 2

    run_generate(tmp_path, story)


def test_log_probabilities_of_the_output_only_have_no_texts_unless_asked(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {
            "input_ids": [8],
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
        }
        (event,) = await post_stream(rig, "/generate", body)
        meta = at(event, "meta_info")
        assert isinstance(meta, dict)
        assert meta["input_token_logprobs"] == []
        assert meta["output_token_logprobs"] == [[-9 / 8, 9, None]]
        assert "input_top_logprobs" not in meta

    run_generate(tmp_path, story)


def test_no_output_may_be_asked_for(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {
            "input_ids": [8, 16],
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        reply = await post_object(rig, "/generate", body)
        assert (reply["text"], reply["output_ids"]) == ("", [])
        assert at(reply, "meta_info", "completion_tokens") == 0
        assert at(reply, "meta_info", "finish_reason") == {"type": "length", "length": 0}
        assert at(reply, "meta_info", "input_token_logprobs", 1, 0) == -2.0
        assert at(reply, "meta_info", "output_token_logprobs") == []

    run_generate(tmp_path, story)


# ---- roles ---------------------------------------------------------------------------------------


def test_a_prefill_server_refuses_a_plain_request(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for extra in ({}, {"stream": True}):
            reply = await post_object(rig, "/generate", {"text": "a", **extra}, 400)
            assert "decode server" in str(at(reply, "error", "message"))
        assert rig.scheduler.submits == []

    run_generate(tmp_path, story, role=Role.PREFILL)


def test_log_probabilities_that_can_not_be_read_are_an_error_of_their_request(
    tmp_path: Path,
) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = lambda submit: [
            Tokens(submit.request_id, [5], prompt_logprobs=[b"\xc1"])
        ]
        body: JsonObject = {"input_ids": [8], "return_logprob": True, "logprob_start_len": 0}
        reply = await post_object(rig, "/generate", body, 500)
        assert "log-probabilities can't be read" in str(at(reply, "error", "message"))
        rig.scheduler.answer = count_up
        await post_object(rig, "/generate", {"input_ids": [8]})

    run_generate(tmp_path, story)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_prefill_server_answers_one_token_and_ends_its_body(
    is_streaming: bool, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        (end,) = TOKENIZER.encode("<|im_end|>")

        def answer(submit: Submit) -> list[ToldFrontend]:
            (message,) = count_up(submit)
            assert isinstance(message, Tokens)
            stop = FinishReason(FinishKind.STOP, matched=end)
            return [
                Tokens(
                    submit.request_id,
                    message.token_ids,
                    logprobs=message.logprobs,
                    prompt_logprobs=message.prompt_logprobs,
                    finish=stop,
                )
            ]

        rig.scheduler.answer = answer
        body: JsonObject = {
            "input_ids": [8, 16],
            "sampling_params": {"max_new_tokens": 50},
            "return_logprob": True,
            "logprob_start_len": 0,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": 9000,
            "bootstrap_room": 2**63 - 1,
        }
        if is_streaming:
            (reply,) = await post_stream(rig, "/generate", body)
        else:
            reply = await post_object(rig, "/generate", body)
        assert reply["output_ids"] == counted_up([16], 1)
        assert at(reply, "meta_info", "finish_reason") == {"type": "length", "length": 1}
        assert at(reply, "meta_info", "input_token_logprobs") == []
        (submit,) = rig.scheduler.submits
        assert submit.sampling.max_new_tokens == 1
        assert submit.sampling.logprob_start_len == 0, "the decode server tells of them"
        assert submit.bootstrap is not None and submit.bootstrap.room == 2**63 - 1

    run_generate(tmp_path, story, role=Role.PREFILL)


def test_a_decode_server_passes_the_room_on(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {"input_ids": [[5], [6]], "sampling_params": {"max_new_tokens": 1}}
        await post(rig, "/generate", {**body, "bootstrap_room": 7})
        rooms = [submit.bootstrap for submit in rig.scheduler.submits]
        assert [(b.host, b.port, b.room) for b in rooms if b] == [
            ("127.0.0.1", 8998, 7),
            ("127.0.0.1", 8998, 8),
        ]

    run_generate(tmp_path, story)
