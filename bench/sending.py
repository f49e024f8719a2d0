"""A workload sent to servers from a program, with the load tool's own client.

Knows nothing of what is sent or of what is measured with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bench.serve.client import LoadClient
from bench.serve.dialects import SglangDialect
from bench.serve.outcome import Outcome, Run
from bench.serve.sessions import make_sessions
from bench.serve.settings import SESSIONS, Settings, parse_settings
from bench.serve.workload import Ask

TIMEOUT = ("--request-timeout", "60")


def send_to(urls: Sequence[str], asks: Sequence[Ask], *flags: str) -> Run:
    """Send a workload, dealt out to servers in turns, as a router would.

    flags: of the load tool, for each server's share. Raises: RuntimeError if a request failed: then
        nothing was measured.
    """
    return _all_good(asyncio.run(_send(urls, asks, flags)))


def replay_to(url: str, *flags: str, vocab_size: int) -> Run:
    """Play sessions, as the load tool's flags describe them. Raises: as `send_to`."""
    settings = load_settings("--base-url", url, *TIMEOUT, "--dataset-name", SESSIONS, *flags)
    sessions, source = make_sessions(settings, vocab_size)
    client = LoadClient(settings, SglangDialect(settings))
    return _all_good(asyncio.run(client.replay(sessions, source, _ignore)))


def _all_good(run: Run) -> Run:
    for outcome in run.outcomes:
        if not outcome.is_good:
            raise RuntimeError(f"{outcome.error_kind}: {outcome.error}")
    return run


async def _send(urls: Sequence[str], asks: Sequence[Ask], flags: Sequence[str]) -> Run:
    shares = [asks[index :: len(urls)] for index in range(len(urls))]
    clients = [_client_of(url, flags) for url in urls]
    runs = await asyncio.gather(
        *(
            client.run(share, _ignore)
            for client, share in zip(clients, shares, strict=True)
            if share
        )
    )
    return Run(
        [outcome for run in runs for outcome in run.outcomes],
        max(run.duration_s for run in runs),
        [lag_s for run in runs for lag_s in run.lags_s],
    )


def load_settings(*flags: str) -> Settings:
    """Settings of the load tool, by its own flags. Raises: ConfigError that names one."""
    return parse_settings(["--disable-tqdm", *flags])


def _client_of(url: str, flags: Sequence[str]) -> LoadClient:
    settings = load_settings("--base-url", url, *TIMEOUT, *flags)
    return LoadClient(settings, SglangDialect(settings))


def _ignore(outcome: Outcome) -> None:
    pass
