"""The frontend process: `python -m common.frontend --config FILE`, started by the supervisor.

Binds the port before anything slow, so that a port in use is said at once. Ends with 0 when it was
asked to stop, with 2 and one line if it can't be what the settings say, with 75 if it can't now.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata

import uvicorn
import uvloop

from common.channel.local_async import AsyncLocalClient
from common.clock import Clock, SystemClock
from common.config import Role, ServerConfig, read_config
from common.errors import ConfigError, RequestError, config_error
from common.exit_codes import exit_code_of, switched_code
from common.frontend.apis import (
    fleet_api,
    info,
    messages_api,
    openai_api,
    responses_api,
    sglang_api,
    timelines,
    token_api,
    weights_api,
)
from common.frontend.app import HEADERS_NBYTES_MAX, build_app
from common.frontend.bodies.reader import BodyReader, keep_no_large_blocks
from common.frontend.context import FrontendContext
from common.frontend.http.protocol import UVICORN_LOGGER, is_logged_here, make_protocol
from common.frontend.page import routes as page
from common.frontend.peers import routes as peers
from common.frontend.peers.sources import PeerSources
from common.frontend.requests.draining import Drain, DrainOrder
from common.frontend.requests.fleet import Fleet
from common.frontend.requests.relay import Relays
from common.frontend.requests.request_log import RequestLog
from common.frontend.requests.scheduler_client import SchedulerClient
from common.frontend.requests.tracing import open_tracing
from common.frontend.text.grammar_check import GrammarCheck
from common.frontend.text.parsing.choose import open_parsers
from common.frontend.text.tokenizer import Tokenizer, load_tokenizer
from common.log import setup_log
from common.metrics.server import ServerMetrics

LISTEN_BACKLOG = 2048  # connections that may wait to be accepted; a burst of clients fits
STOP_PROBE_S = 1.0  # a scheduler that lives answers in milliseconds
# After the drain, for the last answers to leave before connections are closed.
LAST_ANSWERS_S = 2
# How long a thread that reads a large body may keep streams waiting, each time that they want to
# go on; a token takes several such turns. Ten times as often as usual, and only where two run.
SWITCH_INTERVAL_S = 0.0005
# New objects between two looks of the collector, which Python takes after 700. A request frees what
# it made, so a look finds nothing; one at 256 open requests goes through some 30,000 objects.
NEW_OBJECT_COUNT = 50_000
APIS = (sglang_api, openai_api, responses_api, messages_api, token_api)
PARTS = (*APIS, info, page, timelines, fleet_api, weights_api, peers)

logger = logging.getLogger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(prog="common.frontend", description=__doc__)
    parser.add_argument("--config", required=True, help="the server's settings, as JSON")
    try:
        config = read_config(parser.parse_args().config)
        setup_log(config.role, "frontend", config.log_level)
        keep_no_large_blocks()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        clock = SystemClock()
        with bind(config.host, config.port) as listener:
            tokenizer = load_tokenizer(config.tokenizer_path, clock.wall, config.chat_template)
            role = uvloop.run(serve(config, listener, tokenizer, clock))
    except ConfigError as exc:
        sys.stderr.write(f"baton frontend: {exc}\n")
        return exit_code_of(exc)
    return switched_code(role) if role is not None else 0


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens nowhere yet. Raises: ConfigError naming the address."""
    address = f"--host {host} --port {port}"
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise config_error(f"{address}: can't be used: {exc.strerror}", exc) from exc
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
    except OSError as exc:
        listener.close()
        raise config_error(f"{address}: can't be bound: {exc.strerror}", exc) from exc
    return listener


async def serve(
    config: ServerConfig, listener: socket.socket, tokenizer: Tokenizer, clock: Clock
) -> Role | None:
    """Serve until SIGTERM or SIGINT, or until another role is asked for, then let open requests
    end, as `Drain` does. Returns that role."""
    tracing = open_tracing(config)
    metrics = ServerMetrics(config.served_model_name, config.engine_type, config.metrics_names)
    channel = AsyncLocalClient(config.frontend_ipc_path, "frontend")
    client = SchedulerClient(
        channel, metrics, RequestLog(config.request_history, clock), tracing, clock
    )
    fleet = Fleet(config, client, clock)
    relays = Relays(client, fleet, clock)
    stop = asyncio.Event()
    order = DrainOrder(lambda: os.kill(os.getppid(), signal.SIGTERM), stop.set)
    context = FrontendContext(
        config=config,
        scheduler=client,
        peers=PeerSources(config.prefill, client, clock),
        metrics=metrics,
        tokenizer=tokenizer,
        bodies=BodyReader(
            config.max_body_nbytes,
            lambda: (
                tokenizer.text_length_max(client.server_info.request_token_max)
                if client.server_info is not None
                else None
            ),
        ),
        grammars=GrammarCheck(config),
        clock=clock,
        started_wall_s=clock.wall(),
        version=_version(),
        fleet=fleet,
        relays=relays,
        drain_order=order,
        parsers=open_parsers(config, tokenizer),
    )
    server = _http_server(context)
    _keep_collector_quiet()
    async with asyncio.TaskGroup() as tasks:
        receiver = tasks.create_task(client.run())
        sources = tasks.create_task(context.peers.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        last = Drain(config, client, relays, fleet, clock)
        stopper = tasks.create_task(_stop(stop, server, client, last, order))
        watcher = tasks.create_task(fleet.watch()) if config.serve_plain else None
        logger.info("listening on http://%s:%d", config.host, config.port)
        await server.serve(sockets=[listener])
        stopper.cancel()
        if watcher is not None:
            watcher.cancel()
        sources.cancel()
        receiver.cancel()
    channel.close()
    tracing.close()
    return order.role


def _http_server(context: FrontendContext) -> uvicorn.Server:
    server = _Server(
        uvicorn.Config(
            build_app(context, [part.build_router(context) for part in PARTS]),
            log_config=None,
            # h11, whatever else is installed: its limits are the ones that are tested.
            http=make_protocol(context.clock, HEADERS_NBYTES_MAX),
            access_log=context.config.log_requests,
            backlog=LISTEN_BACKLOG,
            timeout_graceful_shutdown=LAST_ANSWERS_S,
            lifespan="off",
        )
    )
    uvicorn_logger = logging.getLogger(UVICORN_LOGGER)
    uvicorn_logger.setLevel(logging.WARNING)
    uvicorn_logger.addFilter(lambda record: not is_logged_here(record))
    return server


def _keep_collector_quiet() -> None:
    """What is here now stays for good: the collector need not go through it while streams wait."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECT_COUNT)


def _version() -> str:
    try:
        return metadata.version("baton")
    except metadata.PackageNotFoundError:
        return "not installed"


async def _stop(
    stop: asyncio.Event,
    server: uvicorn.Server,
    client: SchedulerClient,
    last: Drain,
    order: DrainOrder,
) -> None:
    """Begin the end. Health checks turn red at once and new requests are sent away, while the port
    stays open for both as long as something is open.

    A scheduler that is gone is not waited for: that may be why we are to stop. What is still open
    after the drain is answered and cancelled, not cut off.
    """
    await stop.wait()
    client.is_draining = order.is_given = True
    with suppress(RequestError):
        await client.get_state(STOP_PROBE_S)
        await last.run(must_move=order.must_move)
    client.stop()
    server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which would end the process by the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


if __name__ == "__main__":
    sys.exit(main())
