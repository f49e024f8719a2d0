"""A real HTTP server in a thread of the test, which answers as the test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# As one of our servers would.
ANSWERS = {
    "/server_info": b'{"vocab_size": 100}',
    "/v1/models": b'{"object": "list", "data": [{"id": "tiny"}]}',
}


@contextmanager
def serving(handler: Handler, answers: Mapping[str, bytes] = ANSWERS) -> Iterator[str]:
    """The root of a server that answers every POST with `handler`, and GET with `answers`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        runner, port = asyncio.run_coroutine_threadsafe(_start(handler, answers), loop).result(30)
        yield f"http://127.0.0.1:{port}"
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _start(handler: Handler, answers: Mapping[str, bytes]) -> tuple[web.AppRunner, int]:
    app = web.Application()
    app.router.add_post("/{path:.*}", handler)
    for path, content in answers.items():
        app.router.add_get(path, _answer(content))
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, runner.addresses[0][1]


def _answer(content: bytes) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=content)

    return answer


async def begin_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def send_event(response: web.StreamResponse, content: object) -> None:
    await response.write(b"data: " + msgspec.json.encode(content) + b"\n\n")


async def end_stream(response: web.StreamResponse) -> web.StreamResponse:
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def token_event(count: int, prompt_count: int = 4) -> dict[str, object]:
    """An event of /generate after `count` tokens."""
    meta = {"completion_tokens": count, "prompt_tokens": prompt_count, "finish_reason": None}
    return {"text": "a" * count, "output_ids": [1] * count, "meta_info": meta}
