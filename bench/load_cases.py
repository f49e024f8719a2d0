"""Closed loops of random prompts against one server, with the load tool's own client.

So many streams are always under way, each request as long as the others. Knows nothing of how the
server was started.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from bench.sending import load_settings
from bench.serve.client import LoadClient
from bench.serve.dialects import SglangDialect
from bench.serve.outcome import Outcome, Run
from bench.serve.settings import Settings
from bench.serve.summary import Summary, summarize
from bench.serve.workload import lengths_of, make_warm_ups, make_workload

PERCENTILES = (50.0, 99.0)
# A request that hangs is one that failed, and the other cases still have their time.
REQUEST_TIMEOUT_S = 90


@dataclass(frozen=True, slots=True)
class LoadCase:
    """Lengths in tokens. request_count: of the whole case, several for each stream."""

    input_length: int
    output_length: int
    stream_count: int
    request_count: int

    def __str__(self) -> str:
        return f"{self.input_length}/{self.output_length} x {self.stream_count}"

    @property
    def token_count(self) -> int:
        """That a pool must hold, so that no stream waits for another's pages."""
        return self.stream_count * (self.input_length + self.output_length)


def send_case(case: LoadCase, url: str, vocab_size: int) -> Summary:
    """As many requests as there are streams warm the server up and are not counted."""
    settings = load_settings(
        *("--base-url", url, "--num-prompts", str(case.request_count)),
        *("--max-concurrency", str(case.stream_count), "--warmup-requests", str(case.stream_count)),
        *("--random-input-len", str(case.input_length)),
        *("--random-output-len", str(case.output_length)),
        *("--request-timeout", str(REQUEST_TIMEOUT_S)),
    )
    return summarize(asyncio.run(_send(settings, vocab_size)), PERCENTILES, {})


async def _send(settings: Settings, vocab_size: int) -> Run:
    workload = make_workload(settings, vocab_size)
    client = LoadClient(settings, SglangDialect(settings))
    await client.run(make_warm_ups(settings, lengths_of(workload), vocab_size), _ignore)
    return await client.run(workload, _ignore)


def _ignore(outcome: Outcome) -> None:
    pass


def figures_of(summary: Summary) -> dict[str, float]:
    """The figures of a case, under the names that other systems' figures have."""
    figures = {"output tokens/s": summary.output_throughput}
    for metric in ("itl", "ttft"):
        for rank, value in summary.latencies.get(metric, {}).items():
            if rank.startswith("p"):
                figures[f"{metric.upper()} {rank}, ms"] = value
    return figures | {"client's lag p99, ms": summary.lag_ms}


def why_unfinished(case: LoadCase, summary: Summary) -> str:
    """The requests that were not answered in full, as text; empty if none."""
    if summary.errors:
        told = ", ".join(
            f"{count} {kind} ({summary.error_examples[kind]})"
            for kind, count in summary.errors.items()
        )
        return f"{summary.good_count} of {summary.request_count} answered: {told}"
    wanted = case.request_count * case.output_length
    if summary.output_token_count != wanted:
        return f"{summary.output_token_count} tokens of {wanted}"
    return ""
