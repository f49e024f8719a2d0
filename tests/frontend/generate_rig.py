"""The generate APIs over the frontend rig: known answers, whole streams, and real connections."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import uvicorn
from tokenizers import Tokenizer as Backend

from common.config import Role
from common.frontend.apis import (
    messages_api,
    openai_api,
    responses_api,
    sglang_api,
    token_api,
)
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.text.tokenizer import Tokenizer
from common.protocol.frontend import Submit, Tokens, ToldFrontend
from common.request import FinishKind, FinishReason
from tests.frontend.frontend_rig import BASE_PARTS, Rig, run_with_rig
from tests.frontend.scripted_scheduler import INFO, ScriptedScheduler, logprobs_of, trace_of
from tests.frontend.tiny_tokenizers import CHATML, byte_level_backend, write_tokenizer

PARTS = (
    *BASE_PARTS,
    sglang_api.build_router,
    openai_api.build_router,
    responses_api.build_router,
    messages_api.build_router,
    token_api.build_router,
)
VOCAB_SIZE = 400  # more than the tokenizer has
STORY_TIMEOUT_S = 60.0  # a story takes less than a second; one that hangs must still fail
TOKENIZER = Tokenizer(byte_level_backend(), None)


def run_generate(
    directory: Path,
    story: Callable[[Rig], Awaitable[None]],
    *,
    role: Role = Role.DECODE,
    prefill: tuple[str, ...] = ("127.0.0.1:8998",),
    timeout_s: float = STORY_TIMEOUT_S,
    tool_call_parser: str = "",
    chat_template: str = CHATML,
    backend: Backend | None = None,
    **changes: object,
) -> None:
    """Run one test against the whole frontend of a server of that role.

    changes: of its settings.
    """
    chat = write_tokenizer(
        directory / "chat",
        backend,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=chat_template,
    )

    def prepare(scheduler: ScriptedScheduler) -> None:
        scheduler.info = msgspec.structs.replace(
            INFO, vocab_size=VOCAB_SIZE, incarnation="incarnation"
        )

    async def bounded(rig: Rig) -> None:
        async with asyncio.timeout(timeout_s):
            await story(rig)

    run_with_rig(
        directory,
        bounded,
        parts=PARTS,
        prepare=prepare,
        role=role,
        prefill=() if role is Role.PREFILL else prefill,
        tokenizer_path=str(chat),
        tool_call_parser=tool_call_parser,
        **changes,
    )


def counted_up(prompt_ids: Sequence[int], count: int) -> list[int]:
    """The scripted scheduler's continuation of a prompt."""
    return [1 + (prompt_ids[-1] + i) % (INFO.vocab_size - 1) for i in range(count)]


def counted_text(prompt_ids: Sequence[int], count: int, *, skips: bool = True) -> str:
    return TOKENIZER.decode(counted_up(prompt_ids, count), skip_special_tokens=skips)


def prompt_of(rig: Rig) -> str:
    """The text of the latest prompt that the scheduler has got."""
    return TOKENIZER.decode(rig.scheduler.submits[-1].token_ids, skip_special_tokens=False)


def say_text(
    text: str, finish: FinishReason | None = None, tokenizer: Tokenizer = TOKENIZER
) -> Callable[[Submit], list[ToldFrontend]]:
    """A scheduler that always answers `text`, one token per message."""
    token_ids = tokenizer.encode(text)

    def answer(submit: Submit) -> list[ToldFrontend]:
        said = token_ids[: submit.sampling.max_new_tokens]
        reason = finish if len(said) == len(token_ids) else None
        messages: list[ToldFrontend] = []
        for place, token in enumerate(said):
            is_last = place == len(said) - 1
            messages.append(
                Tokens(
                    submit.request_id,
                    [token],
                    logprobs=[logprobs_of(token, submit)] if submit.sampling.return_logprob else [],
                    finish=(reason or FinishReason(FinishKind.LENGTH)) if is_last else None,
                    trace=trace_of(submit, len(said)) if is_last else None,
                )
            )
        return messages

    return answer


def events_of(body: str) -> list[JsonObject]:
    """The events of a whole stream, which must end in the closing mark and have it only there."""
    parts = body.split("\n\n")
    assert parts.pop() == ""
    assert parts.pop() == "data: [DONE]"
    assert all(part.startswith("data: {") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


async def typed_events(rig: Rig, path: str, body: JsonObject) -> list[JsonObject]:
    """The events of a whole stream whose events name their types, which have them inside too."""
    reply = await rig.http.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    *parts, rest = reply.text.split("\n\n")
    assert rest == ""
    found: list[JsonObject] = []
    for part in parts:
        name, data = part.split("\n")
        event: JsonObject = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


async def post(rig: Rig, path: str, body: JsonObject, status: int = 200) -> JsonValue:
    reply = await rig.http.post(path, json=body)
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    parsed: JsonValue = reply.json()
    return parsed


async def post_object(rig: Rig, path: str, body: JsonObject, status: int = 200) -> JsonObject:
    parsed = await post(rig, path, body, status)
    assert isinstance(parsed, dict)
    return parsed


async def post_stream(rig: Rig, path: str, body: JsonObject) -> list[JsonObject]:
    reply = await rig.http.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in reply.headers
    return events_of(reply.text)


def at(value: object, *path: str | int) -> object:
    """What stands at `path` inside a parsed reply."""
    for step in path:
        if isinstance(step, str):
            assert isinstance(value, dict), (value, step)
            value = value[step]
        else:
            assert isinstance(value, list), (value, step)
            value = value[step]
    return value


@dataclass(frozen=True, slots=True)
class Served:
    """The rig behind a real HTTP server on a loopback port."""

    url: str
    http: httpx.AsyncClient


@asynccontextmanager
async def serve_http(rig: Rig) -> AsyncIterator[Served]:
    """For what needs a connection that can be cut: disconnects, and events as they come."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(rig.app, log_config=None, lifespan="off"))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url) as http:
            yield Served(url, http)
        server.should_exit = True
        await task
