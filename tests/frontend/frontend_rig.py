"""A whole frontend in the test's own loop: real client and routes, a scripted scheduler behind."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
from fastapi import APIRouter, FastAPI

from common.channel.local_async import AsyncLocalClient
from common.clock import Clock, ManualClock, SystemClock
from common.config import Role, ServerConfig
from common.frontend.apis import fleet_api, info, timelines, weights_api
from common.frontend.app import build_app
from common.frontend.bodies.reader import BodyReader
from common.frontend.context import FrontendContext
from common.frontend.page import routes as page
from common.frontend.peers import routes as peers
from common.frontend.peers.sources import PeerSources
from common.frontend.requests.draining import DrainOrder
from common.frontend.requests.fleet import Fleet
from common.frontend.requests.relay import Relays
from common.frontend.requests.request_log import RequestLog
from common.frontend.requests.scheduler_client import SchedulerClient
from common.frontend.requests.tracing import open_tracing
from common.frontend.text.grammar_check import GrammarCheck
from common.frontend.text.parsing.choose import open_parsers
from common.frontend.text.tokenizer import load_tokenizer
from common.metrics.server import ServerMetrics
from tests.frontend.scripted_scheduler import ScriptedScheduler
from tests.frontend.tiny_tokenizers import write_tokenizer

STORY_PATIENCE_S = 60.0  # only a failing test waits this long

BuildRouter = Callable[[FrontendContext], APIRouter]
BASE_PARTS: tuple[BuildRouter, ...] = (
    info.build_router,
    page.build_router,
    timelines.build_router,
    fleet_api.build_router,
    weights_api.build_router,
    peers.build_router,
)


@dataclass(frozen=True, slots=True)
class Rig:
    """http: talks to `app` without a socket, so a streamed answer comes as a whole."""

    scheduler: ScriptedScheduler
    context: FrontendContext
    app: FastAPI
    http: httpx.AsyncClient

    async def until(self, found: Callable[[ScriptedScheduler], bool]) -> None:
        """Wait until the scheduler has seen what `found` looks for."""
        await asyncio.to_thread(self.scheduler.wait_for, found)


def listen(client: SchedulerClient, clock: ManualClock, seconds: float) -> None:
    """Time passes for a frontend that runs and looks at its scheduler."""
    end_at = clock.now() + seconds
    while clock.now() < end_at:
        clock.advance(1.0)
        client.trouble()


def write_model(directory: Path) -> Path:
    """A checkpoint directory as far as a frontend reads it."""
    write_tokenizer(directory)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def decode_config(directory: Path, **changes: object) -> ServerConfig:
    """Settings of a decode server with one prefill server; `directory` gets its checkpoint."""
    model = str(write_model(directory / "tiny"))
    config = ServerConfig(
        role=Role.DECODE,
        model_path=model,
        tokenizer_path=model,
        served_model_name="tiny",
        port=30001,
        prefill=("127.0.0.1:8998",),
        max_body_nbytes=100_000,
        request_timeout_s=60.0,
    )
    return msgspec.structs.replace(config, **changes)


def run_with_rig(
    directory: Path,
    story: Callable[[Rig], Awaitable[None]],
    *,
    parts: Sequence[BuildRouter] = BASE_PARTS,
    clock: Clock | None = None,
    prepare: Callable[[ScriptedScheduler], None] = lambda scheduler: None,
    **changes: object,
) -> None:
    """Run one asynchronous test. prepare: changes the scheduler before it says anything."""

    async def run() -> None:
        config = decode_config(directory, **changes)
        async with open_rig(config, parts, clock or SystemClock(), prepare) as rig:
            await story(rig)

    asyncio.run(asyncio.wait_for(run(), STORY_PATIENCE_S))


@asynccontextmanager
async def open_rig(
    config: ServerConfig,
    parts: Sequence[BuildRouter],
    clock: Clock,
    prepare: Callable[[ScriptedScheduler], None],
) -> AsyncIterator[Rig]:
    runtime_dir = tempfile.mkdtemp(prefix="baton-test-")
    config = msgspec.structs.replace(config, runtime_dir=runtime_dir)
    scheduler = ScriptedScheduler(Path(config.frontend_ipc_path))
    prepare(scheduler)
    metrics = ServerMetrics(config.served_model_name, config.engine_type, config.metrics_names)
    channel = AsyncLocalClient(config.frontend_ipc_path, "frontend")
    client = SchedulerClient(
        channel,
        metrics,
        RequestLog(config.request_history, clock),
        open_tracing(config),
        clock,
    )
    fleet = Fleet(config, client, clock)
    tokenizer = load_tokenizer(config.tokenizer_path, clock.wall, config.chat_template)
    context = FrontendContext(
        config=config,
        scheduler=client,
        peers=PeerSources(config.prefill, client, clock),
        metrics=metrics,
        tokenizer=tokenizer,
        bodies=BodyReader(config.max_body_nbytes),
        grammars=GrammarCheck(config),
        clock=clock,
        started_wall_s=clock.wall(),
        version="0.test",
        fleet=fleet,
        relays=Relays(client, fleet, clock),
        drain_order=DrainOrder(lambda: None, lambda: None),
        parsers=open_parsers(config, tokenizer),
    )
    app = build_app(context, [build(context) for build in parts])
    receiver = asyncio.create_task(client.run())
    sources = asyncio.create_task(context.peers.run())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    try:
        with scheduler:
            await client.wait_ready()
            await client.get_state()
            headers = {"Content-Type": "application/json"}
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost", headers=headers
            ) as http:
                yield Rig(scheduler, context, app, http)
            sources.cancel()
            receiver.cancel()
            await asyncio.gather(sources, receiver, return_exceptions=True)
    finally:
        channel.close()
        shutil.rmtree(runtime_dir)
