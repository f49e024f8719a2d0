"""Log-probabilities in the OpenAI APIs: vLLM's fields beside OpenAI's own."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from common.frontend.apis.openai_api import parse_completion
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.bodies.sample import Limits
from common.protocol.codec import decode_logprobs, encode_logprobs
from common.protocol.frontend import Submit, Tokens, ToldFrontend
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import TOKENIZER, at, post, post_object, post_stream, run_generate
from tests.frontend.scripted_scheduler import count_up

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES: JsonValue = [{"role": "user", "content": "hi"}]
text = TOKENIZER.token_text


def ranked_by_id(submit: Submit) -> list[ToldFrontend]:
    """Counts up, and tells a rank for every token of the prompt: one more than its id."""
    told = count_up(submit)
    for index, message in enumerate(told):
        if isinstance(message, Tokens) and message.prompt_logprobs:
            entries = [one for part in message.prompt_logprobs for one in decode_logprobs(part)]
            ranked = [msgspec.structs.replace(one, rank=one.token_id + 1) for one in entries]
            chunk = encode_logprobs(ranked)
            told[index] = msgspec.structs.replace(message, prompt_logprobs=[chunk])
    return told


def vllm_prompt_logprobs(ids: list[int], count: int) -> list[JsonValue]:
    """Of a prompt for which the scripted scheduler says that token t has the value -t / 8."""

    def one(token_id: int, rank: int) -> JsonObject:
        return {"logprob": -token_id / 8, "rank": rank, "decoded_token": text(token_id)}

    return [
        None,
        *({str(t): one(t, t + 1)} | {str(i): one(i, i + 1) for i in range(count)} for t in ids[1:]),
    ]


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_prompt_logprobs_of_a_completion_are_vllm_s(
    count: int, logprobs: int | None, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = ranked_by_id
        ids = [[5, 6, 7], [8, 9]]
        body: JsonObject = {
            "prompt": [*ids],
            "max_tokens": 2,
            "prompt_logprobs": count,
            "logprobs": logprobs,
            "n": 2,
        }
        reply = await post_object(rig, COMPLETIONS, body)
        for index in range(4):
            told = at(reply, "choices", index, "prompt_logprobs")
            assert told == vllm_prompt_logprobs(ids[index // 2], count)
            output = at(reply, "choices", index, "logprobs")
            if logprobs is None:
                assert output is None, "nobody asked for those of the output"
            else:
                assert isinstance(output, dict)
                assert len(output["tokens"]) == 2, (
                    "the prompt is not part of an output without echo"
                )
                assert all(len(top) == 2 for top in output["top_logprobs"]), (
                    "the token and one more"
                )

    run_generate(tmp_path, story)


def test_prompt_logprobs_of_a_chat_stand_beside_its_choices(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = ranked_by_id
        body: JsonObject = {"messages": MESSAGES, "max_tokens": 2, "prompt_logprobs": 1}
        reply = await post_object(rig, CHAT, body)
        (submit,) = rig.scheduler.submits
        assert reply["prompt_logprobs"] == vllm_prompt_logprobs(submit.token_ids, 1)
        assert at(reply, "choices", 0, "logprobs") is None

    run_generate(tmp_path, story)


def test_a_prefill_server_of_an_older_release_tells_no_ranks(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {"prompt": [5, 6], "max_tokens": 1, "prompt_logprobs": 0}
        reply = await post_object(rig, COMPLETIONS, body)
        (_, second) = at(reply, "choices", 0, "prompt_logprobs")  # type: ignore[misc]
        assert at(second, "6", "rank") is None

    run_generate(tmp_path, story)


@pytest.mark.parametrize("is_chat", [False, True])
def test_logprob_token_ids_are_told_of_instead_of_likely_tokens(
    is_chat: bool, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        asked: JsonObject = {"logprob_token_ids": [30, 31, 30], "max_tokens": 2}
        if is_chat:
            body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, **asked}
            reply = await post_object(rig, CHAT, body)
            entries = at(reply, "choices", 0, "logprobs", "content")
            assert isinstance(entries, list) and len(entries) == 2
            for entry in entries:
                tops = at(entry, "top_logprobs")
                assert [(at(top, "token"), at(top, "logprob")) for top in tops] == [  # type: ignore[union-attr]
                    (text(30), -30 / 8), (text(31), -31 / 8)
                ]  # fmt: skip
            return
        body = {"prompt": [8], "logprobs": 3, **asked}
        reply = await post_object(rig, COMPLETIONS, body)
        tops = at(reply, "choices", 0, "logprobs", "top_logprobs")
        others = {text(30): -30 / 8, text(31): -31 / 8}
        assert tops == [{**others, text(9): -9 / 8}, {**others, text(10): -10 / 8}]

    run_generate(tmp_path, story)


@pytest.mark.parametrize("is_chat", [False, True])
def test_tokens_may_be_told_as_ids(is_chat: bool, tmp_path: Path) -> None:
    """What has no text of its own, as half of a character, is told apart so."""

    async def story(rig: Rig) -> None:
        asked: JsonObject = {"return_tokens_as_token_ids": True, "max_tokens": 1}
        if is_chat:
            body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **asked}
            entry = at(await post_object(rig, CHAT, body), "choices", 0, "logprobs", "content", 0)
            (submit,) = rig.scheduler.submits
            own = submit.token_ids[-1] + 1
            assert at(entry, "token") == f"token_id:{own}"
            assert at(entry, "bytes") == list(TOKENIZER.token_bytes(own))
            assert [at(entry, "top_logprobs", i, "token") for i in (0, 1)] == [
                "token_id:0", "token_id:1"
            ]  # fmt: skip
            return
        body = {"prompt": [7, 8], "logprobs": 2, "echo": True, **asked}
        logprobs = at(await post_object(rig, COMPLETIONS, body), "choices", 0, "logprobs")
        assert at(logprobs, "tokens") == ["token_id:7", "token_id:8", "token_id:9"]
        assert at(logprobs, "top_logprobs", 2) == {
            "token_id:0": 0.0, "token_id:1": -1 / 8, "token_id:9": -9 / 8
        }  # fmt: skip

    run_generate(tmp_path, story)


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs=1: must be absent"),
        (COMPLETIONS, {"prompt_logprobs": 129}, "prompt_logprobs=129"),
        (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs=-1: must be 0..128: -1 stands for"),
        (COMPLETIONS, {"prompt_logprobs": -2}, "prompt_logprobs=-2"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs=-1: must be 0..128: -1 stands for all tokens"),
        (COMPLETIONS, {"logprob_token_ids": [5]}, "logprob_token_ids=[5]: must be absent"),
        (COMPLETIONS, {"logprob_token_ids": [], "logprobs": 1}, "logprob_token_ids=[]"),
        (COMPLETIONS, {"logprob_token_ids": [400], "logprobs": 1}, "logprob_token_ids[0]=400"),
        (
            COMPLETIONS,
            {"logprob_token_ids": [5], "logprobs": 1, "echo": True, "max_tokens": 0},
            "logprob_token_ids=[5]: must be absent",
        ),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs=-1: must be 0..128"),
        (CHAT, {"top_logprobs": -1}, "top_logprobs=-1: must be absent, since logprobs is not"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs=21"),
        (CHAT, {"logprob_token_ids": [5]}, "logprob_token_ids=[5]: must be absent"),
        (CHAT, {"prompt_logprobs": True}, "prompt_logprobs=true"),
    ],
)
def test_what_is_not_told_is_refused_by_name(
    path: str, fields: JsonObject, said: str, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        base: JsonObject = {"prompt": "a"} if path == COMPLETIONS else {"messages": MESSAGES}
        reply = await post(rig, path, {**base, **fields}, 400)
        assert said in str(at(reply, "error", "message"))

    run_generate(tmp_path, story)


def test_minus_one_is_all_tokens_of_a_small_vocabulary() -> None:
    limits = Limits(100, 64, is_prefill=False, model_names=("tiny",))
    for fields in ({"logprobs": -1}, {"prompt_logprobs": -1}, {"logprobs": -1, "echo": True}):
        body: JsonObject = {"prompt": [8], **fields}  # type: ignore[dict-item]
        call, _ = parse_completion(body, TOKENIZER, limits, "name")
        assert call.samples[0].sampling.top_logprobs_num == 100


def test_a_stream_tells_logprobs_of_the_output_alone_as_ids(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {
            "prompt": [8], "max_tokens": 3, "logprobs": 0, "return_tokens_as_token_ids": True
        }  # fmt: skip
        told: list[object] = []
        for event in await post_stream(rig, COMPLETIONS, body):
            tokens = at(event, "choices", 0, "logprobs", "tokens")
            assert isinstance(tokens, list)
            told += tokens
        assert told == [f"token_id:{9 + i}" for i in range(3)]

    run_generate(tmp_path, story)
