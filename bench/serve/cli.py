"""`python -m bench serve`, `baton-bench`: sends a load to a server and reports latencies and
failures.

Exit code 0 if every request was answered, 1 if some failed, 2 if nothing could be measured.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import aiohttp
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from bench.serve.client import LoadClient, headers_of
from bench.serve.conversation import Decode
from bench.serve.dialects import Dialect, OpenAiDialect, SglangDialect
from bench.serve.outcome import Outcome, Run
from bench.serve.sessions import lengths_of_first_turns, make_sessions, turn_count
from bench.serve.settings import SESSIONS, Settings, parse_settings
from bench.serve.summary import METRICS, Summary, request_fields, summarize
from bench.serve.turns import TurnSummary
from bench.serve.workload import lengths_of, make_warm_ups, make_workload
from common.errors import ConfigError

EXIT_SOME_FAILED = 1
EXIT_UNUSABLE = 2
ASK_TIMEOUT_S = 10.0

T = TypeVar("T")


class _ServerInfo(msgspec.Struct):
    vocab_size: int | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


def main(argv: Sequence[str] | None = None) -> int:
    console = Console(stderr=True)
    try:
        settings = parse_settings(sys.argv[1:] if argv is None else argv)
        run = asyncio.run(_measure(settings, console))
        summary = summarize(run, settings.percentiles, settings.goals)
        _write_result(settings, summary, run)
        if settings.picture is not None:
            _draw(settings, run, settings.picture)
    except ConfigError as exc:
        sys.stderr.write(f"baton-bench: {exc}\n")
        return EXIT_UNUSABLE
    print_summary(summary)
    for warning in summary.warnings:
        sys.stderr.write(f"baton-bench: {warning}\n")
    return EXIT_SOME_FAILED if summary.errors else 0


async def _measure(settings: Settings, console: Console) -> Run:
    tokenizer = _load_tokenizer(settings.tokenizer)
    vocab_size = settings.vocab_size
    if vocab_size is None and tokenizer is not None:
        vocab_size = tokenizer.get_vocab_size()
    if vocab_size is None:
        vocab_size = await _ask_vocab_size(settings)
    dialect = await _choose_dialect(settings, tokenizer)
    client = LoadClient(settings, dialect)
    load = _prepare(settings, client, vocab_size)
    warm_ups = make_warm_ups(settings, load.lengths, vocab_size)
    for warm_up in warm_ups:
        outcome = (await client.run([warm_up], _ignore)).outcomes[0]
        if not outcome.is_good:
            raise ConfigError(
                f"a first request to {settings.url}{dialect.path} failed, nothing was measured: "
                f"{outcome.error_kind}: {outcome.error}"
            )
    if settings.flush_cache:
        await _flush_cache(settings)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not settings.has_progress
    ) as progress:
        bar = progress.add_task("requests", total=load.request_count)
        return await load.send(lambda outcome: progress.advance(bar))


@dataclass(frozen=True, slots=True)
class _Load:
    """What is to be sent. lengths: of first prompts and their outputs, in tokens."""

    request_count: int
    lengths: list[tuple[int, int]]
    send: Callable[[Callable[[Outcome], None]], Awaitable[Run]]


def _prepare(settings: Settings, client: LoadClient, vocab_size: int) -> _Load:
    if settings.dataset_name == SESSIONS:
        sessions, source = make_sessions(settings, vocab_size)
        return _Load(
            turn_count(sessions),
            lengths_of_first_turns(sessions),
            lambda on_end: client.replay(sessions, source, on_end),
        )
    workload = make_workload(settings, vocab_size)
    return _Load(len(workload), lengths_of(workload), lambda on_end: client.run(workload, on_end))


def _ignore(outcome: Outcome) -> None:
    pass


def _load_tokenizer(directory: Path | None) -> Tokenizer | None:
    if directory is None:
        return None
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"--tokenizer {directory}: must be a directory with a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as exc:  # what the library raises for a bad file
        raise ConfigError(f"--tokenizer {directory}: {path.name} can't be read: {exc}") from exc


async def _choose_dialect(settings: Settings, tokenizer: Tokenizer | None) -> Dialect:
    if settings.backend == "sglang":
        return SglangDialect(settings)
    model = settings.model
    if not model:
        model = (await _get(settings, "/v1/models", _Models, "--model")).data[0].id
    if settings.backend == "openai":
        return OpenAiDialect(settings, model, None)
    assert tokenizer is not None, "the settings were checked"
    return OpenAiDialect(settings, model, _decoder_of(tokenizer))


def _decoder_of(tokenizer: Tokenizer) -> Decode:
    def decode(token_ids: tuple[int, ...]) -> str:
        return str(tokenizer.decode(list(token_ids)))

    return decode


async def _ask_vocab_size(settings: Settings) -> int:
    flag = "--vocab-size or --tokenizer"
    vocab_size = (await _get(settings, "/server_info", _ServerInfo, flag)).vocab_size
    if vocab_size is None:
        raise ConfigError(
            f"{settings.url}/server_info does not name the size of the vocabulary: give {flag}"
        )
    return vocab_size


async def _get(settings: Settings, path: str, kind: type[T], flag: str) -> T:
    """Raises: ConfigError that names the flag which makes the question unnecessary."""
    try:
        return msgspec.json.decode(await _ask(settings, "GET", path), type=kind)
    except ConfigError as exc:
        raise ConfigError(f"{exc}: give {flag}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"{settings.url}{path} gave an answer that can't be read ({exc}): give {flag}"
        ) from exc


async def _flush_cache(settings: Settings) -> None:
    try:
        await _ask(settings, "POST", "/flush_cache")
    except ConfigError as exc:
        raise ConfigError(f"--flush-cache: {exc}") from exc


async def _ask(settings: Settings, method: str, path: str) -> bytes:
    """Raises: ConfigError if there is no good answer."""
    url = settings.url + path
    try:
        async with (
            aiohttp.ClientSession(
                headers=headers_of(settings), timeout=aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
            ) as session,
            session.request(method, url) as response,
        ):
            response.raise_for_status()
            return await response.read()
    except TimeoutError as exc:
        raise ConfigError(f"{url} can't be asked (no answer in {ASK_TIMEOUT_S:g} s)") from exc
    except (aiohttp.ClientError, OSError) as exc:
        raise ConfigError(f"{url} can't be asked ({exc})") from exc


def _write_result(settings: Settings, summary: Summary, run: Run) -> None:
    if settings.result_file is None:
        return
    result: dict[str, object] = {"settings": settings.shown(), **asdict(summary)}
    if settings.save_detailed:
        result["requests"] = [request_fields(outcome) for outcome in run.outcomes]
    try:
        settings.result_file.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    except OSError as exc:
        raise ConfigError(
            f"--result-file {settings.result_file}: can't be written: {exc.strerror}"
        ) from exc


def _draw(settings: Settings, run: Run, path: Path) -> None:
    from bench.serve.picture import draw  # only now: matplotlib takes half a second to load

    title = f"{settings.dataset_name}, {len(run.outcomes)} requests, {settings.backend}"
    if settings.request_rate is not None:
        title += f", {settings.request_rate:g} per second"
    try:
        draw(run, title, path)
    except OSError as exc:
        raise ConfigError(f"--picture {path}: can't be written: {exc.strerror}") from exc


def print_summary(summary: Summary) -> None:
    _print_columns(_figures(summary))
    if summary.latencies:
        names = next(iter(summary.latencies.values()))
        rows = [("ms", *names)]
        for metric in METRICS:
            found = summary.latencies.get(metric)
            if found is not None:
                rows.append((metric.upper(), *(f"{value:.2f}" for value in found.values())))
        _print_columns(rows)
    if summary.turns:
        _print_columns(_turn_rows(summary.turns))
    if summary.errors:
        _print_columns(
            [("error", "requests", "for example")]
            + [
                (kind, str(count), summary.error_examples[kind])
                for kind, count in summary.errors.items()
            ]
        )


def _turn_rows(turns: Sequence[TurnSummary]) -> list[tuple[str, ...]]:
    names = ("turn", "requests", "prompt", "cached", "hit rate", "TTFT p50, ms", "TTFT p99, ms")
    return [
        names,
        *(
            (
                str(one.turn),
                str(one.request_count),
                f"{one.prompt_tokens:.0f}",
                "?" if one.cached_tokens is None else f"{one.cached_tokens:.0f}",
                "?" if one.hit_rate is None else f"{one.hit_rate:.1%}",
                f"{one.ttft_p50:.2f}",
                f"{one.ttft_p99:.2f}",
            )
            for one in turns
        ),
    ]


def _print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    print()


def _figures(summary: Summary) -> list[tuple[str, ...]]:
    good = f"{summary.good_count} of {summary.request_count}"
    concurrency = f"{summary.mean_concurrency:.1f}, at most {summary.peak_concurrency}"
    figures: list[tuple[str, ...]] = [
        ("requests answered", good),
        ("duration", f"{summary.duration_s:.2f} s"),
        ("input tokens", f"{summary.input_token_count} ({summary.input_throughput:.1f} per s)"),
        ("output tokens", f"{summary.output_token_count} ({summary.output_throughput:.1f} per s)"),
        ("requests per s", f"{summary.request_throughput:.2f}"),
        ("under way", concurrency),
        ("sent late, p99", f"{summary.late_ms:.2f} ms"),
        ("held back, p99", f"{summary.held_ms:.2f} ms"),
        ("client's lag, p99", f"{summary.lag_ms:.2f} ms"),
    ]
    if summary.cached_token_count is not None and summary.hit_rate is not None:
        cached = f"{summary.cached_token_count} ({summary.hit_rate:.1%} of input tokens)"
        figures.append(("cached tokens", cached))
    if summary.unsent_count:
        figures.append(("turns not sent", f"{summary.unsent_count}, behind one that failed"))
    if summary.goodput is not None:
        figures.append(("good requests per s", f"{summary.goodput:.2f}"))
    return figures


if __name__ == "__main__":
    sys.exit(main())
