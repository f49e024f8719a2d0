"""A misspelt field is told of, or refused; one of another server that changes nothing is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.frontend.apis import openapi
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.bodies.unknown_names import NO_EFFECT, known_names, unknown_names
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import at, run_generate

ASKS: dict[str, JsonObject] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
}

# What SGLang's router sends with every body; see the captured one in its tests.
ROUTER: JsonObject = {
    "model": None,
    "return_text_in_logprobs": False,
    "log_metrics": True,
    "return_hidden_states": False,
    "background": False,
    "no_logs": False,
    "return_bytes": False,
    "return_entropy": False,
}
# Bodies of load generators and SDKs.
BENCH: JsonObject = {"best_of": 1, "ignore_eos": True, "stream_options": {"include_usage": True}}
SDK: JsonObject = {"user": "me", "store": False, "metadata": {}, "service_tier": "auto"}


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_misspelt_field_is_named_in_a_header(
    path: str, is_streaming: bool, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {**ASKS[path], "stream": is_streaming, "strem": True, "zzz\n\x7fä": 1}
        reply = await rig.http.post(path, json=body)
        assert reply.status_code == 200
        assert reply.headers["warnings"] == (
            'unknown field "strem"; did you mean "stream"?, unknown field "zzz\\n?\\xe4"'
        )
        plain = await rig.http.post(path, json={**ASKS[path], "stream": is_streaming})
        assert "warnings" not in plain.headers

    run_generate(tmp_path, story)


@pytest.mark.parametrize("path", ASKS)
def test_it_is_refused_where_the_server_is_strict(path: str, tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        assert (await rig.http.post(path, json=ASKS[path])).status_code == 200
        reply = await rig.http.post(path, json={**ASKS[path], "stremm": 1})
        assert reply.status_code == 400
        message = at(reply.json(), "error", "message")
        assert message == 'unknown field "stremm"; did you mean "stream"? (--strict-fields)'
        if path != "/generate":
            assert at(reply.json(), "error", "param") == "stremm"

    run_generate(tmp_path, story, strict_fields=True)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/generate", ROUTER),
        ("/v1/completions", BENCH),
        ("/v1/chat/completions", SDK),
        ("/v1/completions", dict.fromkeys(NO_EFFECT)),
    ],
)
def test_what_other_servers_read_is_known(path: str, more: dict[str, JsonValue]) -> None:
    known = known_names(openapi.BODIES[path])
    assert unknown_names({**ASKS[path], **more}, known, is_strict=True) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("max_completion_token", "max_completion_tokens"),
        ("temprature", "temperature"),
        ("top-p", "top_p"),
        ("repitition_penalty", "repetition_penalty"),
        ("responseFormat", "response_format"),
    ],
)
def test_the_nearest_field_is_meant(name: str, meant: str) -> None:
    known = known_names(openapi.BODIES["/v1/chat/completions"])
    (told,) = unknown_names({name: 1}, known, is_strict=False)
    assert told == f'unknown field "{name}"; did you mean "{meant}"?'


def test_a_body_of_unknown_fields_makes_no_header_of_any_length() -> None:
    body: JsonObject = {f"{i}{'x' * 1000}": 1 for i in range(1000)}
    told = unknown_names(body, known_names(openapi.BODIES["/generate"]), is_strict=False)
    assert len(told) == 8 and len(", ".join(told)) < 2000
