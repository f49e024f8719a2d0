"""What /openapi.json says of answers and of fields that depend on each other is what is done."""

from __future__ import annotations

import re
from pathlib import Path

from common.frontend.apis import openapi
from common.frontend.apis.cross_rules import CROSS_RULES
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.page.files import read_page_files
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import run_generate

SAY: JsonValue = [{"role": "user", "content": "x"}]
TOOL: JsonObject = {"type": "function", "function": {"name": "f"}}
HERE: JsonObject = {"do_remote_prefill": True, "remote_host": "h", "remote_port": 1}
RESUME: JsonObject = {
    "rid": "r",
    "token_ids": [1],
    "timeout": 5,
    "sampling_params": {"seed": 1, "n": 1, "max_new_tokens": 4},
}


def resume(sampling: JsonObject, **more: JsonValue) -> JsonObject:
    of_request = RESUME["sampling_params"]
    assert isinstance(of_request, dict)
    return {**RESUME, **more, "sampling_params": {**of_request, **sampling}}


# Per path and rule, in the order of the document: bodies that break it and nothing else.
BREAKS: dict[str, list[list[JsonObject]]] = {
    "/generate": [
        [{}, {"text": "a", "input_ids": [1]}, {"text": None}],
        [{"text": "a", "sampling_params": {"max_new_tokens": 1 << 30}}],
        [{"text": "a", "sampling_params": {"min_new_tokens": 3, "max_new_tokens": 2}}],
        [{"text": "a", "sampling_params": {"regex": "a", "json_schema": "{}"}}],
        [
            {"text": ["a", "b"], "sampling_params": [{}]},
            {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]},
        ],
        [{"text": "a", "logprob_start_len": 9}],
        [{"text": "a", "bootstrap_host": "127.0.0.1"}],
        [
            {"text": ["a", "b"], "bootstrap_host": ["127.0.0.1"], "bootstrap_room": 5},
            {"text": ["a", "b"], "bootstrap_host": "127.0.0.1", "bootstrap_room": [5, 5]},
        ],
        [{"text": ["a", "b"], "rid": ["x"]}, {"text": ["a", "b"], "rid": ["x", "x"]}],
    ],
    "/v1/completions": [
        [{"prompt": "a", "max_tokens": 0}],
        [{"prompt": "a", "n": 1, "best_of": 2}],
        [{"prompt": "a", "max_tokens": 1 << 30}],
        [{"prompt": "a", "max_tokens": 2, "min_tokens": 3}],
        [
            {"prompt": "a", "stream": True, "prompt_logprobs": 1},
            {"prompt": "a", "stream_options": {"include_usage": True}},
        ],
        [
            {"prompt": "a", "logprob_token_ids": [5]},
            {
                "prompt": "a",
                "logprob_token_ids": [5],
                "logprobs": 1,
                "echo": True,
                "max_tokens": 0,
            },
        ],
        [{"prompt": "a", "truncate_prompt_tokens": 1 << 30}],
        [
            {"prompt": "a", "regex": "a", "ebnf": 'root ::= "a"'},
            {"prompt": "a", "guided_choice": ["a"], "response_format": {"type": "json_object"}},
        ],
        [{"prompt": "a", "bootstrap_host": "127.0.0.1"}],
        [{"prompt": ["a", "b"], "bootstrap_host": ["127.0.0.1"], "bootstrap_room": 5}],
        [{"prompt": ["a", "b"], "rid": ["x", "x"]}],
    ],
    "/v1/chat/completions": [
        [{"messages": SAY, "top_logprobs": 2}],
        [{"messages": SAY, "add_generation_prompt": True, "continue_final_message": True}],
        [
            {"messages": SAY, "tool_choice": "required"},
            {"messages": SAY, "tools": [TOOL, TOOL]},
            {
                "messages": SAY,
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
        ],
        [{"messages": SAY, "max_tokens": 1 << 30}],
        [{"messages": SAY, "max_tokens": 2, "min_tokens": 3}],
        [
            {"messages": SAY, "stream": True, "prompt_logprobs": 1},
            {"messages": SAY, "stream_options": {"include_usage": True}},
        ],
        [{"messages": SAY, "logprob_token_ids": [5]}],
        [{"messages": SAY, "truncate_prompt_tokens": 1 << 30}],
        [{"messages": SAY, "regex": "a", "structured_outputs": {"regex": "a"}}],
        [{"messages": SAY, "bootstrap_host": "127.0.0.1"}],
        [{"messages": SAY, "bootstrap_host": ["a", "b"], "bootstrap_room": 5}],
        [{"messages": SAY, "rid": ["x", "y"]}],
    ],
    "/tokenize": [[{}, {"prompt": "a", "messages": SAY}]],
    "/v1/tokenize": [[{}, {"prompt": "a", "messages": SAY}]],
    "/abort_request": [[{}, {"rid": ""}, {"abort_all": False}]],
    "/resume": [
        [
            resume({"seed": None}),
            resume({"n": 2}),
            resume({"stop": "x"}),
            resume({"stop_regex": "x"}),
        ],
        [resume({}, output_ids=[1, 2, 3, 4])],
        [resume({}, output_ids=[1], return_logprob=True, logprob_start_len=0)],
        [resume({"regex": "a"}, grammar={"kind": "regex", "text": "a"})],
    ],
    "/switch_role": [[{"role": "prefill"}]],
}


