"""A real frontend on a port of its own, in a thread, for tests that look at it with a browser."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn

from common.clock import SystemClock
from common.frontend.apis import info, openai_api, timelines
from common.frontend.page import routes as page
from tests.frontend.frontend_rig import decode_config, open_rig
from tests.frontend.scripted_scheduler import ScriptedScheduler

PARTS = (info, page, timelines, openai_api)
START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Served:
    """scheduler: scripted; what it says of itself may be changed at any time."""

    url: str
    scheduler: ScriptedScheduler

    def post(self) -> None:
        """A request of somebody else."""
        body = {"prompt": "abc", "max_tokens": 3}
        assert httpx.post(f"{self.url}/v1/completions", json=body).status_code == 200


@contextmanager
def serve_page(
    directory: Path,
    prepare: Callable[[ScriptedScheduler], None] = lambda scheduler: None,
    port: int = 0,
    **changes: object,
) -> Iterator[Served]:
    """port: 0 for any that is free."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()  # a browser may come before the frontend does
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    started: Future[tuple[ScriptedScheduler, uvicorn.Server]] = Future()

    async def run() -> None:
        config = decode_config(directory, **changes)
        builders = [part.build_router for part in PARTS]
        async with open_rig(config, builders, SystemClock(), prepare) as rig:
            settings = uvicorn.Config(
                rig.app, log_config=None, lifespan="off", timeout_graceful_shutdown=0
            )
            server = uvicorn.Server(settings)
            started.set_result((rig.scheduler, server))
            await server.serve(sockets=[listener])

    def run_thread() -> None:
        try:
            asyncio.run(run())
        except BaseException as exc:
            if started.done():
                raise
            started.set_exception(exc)

    thread = threading.Thread(target=run_thread, daemon=True)
    thread.start()
    scheduler, server = started.result(START_TIMEOUT_S)
    try:
        yield Served(url, scheduler)
    finally:
        server.should_exit = True
        thread.join(START_TIMEOUT_S)
        listener.close()
        assert not thread.is_alive(), "the frontend did not stop"
