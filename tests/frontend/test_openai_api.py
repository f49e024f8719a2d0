"""/v1/completions answers in OpenAI's shapes, with the log-probabilities harnesses score by."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import Role
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.request import FinishKind, FinishReason
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import (
    TOKENIZER,
    at,
    counted_text,
    counted_up,
    post_object,
    post_stream,
    run_generate,
    say_text,
)

PATH = "/v1/completions"


def test_a_completion_has_openai_s_fields(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        prompt = TOKENIZER.encode("hello")
        reply = await post_object(rig, PATH, {"model": "tiny", "prompt": "hello", "max_tokens": 3})
        assert str(reply["id"]).startswith("cmpl-")
        assert reply["object"] == "text_completion"
        assert reply["model"] == "tiny"
        assert isinstance(reply["created"], int)
        assert reply["choices"] == [
            {
                "index": 0,
                "text": counted_text(prompt, 3),
                "logprobs": None,
                "finish_reason": "length",
                "matched_stop": None,
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ]
        assert reply["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 3,
            "total_tokens": len(prompt) + 3,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
            "reasoning_tokens": 0,
        }

    run_generate(tmp_path, story)


@pytest.mark.parametrize(
    ("prompt", "prompt_ids"),
    [
        ("ab", [TOKENIZER.encode("ab")]),
        (["ab", "c"], [TOKENIZER.encode("ab"), TOKENIZER.encode("c")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["ab"], [TOKENIZER.encode("ab")]),
        ([[5]], [[5]]),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_every_form_of_prompt_is_answered_in_order(
    prompt: JsonValue, prompt_ids: list[list[int]], n: int, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        reply = await post_object(rig, PATH, {"prompt": prompt, "n": n, "max_tokens": 2})
        texts = [
            (at(reply, "choices", i, "index"), at(reply, "choices", i, "text"))
            for i in range(len(prompt_ids) * n)
        ]
        expected = [counted_text(ids, 2) for ids in prompt_ids for _ in range(n)]
        assert texts == list(enumerate(expected))
        total = sum(map(len, prompt_ids))
        assert at(reply, "usage", "prompt_tokens") == total, "a prompt counts once"
        assert at(reply, "usage", "completion_tokens") == len(prompt_ids) * n * 2

    run_generate(tmp_path, story)


def test_options_of_both_openai_and_sglang_reach_the_engine(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {
            "prompt": "a",
            "max_tokens": 9,
            "min_tokens": 2,
            "seed": 1234,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "logit_bias": {"7": 3},
            "ignore_eos": True,
            "stop_token_ids": [9],
            "logprobs": 2,
            "user": "somebody",
            "best_of": 1,
            "kv_transfer_params": None,
            "response_format": {"type": "text"},
            "unknown_key": 1,
        }
        await post_object(rig, PATH, body)
        (submit,) = rig.scheduler.submits
        sampling = submit.sampling
        assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.seed) == (9, 2, 1234)
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
        assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.5)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
        assert (sampling.logit_bias, sampling.ignore_eos) == ({7: 3.0}, True)
        assert sampling.stop_token_ids == (9,)
        assert (sampling.return_logprob, sampling.top_logprobs_num) == (True, 2)
        assert sampling.logprob_start_len == -1

    run_generate(tmp_path, story)


def test_max_tokens_defaults_to_sixteen(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        reply = await post_object(rig, PATH, {"prompt": "a"})
        assert at(reply, "usage", "completion_tokens") == 16

    run_generate(tmp_path, story)


@pytest.mark.parametrize(
    ("text", "extra", "shown", "reason", "matched"),
    [
        ("a STOP b", {"stop": ["STOP", "x"]}, "a ", "stop", "STOP"),
        ("a STOP b", {"stop": "STOP", "include_stop_str_in_output": True}, "a STOP", "stop",
         "STOP"),
        ("a STOP b", {"stop": None}, "a STOP b", "length", None),
    ],
)  # fmt: skip
def test_stop_strings_are_told_of(
    text: str, extra: JsonObject, shown: str, reason: str, matched: str | None, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text(text)
        reply = await post_object(rig, PATH, {"prompt": "a", "max_tokens": 64, **extra})
        choice = at(reply, "choices", 0)
        assert isinstance(choice, dict)
        told = (choice["text"], choice["finish_reason"], choice["matched_stop"])
        assert told == (shown, reason, matched)

    run_generate(tmp_path, story)


def test_a_stop_token_is_told_of(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        (end,) = TOKENIZER.encode("<|im_end|>")
        rig.scheduler.answer = say_text("hi<|im_end|>", FinishReason(FinishKind.STOP, matched=end))
        reply = await post_object(rig, PATH, {"prompt": "a"})
        choice = at(reply, "choices", 0)
        assert isinstance(choice, dict)
        assert (choice["text"], choice["finish_reason"]) == ("hi", "stop")
        assert choice["matched_stop"] == end

    run_generate(tmp_path, story)


# ---- echo and log-probabilities ------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["hello world", TOKENIZER.encode("hello world")])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_harness_can_score_a_prompt(prompt: JsonValue, max_tokens: int, tmp_path: Path) -> None:
    """Echo with log-probabilities: entry 0 is null, the rest are the prompt's, then the output."""

    async def story(rig: Rig) -> None:
        ids = TOKENIZER.encode("hello world")
        body: JsonObject = {
            "prompt": [prompt],
            "max_tokens": max_tokens,
            "logprobs": 1,
            "echo": True,
            "seed": 1234,
            "temperature": 0,
        }
        reply = await post_object(rig, PATH, body)
        choice = at(reply, "choices", 0)
        assert isinstance(choice, dict)
        output = counted_up(ids, max_tokens)
        assert choice["text"] == "hello world" + TOKENIZER.decode(output)
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == [None, *(-t / 8 for t in [*ids[1:], *output])]
        assert logprobs["tokens"] == [TOKENIZER.token_text(t) for t in [*ids, *output]]
        assert logprobs["top_logprobs"][0] is None
        first = TOKENIZER.token_text(0)
        for token, top in zip([*ids[1:], *output], logprobs["top_logprobs"][1:], strict=True):
            assert top == {first: 0.0, TOKENIZER.token_text(token): -token / 8}
        offsets = logprobs["text_offset"]
        for offset, token in zip(offsets, logprobs["tokens"], strict=True):
            assert choice["text"][offset:].startswith(token)
        assert at(reply, "usage", "completion_tokens") == max_tokens

    run_generate(tmp_path, story)


