"""/v1/completions when it fails: bad input, a stream that breaks, a client that goes away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.frontend.bodies.fields import JsonObject
from common.protocol.frontend import Failed
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import (
    VOCAB_SIZE,
    at,
    post_object,
    run_generate,
    serve_http,
)
from tests.frontend.scripted_scheduler import count_up

PATH = "/v1/completions"


def test_a_failure_before_the_first_token_is_openai_s_error(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.answer = lambda s: [Failed(s.request_id, 503, "queue_full", "full")]
        for is_streaming in (False, True):
            reply = await rig.http.post(PATH, json={"prompt": "a", "stream": is_streaming})
            assert reply.status_code == 503 and "retry-after" in reply.headers
            assert reply.json()["error"] == {
                "message": "full",
                "type": "service_unavailable_error",
                "param": None,
                "code": "queue_full",
            }

    run_generate(tmp_path, story)


def test_a_failure_inside_a_stream_is_an_error_event_and_the_end(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.holds = True
        async with serve_http(rig) as served:
            body = {"prompt": [[5], [6]], "stream": True, "max_tokens": 3}
            request = served.http.stream("POST", PATH, json=body)
            asked = asyncio.create_task(request.__aenter__())
            await rig.until(lambda s: len(s.held) == 2)
            first, second = sorted(rig.scheduler.held)
            rig.scheduler.send(count_up(rig.scheduler.held[first])[0])
            lines = (await asked).aiter_lines()
            assert "choices" in await anext(lines)
            rig.scheduler.send(Failed(first, 500, "peer_lost", "gone"))
            await anext(lines)
            event = await anext(lines)
            assert event.startswith('data: {"error":{"message":"gone","type":"server_error"')
            assert [line async for line in lines if line] == ["data: [DONE]"]
            await request.__aexit__(None, None, None)
        await rig.until(lambda s: second in [c.request_id for c in s.cancels])

    run_generate(tmp_path, story)


def test_an_abort_is_a_finish_reason(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.holds = True
        asked = asyncio.create_task(post_object(rig, PATH, {"prompt": "a"}))
        await rig.until(lambda s: len(s.held) == 1)
        await rig.http.post("/abort_request", json={"abort_all": True})
        assert at(await asked, "choices", 0, "finish_reason") == "abort"

    run_generate(tmp_path, story)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_client_that_goes_away_is_cancelled(is_streaming: bool, tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.holds = True
        async with serve_http(rig) as served:
            body = {"prompt": ["a", "b"], "stream": is_streaming}
            asked = asyncio.create_task(served.http.post(PATH, json=body))
            await rig.until(lambda s: len(s.held) == 2)
            asked.cancel()
            await rig.until(lambda s: len(s.cancels) == 2)

    run_generate(tmp_path, story)


# ---- bad input -----------------------------------------------------------------------------------

BAD_BODIES: list[tuple[JsonObject, str]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": True}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": ["a", [5]]}, "prompt[1]"),
    ({"prompt": [[5], "a"]}, "prompt[1]"),
    ({"prompt": [5, "a"]}, "prompt"),
    ({"prompt": [5, True]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [VOCAB_SIZE]}, "prompt"),
    ({"prompt": [[-1]]}, "prompt[0]"),
    ({"prompt": [5] * 512}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 512}, "max_tokens"),
    ({"max_tokens": -1, "echo": True}, "max_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 0}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 129}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": 1}, "echo"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": ["5"]}, "stop_token_ids"),
    ({"suffix": "x"}, "suffix"),
    ({"model": 5}, "model"),
    ({"rid": 5}, "rid"),
    ({"response_format": "text"}, "response_format"),
    ({"lora_path": "x"}, "lora_path"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params.do_remote_decode"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"prompt_logprobs": 129}, "prompt_logprobs"),
    ({"bootstrap_room": -1}, "bootstrap_room"),
    ({"timeout": 0}, "timeout"),
    ({"bootstrap_room": 1, "bootstrap_port": 0}, "bootstrap_port"),
]


def test_bad_input_is_a_400_that_names_its_field(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for body, field in BAD_BODIES:
            reply = await rig.http.post(PATH, json={"prompt": "a", **body} if body else {})
            assert reply.status_code == 400, (body, reply.text)
            error = reply.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["param"] == field, (body, error)
            assert field in error["message"] and error["type"] == "invalid_request_error"
        assert rig.scheduler.submits == []

    run_generate(tmp_path, story)


def test_a_body_that_is_not_json_is_a_400(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for content in (b"", b"{", b"[]", b'{"prompt": "a", "temperature": NaN}'):
            reply = await rig.http.post(PATH, content=content)
            assert reply.status_code == 400
            assert reply.json()["error"]["type"] == "invalid_request_error"
        assert reply.json()["error"]["param"] == "temperature"

    run_generate(tmp_path, story)


def test_a_model_that_is_not_served_is_a_404(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        reply = await post_object(rig, PATH, {"prompt": "a", "model": "gpt-4"}, 404)
        error = at(reply, "error")
        assert isinstance(error, dict)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        for name in ("tiny", "unknown", "default", None):
            await post_object(rig, PATH, {"prompt": "a", "model": name})

    run_generate(tmp_path, story)
