"""Fields that say how a prompt becomes tokens, and what a reply tells beside its text: vLLM's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.config import Role
from common.frontend.bodies.fields import JsonObject, JsonValue
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

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
MESSAGES: JsonValue = [{"role": "user", "content": "hello world, the end"}]
WHOLE = [*range(5, 25)]


# ---- how a prompt becomes tokens -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 4}, WHOLE[-4:]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, WHOLE[:4]),
        ({"truncate_prompt_tokens": 20}, WHOLE),
        ({"truncate_prompt_tokens": 511}, WHOLE),
        ({"truncate_prompt_tokens": None}, WHOLE),
        ({"truncate_prompt_tokens": -1}, WHOLE),
    ],
)
def test_a_prompt_is_cut_to_its_last_tokens(
    fields: JsonObject, kept: list[int], tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        await post_object(rig, COMPLETIONS, {"prompt": [*WHOLE], "max_tokens": 2, **fields})
        (submit,) = rig.scheduler.submits
        assert submit.token_ids == kept

    run_generate(tmp_path, story)


def test_minus_one_leaves_room_for_the_output_and_an_echo_is_of_what_is_left(
    tmp_path: Path,
) -> None:
    async def story(rig: Rig) -> None:
        words = "hello world " * 300  # given: longer than the context of 512
        body: JsonObject = {"prompt": words, "max_tokens": 12, "echo": True}
        assert "at most 511" in str(await post(rig, COMPLETIONS, body, 400))
        body["truncate_prompt_tokens"] = -1
        reply = await post_object(rig, COMPLETIONS, body)
        (submit,) = rig.scheduler.submits
        kept = TOKENIZER.encode(words)[-500:]
        assert submit.token_ids == kept
        assert at(reply, "usage", "prompt_tokens") == 500
        told = at(reply, "choices", 0, "text")
        assert told == TOKENIZER.decode(kept) + counted_text(kept, 12)

    run_generate(tmp_path, story)


def test_a_chat_is_cut_behind_its_template(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {"messages": MESSAGES, "max_tokens": 2}
        await post_object(rig, CHAT, body)
        await post_object(rig, CHAT, {**body, "truncate_prompt_tokens": 6})
        whole, cut = (submit.token_ids for submit in rig.scheduler.submits)
        assert cut == whole[-6:] and len(whole) > 6

    run_generate(tmp_path, story)


@pytest.mark.parametrize("count", [0, -2, 512, True, "4", 2.0])
def test_a_count_that_can_not_be_kept_is_refused(count: JsonValue, tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {"prompt": [5, 6], "truncate_prompt_tokens": count}
        reply = await post(rig, COMPLETIONS, body, 400)
        assert at(reply, "error", "param") == "truncate_prompt_tokens"

    run_generate(tmp_path, story)


def test_special_tokens_are_added_as_the_body_says(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        encoded: list[tuple[str, bool]] = []
        encode = rig.context.tokenizer.encode

        def note(text: str, *, add_special_tokens: bool = True) -> list[int]:
            encoded.append((text, add_special_tokens))
            return encode(text, add_special_tokens=add_special_tokens)

        rig.context.tokenizer.encode = note  # type: ignore[method-assign]
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})):
            for given in (None, False, True):
                fields: JsonObject = {**body, "max_tokens": 1, "add_special_tokens": given}  # type: ignore[dict-item]
                await post_object(rig, path, fields)
        assert [has_special for _, has_special in encoded] == [
            True, False, True, False, False, True
        ]  # fmt: skip

    run_generate(tmp_path, story)


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        (COMPLETIONS, {"prompt": "hello"}),
        (COMPLETIONS, {"prompt": ["hello"]}),
        (COMPLETIONS, {"prompt": [[7, 7]]}),
        (CHAT, {"messages": MESSAGES}),
        (GENERATE, {"text": "hello"}),
    ],
)
def test_a_computed_prompt_is_not_made_tokens_of_again(
    path: str, prompt: JsonObject, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        def encode(text: str, **_: object) -> list[int]:
            raise AssertionError("the tokens are known")

        rig.context.tokenizer.encode = encode  # type: ignore[method-assign]
        params: JsonObject = {
            "do_remote_prefill": True,
            "remote_engine_id": "abc",
            "remote_request_id": "7",
            "remote_host": "127.0.0.1",
            "prompt_token_ids": [5, 6, 7],
        }
        await post(rig, path, {**prompt, "kv_transfer_params": params})
        (submit,) = rig.scheduler.submits
        assert submit.token_ids == [5, 6, 7]
        assert submit.bootstrap is not None and submit.bootstrap.room == 7

    run_generate(tmp_path, story)


@pytest.mark.parametrize(
    ("prompt", "ids", "said"),
    [
        (["a", "b"], [5], "prompt=["),
        ("a", [400], "kv_transfer_params.prompt_token_ids[0]=400"),
        ("a", "5", "kv_transfer_params.prompt_token_ids"),
        ("a", [5] * 512, "kv_transfer_params.prompt_token_ids: the prompt has 512 tokens"),
    ],
)
def test_tokens_of_another_prompt_are_refused(
    prompt: JsonValue, ids: JsonValue, said: str, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {"prompt": prompt, "kv_transfer_params": {"prompt_token_ids": ids}}
        assert said in str(at(await post(rig, COMPLETIONS, body, 400), "error", "message"))

    run_generate(tmp_path, story)


# ---- what a reply tells beside its text ----------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_with_token_ids_has_an_event_for_each_step_also_without_text(
    path: str, tmp_path: Path
) -> None:
    """As in vLLM. The next token is drawn only when the event of the one before has come."""
    ids = TOKENIZER.encode("a𐍈b", add_special_tokens=False)
    assert len(ids) > 5, "given: a character of several tokens"

    async def story(rig: Rig) -> None:
        left: list[int] = [*ids]

        def draw_next(submit: Submit) -> list[ToldFrontend]:
            token_id = left.pop(0)
            finish = None if left else FinishReason(FinishKind.LENGTH)
            return [Tokens(submit.request_id, [token_id], finish=finish)]

        rig.scheduler.answer = draw_next
        prompt: JsonObject = {"prompt": [8]} if path == COMPLETIONS else {"messages": MESSAGES}
        body: JsonObject = {**prompt, "max_tokens": 64, "return_token_ids": True, "stream": True}
        told: list[list[int]] = []
        async with serve_http(rig) as served, served.http.stream("POST", path, json=body) as reply:
            (submit,) = rig.scheduler.submits
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                new_ids = json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                if new_ids:
                    told.append(new_ids)
                if new_ids and left:
                    rig.scheduler.send(draw_next(submit)[0])
        assert told == [[token_id] for token_id in ids]

    run_generate(tmp_path, story)


@pytest.mark.parametrize(
    ("options", "has_running", "has_last"),
    [
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"include_usage": True}, False, True),
        ({"continuous_usage_stats": True}, True, False),  # SGLang's; vLLM has none
    ],
)
def test_a_stream_whose_client_wants_no_usage_has_none(
    options: JsonObject, has_running: bool, has_last: bool, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {"prompt": [8], "max_tokens": 3, "stream_options": options}
        events = await post_stream(rig, COMPLETIONS, body)
        assert (not events[-1]["choices"]) == has_last
        chunks = events[:-1] if has_last else events
        assert [bool(chunk.get("usage")) for chunk in chunks] == [has_running] * len(chunks)

    run_generate(tmp_path, story)


ASSISTANT: JsonValue = {"role": "assistant", "content": "well, "}
PARTS: JsonValue = {
    "role": "assistant",
    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
}


@pytest.mark.parametrize(
    ("last", "fields", "echo"),
    [
        (ASSISTANT, {"continue_final_message": True}, "well, "),
        (ASSISTANT, {}, "well, "),
        ({"role": "user", "content": "hello"}, {}, ""),
        ({"role": "user", "content": "hello"}, {"continue_final_message": True}, "hello"),
    ],
)
def test_echo_of_a_chat_is_the_last_message_of_the_same_role(
    last: JsonValue, fields: JsonObject, echo: str, tmp_path: Path
) -> None:
    """As vLLM has it."""

    async def story(rig: Rig) -> None:
        rig.scheduler.answer = say_text("then")
        body: JsonObject = {"messages": [last], "max_tokens": 64, "echo": True, **fields}
        reply = await post_object(rig, CHAT, body)
        assert at(reply, "choices", 0, "message", "content") == f"{echo}then"
        events = await post_stream(rig, CHAT, body)
        deltas = [at(event, "choices", 0, "delta") for event in events]
        said = [delta.get("content") for delta in deltas if isinstance(delta, dict)]
        assert "".join(filter(None, map(str, filter(None, said)))) == f"{echo}then"
        silent = await post_object(rig, CHAT, {**body, "echo": False})
        assert at(silent, "choices", 0, "message", "content") == "then"

    run_generate(tmp_path, story)


def test_a_suffix_is_refused(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        reply = await post(rig, COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400)
        assert at(reply, "error", "param") == "suffix"

    run_generate(tmp_path, story)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_min_tokens_is_asked_for_and_a_prefill_server_takes_more_than_its_one(
    path: str, tmp_path: Path
) -> None:
    body: JsonObject = {"prompt": [8]} if path == COMPLETIONS else {"messages": MESSAGES}
    body |= {"min_tokens": 3}

    async def decode(rig: Rig) -> None:
        await post_object(rig, path, {**body, "max_tokens": 5})
        (submit,) = rig.scheduler.submits
        assert submit.sampling.min_new_tokens == 3
        reply = await post(rig, path, {**body, "max_tokens": 2}, 400)
        assert at(reply, "error", "param") == "min_tokens"

    async def prefill(rig: Rig) -> None:
        params: JsonObject = {"do_remote_decode": True}
        await post_object(rig, path, {**body, "max_tokens": 1, "kv_transfer_params": params})
        (submit,) = rig.scheduler.submits
        assert submit.sampling.max_new_tokens == submit.sampling.min_new_tokens == 1

    run_generate(tmp_path / "decode", decode)
    run_generate(tmp_path / "prefill", prefill, role=Role.PREFILL)


def test_token_ids_logprob_may_name_token_zero(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for asked in ([0], [[0]]):
            body: JsonObject = {
                "input_ids": [8],
                "return_logprob": True,
                "token_ids_logprob": asked,  # type: ignore[dict-item]
                "sampling_params": {"max_new_tokens": 1},
            }
            meta = at(await post_object(rig, GENERATE, body), "meta_info")
            assert at(meta, "output_token_ids_logprobs") == [[[0.0, 0, None]]]
        assert counted_up([8], 1) == [9]

    run_generate(tmp_path, story)


@pytest.mark.parametrize("field", ["input_embeds", "custom_logit_processor", "image_data"])
def test_what_is_not_supported_is_not_ignored_for_being_made_of_zeros(
    field: str, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        for value in ([0], [[0]], [[0.0]]):
            body: JsonObject = {"text": "a", field: value}  # type: ignore[dict-item]
            assert field in str(await post(rig, GENERATE, body, 400))
        for nothing in (None, [], [None], [[]], "", 0, False):
            await post(rig, GENERATE, {"text": "a", field: nothing})  # type: ignore[dict-item]

    run_generate(tmp_path, story)