def test_log_probabilities_may_be_of_the_tokens_alone(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        reply = await post_object(rig, PATH, {"prompt": [8], "max_tokens": 2, "logprobs": 0})
        logprobs = at(reply, "choices", 0, "logprobs")
        assert isinstance(logprobs, dict)
        assert logprobs["token_logprobs"] == [-9 / 8, -10 / 8]
        tops = [{TOKENIZER.token_text(t): -t / 8} for t in (9, 10)]
        assert logprobs["top_logprobs"] == tops, "as in vLLM, each token is likely itself"

    run_generate(tmp_path, story)


def test_log_probabilities_stop_where_the_text_is_cut(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text("a STOP b")
        body: JsonObject = {"prompt": "a", "max_tokens": 64, "logprobs": 0, "stop": "STOP"}
        whole = at(await post_object(rig, PATH, body), "choices", 0)
        assert isinstance(whole, dict)
        tokens = whole["logprobs"]["tokens"]
        assert whole["text"] == "a "
        assert "".join(tokens).startswith("a "), "every token that shows is told of"
        assert len("".join(tokens[:-1])) < len("a "), "and none that does not"
        streamed: list[object] = []
        for event in await post_stream(rig, PATH, body):
            logprobs = at(event, "choices", 0, "logprobs")
            assert isinstance(logprobs, dict)
            streamed += logprobs["tokens"]
        assert streamed == tokens

    run_generate(tmp_path, story)


# ---- streams -------------------------------------------------------------------------------------


def texts_by_index(events: list[JsonObject]) -> dict[object, str]:
    texts: dict[object, str] = {}
    for event in events:
        choices = event["choices"]
        assert isinstance(choices, list)
        for choice in choices:
            index = at(choice, "index")
            texts[index] = texts.get(index, "") + str(at(choice, "text"))
    return texts


def test_a_stream_adds_up_and_has_no_usage_unless_asked(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {"prompt": [[10], [20]], "n": 2, "max_tokens": 4}
        events = await post_stream(rig, PATH, body)
        assert texts_by_index(events) == {
            i: counted_text([10] if i < 2 else [20], 4) for i in range(4)
        }
        assert len({str(event["id"]) for event in events}) == 1
        assert all(event["object"] == "text_completion" for event in events)
        assert all(event["choices"] and "usage" not in event for event in events)
        reasons = [at(event, "choices", 0, "finish_reason") for event in events]
        assert reasons.count("length") == 4 and set(reasons) <= {None, "length"}

    run_generate(tmp_path, story)


def test_usage_comes_last_in_a_chunk_of_its_own(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {"prompt": [10], "max_tokens": 4, "ignore_eos": True}
        body["stream_options"] = {"include_usage": True}
        *chunks, last = await post_stream(rig, PATH, body)
        assert last["choices"] == []
        assert at(last, "usage", "total_tokens") == 5
        assert all(chunk["usage"] is None for chunk in chunks)
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last = await post_stream(rig, PATH, body)
        counts = [at(chunk, "usage", "completion_tokens") for chunk in chunks]
        assert counts == sorted(counts, key=str) and counts[-1] == 4
        assert at(last, "usage", "completion_tokens") == 4

    run_generate(tmp_path, story)


def test_a_streamed_echo_begins_with_the_prompt(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {"prompt": "hello", "max_tokens": 2, "echo": True, "logprobs": 0}
        events = await post_stream(rig, PATH, body)
        ids = TOKENIZER.encode("hello")
        assert texts_by_index(events) == {0: "hello" + counted_text(ids, 2)}
        told: list[object] = []
        for event in events:
            logprobs = at(event, "choices", 0, "logprobs")
            assert isinstance(logprobs, dict)
            told += logprobs["token_logprobs"]
        assert told == [None, *(-t / 8 for t in [*ids[1:], *counted_up(ids, 2)])]

    run_generate(tmp_path, story)


def test_x_request_id_is_part_of_the_id_and_rid_is_the_id(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        reply = await rig.http.post(PATH, json={"prompt": "a"}, headers={"X-Request-Id": "b-1"})
        assert reply.json()["id"].startswith("cmpl-b-1-")
        assert (await post_object(rig, PATH, {"prompt": "a", "rid": "mine"}))["id"] == "mine"

    run_generate(tmp_path, story)


def test_a_prefill_server_wants_a_room_and_answers_one_token(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        refused = await post_object(rig, PATH, {"prompt": "a"}, 400)
        assert at(refused, "error", "param") == "bootstrap_room"
        body: JsonObject = {
            "prompt": ["a", "b"],
            "max_tokens": 9,
            "bootstrap_host": ["h", "h"],
            "bootstrap_port": [1, 2],
            "bootstrap_room": [3, 4],
        }
        reply = await post_object(rig, PATH, body)
        assert at(reply, "usage", "completion_tokens") == 2
        assert [s.bootstrap.room for s in rig.scheduler.submits if s.bootstrap] == [3, 4]

    run_generate(tmp_path, story, role=Role.PREFILL)


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_token_ids_are_told_where_they_are_asked_for(tmp_path: Path, path: str) -> None:
    async def story(rig: Rig) -> None:
        is_chat = path != PATH
        asked: JsonObject = {"max_tokens": 5, "n": 2, "return_token_ids": True}
        ask: JsonValue = [{"role": "user", "content": "a"}] if is_chat else "a"
        body: JsonObject = {**asked, "messages" if is_chat else "prompt": ask}
        reply = await post_object(rig, path, body)
        prompt_ids = rig.scheduler.submits[-1].token_ids
        output_ids = counted_up(prompt_ids, 5)
        for index in range(2):
            assert at(reply, "choices", index, "token_ids") == output_ids
            told = reply if is_chat else at(reply, "choices", index)
            assert at(told, "prompt_token_ids") == prompt_ids
        events = await post_stream(rig, path, body)
        for index in range(2):
            own = [event for event in events if at(event, "choices", 0, "index") == index]
            ids = [at(event, "choices", 0, "token_ids") for event in own]
            assert [i for some in ids if isinstance(some, list) for i in some] == output_ids
            places = [event if is_chat else at(event, "choices", 0) for event in own]
            assert [
                place["prompt_token_ids"]
                for place in places
                if isinstance(place, dict) and "prompt_token_ids" in place
            ] == [prompt_ids]

    run_generate(tmp_path, story)