def test_every_rule_over_several_fields_is_held_by_its_reader(tmp_path: Path) -> None:
    assert BREAKS.keys() == CROSS_RULES.keys() <= openapi.BODIES.keys()

    async def story(rig: Rig) -> None:
        for path, rules in CROSS_RULES.items():
            assert len(BREAKS[path]) == len(rules.texts), path
            for text, bodies in zip(rules.texts, BREAKS[path], strict=True):
                named = set(re.findall(r"`(\w+)", text))
                for body in bodies:
                    reply = await rig.http.post(path, json=body)
                    assert reply.status_code == 400, (path, body, reply.text)
                    message = reply.json()["error"]["message"]
                    assert any(name in message for name in named), (text, message)

    run_generate(tmp_path, story)


async def operations_of(rig: Rig) -> dict[tuple[str, str], JsonObject]:
    document = (await rig.http.get("/openapi.json")).json()
    return {
        (path, method): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_rules_stand_in_the_schema_of_the_body(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        operations = await operations_of(rig)
        for path, rules in CROSS_RULES.items():
            body = operations[path, "post"]["requestBody"]
            schema = body["content"]["application/json"]["schema"]  # type: ignore[index,call-overload]
            assert all(f"- {text}" in schema["description"] for text in rules.texts)
            assert schema.items() >= rules.schema.items()

    run_generate(tmp_path, story)


def test_answers_have_the_types_that_are_told(tmp_path: Path) -> None:
    """Of what can be asked without a body; bodies are searched elsewhere."""

    async def story(rig: Rig) -> None:
        operations = await operations_of(rig)
        asked = 0
        for (path, method), operation in operations.items():
            told = operation["responses"]["200"].get("content", {})  # type: ignore[index,call-overload,union-attr]
            if method not in ("get", "head") or "{" in path:
                continue
            reply = await rig.http.request(method.upper(), path)
            asked += 1
            if method == "head":
                assert told == {} and reply.content == b""
            elif reply.status_code == 200:
                assert list(told) == [reply.headers["content-type"]], path
        assert asked >= 2 * len(read_page_files()) + 10
        streams = {path for path, _ in operations if openapi.is_streaming(path)}
        assert streams >= {"/generate", "/v1/completions", "/v1/chat/completions"}
        for path in streams:
            told = operations[path, "post"]["responses"]["200"]["content"]  # type: ignore[index,call-overload]
            assert list(told) == ["application/json", "text/event-stream"]
        told = operations["/resume", "post"]["responses"]["200"]["content"]  # type: ignore[index,call-overload]
        assert list(told) == ["text/event-stream"]

    run_generate(tmp_path, story)


def test_a_method_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        operations = await operations_of(rig)
        for path in {path for path, _ in operations}:
            reply = await rig.http.request("TRACE", path.format(model="tiny", rid="x"))
            told = {method.upper() for other, method in operations if other == path}
            assert reply.status_code == 405
            assert set(reply.headers["allow"].split(", ")) == told, path

    run_generate(tmp_path, story)


def test_failures_that_are_meant_are_told(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        operations = await operations_of(rig)
        for (path, _), operation in operations.items():
            told = operation["responses"]
            assert isinstance(told, dict)
            generates = openapi.is_streaming(path) or path == "/resume"
            failures = {status for status in told if status.startswith("5")}
            assert failures >= ({"500", "503", "504"} if generates else set())
            assert failures <= {"500", "503", "504"}

    run_generate(tmp_path, story)
