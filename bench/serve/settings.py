"""Settings of the load tool: its flags, spelled as those of `vllm bench serve` and
`sglang.bench_serving` are. Knows nothing of HTTP or of how a load is sent.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from bench.serve.traces.read import FORMATS
from common.errors import ConfigError
from common.flags.values import number

API_KEY_VARIABLE = "BATON_API_KEY"
BACKENDS = ("sglang", "openai", "openai-chat")
SESSIONS = "sessions"
DATASETS = ("random", "shared-prefix", "trace", SESSIONS)
PROMPT_COUNT_DEFAULT = 1000
SESSION_COUNT_DEFAULT = 8
GOALS = ("ttft", "tpot", "itl", "e2el")
PICTURE_SUFFIXES = (".svg", ".png", ".pdf")


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked settings of one run.

    url: root of the server. model: what OpenAI's APIs are asked for; "": the server's first one.
    num_prompts: None: all of a trace, 1000 of anything else.
    num_sessions: None: all of a trace, 8 of drawn ones. max_sessions: under way at a time; None: no
        limit.
    request_rate: arrivals per second, of sessions their beginnings; inf: all at once; None: a
        trace's own. burstiness: shape of the gamma distribution of the gaps between arrivals; 1 is
        a Poisson process, less comes in bursts.
    max_concurrency: requests under way at a time; None: no limit.
    random_range_ratio: lengths are drawn evenly from ratio x length .. length.
    goals: upper limits in ms that a request must keep to count as good.
    extra_body: fields that every body gets.
    """

    backend: str
    url: str
    api_key: str
    model: str
    tokenizer: Path | None
    vocab_size: int | None
    dataset_name: str
    dataset_path: Path | None
    num_prompts: int | None
    seed: int
    random_input_len: int
    random_output_len: int
    random_range_ratio: float
    gsp_num_groups: int
    gsp_system_prompt_len: int
    gsp_question_len: int
    gsp_output_len: int
    trace_format: str | None
    trace_slowdown: float
    trace_block_size: int | None
    num_sessions: int | None
    max_sessions: int | None
    session_turns: int
    session_turn_len: int
    think_time_s: float
    request_rate: float | None
    burstiness: float
    max_concurrency: int | None
    request_timeout_s: float
    ignore_eos: bool
    extra_body: dict[str, object]
    warmup_requests: int
    flush_cache: bool
    percentiles: tuple[float, ...]
    goals: dict[str, float]
    result_file: Path | None
    picture: Path | None
    save_detailed: bool
    has_progress: bool

    def shown(self) -> dict[str, object]:
        """Everything but the key, as it stands in a result file."""
        shown = {
            name: str(value) if isinstance(value, Path) or value == math.inf else value
            for name, value in asdict(self).items()
        }
        del shown["api_key"]
        return shown


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_settings(argv: Sequence[str]) -> Settings:
    """Raises: ConfigError, one line that names the flag, the value and what is allowed."""
    parser = _Parser(
        prog="baton-bench",
        description="Sends a load to a server and reports how long its tokens took.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_server_flags(parser)
    _add_dataset_flags(parser)
    _add_session_flags(parser)
    _add_load_flags(parser)
    _add_result_flags(parser)
    given = parser.parse_args(list(argv))
    settings = Settings(
        backend=given.backend,
        url=(given.base_url or f"http://{given.host}:{given.port}").rstrip("/"),
        api_key=given.api_key or os.environ.get(API_KEY_VARIABLE, ""),
        model=given.model,
        tokenizer=given.tokenizer,
        vocab_size=given.vocab_size,
        dataset_name=given.dataset_name,
        dataset_path=given.dataset_path,
        num_prompts=given.num_prompts,
        seed=given.seed,
        random_input_len=given.random_input_len,
        random_output_len=given.random_output_len,
        random_range_ratio=given.random_range_ratio,
        gsp_num_groups=given.gsp_num_groups,
        gsp_system_prompt_len=given.gsp_system_prompt_len,
        gsp_question_len=given.gsp_question_len,
        gsp_output_len=given.gsp_output_len,
        trace_format=given.trace_format,
        trace_slowdown=given.trace_slowdown_factor,
        trace_block_size=given.trace_block_size,
        num_sessions=given.num_sessions,
        max_sessions=given.max_sessions,
        session_turns=given.session_turns,
        session_turn_len=given.session_turn_len,
        think_time_s=given.think_time,
        request_rate=math.inf
        if given.request_rate is None and given.dataset_path is None
        else given.request_rate,
        burstiness=given.burstiness,
        max_concurrency=given.max_concurrency,
        request_timeout_s=given.request_timeout,
        ignore_eos=not given.disable_ignore_eos,
        extra_body=given.extra_request_body,
        warmup_requests=given.warmup_requests,
        flush_cache=given.flush_cache,
        percentiles=given.metric_percentiles,
        goals=dict(given.goodput),
        result_file=given.result_file,
        picture=given.picture,
        save_detailed=given.save_detailed,
        has_progress=not given.disable_tqdm,
    )
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    is_trace = settings.dataset_name == "trace"
    is_session = settings.dataset_name == SESSIONS
    if is_trace and settings.dataset_path is None:
        raise ConfigError("--dataset-name trace: needs --dataset-path FILE, a .jsonl or a .csv")
    if is_trace and settings.request_rate is not None:
        raise ConfigError(
            f"--request-rate {settings.request_rate:g}: a trace has its own arrivals; "
            "--trace-slowdown-factor stretches them"
        )
    if settings.dataset_path is not None and not (is_trace or is_session):
        raise ConfigError(
            f"--dataset-path {settings.dataset_path}: only --dataset-name trace and sessions "
            "read a file"
        )
    if is_session and settings.num_prompts is not None:
        raise ConfigError(
            f"--num-prompts {settings.num_prompts}: --dataset-name sessions takes --num-sessions"
        )
    if not is_session and (settings.num_sessions or settings.max_sessions):
        raise ConfigError("--num-sessions, --max-sessions: only --dataset-name sessions has them")
    if settings.backend == "openai-chat" and settings.tokenizer is None:
        raise ConfigError(
            "--backend openai-chat: needs --tokenizer DIR: a chat is text, prompts are tokens"
        )
    if not settings.url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url {settings.url}: must begin with http:// or https://")


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", choices=BACKENDS, default="sglang", help="the API that is used")
    group.add_argument("--base-url", default="", help="root of the server, instead of the next two")
    group.add_argument("--host", default="127.0.0.1", help="of the decode server, or of a router")
    group.add_argument("--port", type=_integer(1, 65535), default=30001, help="its HTTP port")
    group.add_argument("--api-key", default="", help=f"better in {API_KEY_VARIABLE}")
    group.add_argument("--model", default="", help="for OpenAI's APIs; empty: the server's first")
    group.add_argument(
        "--tokenizer", type=Path, help="directory with a tokenizer.json, for prompts as text"
    )
    group.add_argument(
        "--vocab-size", type=_integer(2, 1 << 24), help="token ids are below; else asked for"
    )


def _add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="see README")
    group.add_argument(
        "--dataset-path", type=Path, help="of a trace: .jsonl, .csv, .json or a directory of these"
    )
    group.add_argument(
        "--trace-format", choices=FORMATS, help="of the trace; else found from the file"
    )
    group.add_argument(
        "--num-prompts", type=_integer(1, 1 << 24), help="trace: all; else 1000 if not given"
    )
    group.add_argument("--seed", type=_integer(0, (1 << 63) - 1), default=1, help="of all draws")
    length = _integer(1, 1 << 24)
    group.add_argument("--random-input-len", type=length, default=1024, help="tokens")
    group.add_argument("--random-output-len", type=length, default=128, help="tokens")
    group.add_argument(
        "--random-range-ratio",
        type=_number(0, 1),
        default=1.0,
        help="lengths are drawn from ratio x length .. length, SGLang's meaning",
    )
    group.add_argument("--gsp-num-groups", type=length, default=64, help="shared prefixes")
    group.add_argument("--gsp-system-prompt-len", type=length, default=2048, help="tokens of one")
    group.add_argument("--gsp-question-len", type=length, default=128, help="tokens behind it")
    group.add_argument("--gsp-output-len", type=length, default=256, help="tokens")
    group.add_argument(
        "--trace-slowdown-factor", type=_number(1e-6, 1e6), default=1.0, help="2: half as fast"
    )
    group.add_argument(
        "--trace-block-size",
        type=length,
        help="tokens that one hash id stands for; else as the file says, or 512",
    )


def _add_session_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "sessions",
        "--dataset-name sessions: a prompt is all before it in its session, the server's own "
        "answers too, and new tokens. It leaves when the answer before has ended and its think "
        "time is over. Sessions are those of --dataset-path, or drawn ones.",
    )
    count = _integer(1, 1 << 24)
    group.add_argument("--num-sessions", type=count, help="trace: all; else 8 if not given")
    group.add_argument("--max-sessions", type=count, help="sessions under way at a time")
    group.add_argument("--session-turns", type=count, default=10, help="of a drawn session")
    group.add_argument(
        "--session-turn-len",
        type=count,
        default=64,
        help="new tokens of its later prompts; the first has --random-input-len",
    )
    group.add_argument(
        "--think-time", type=_number(0, 86400), default=0.0, help="seconds, of drawn sessions"
    )


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate",
        type=_number(1e-6, math.inf),
        help="arrivals a second, or beginnings of sessions; inf: at once",
    )
    group.add_argument(
        "--burstiness", type=_number(1e-3, 1e6), default=1.0, help="1: Poisson; less: in bursts"
    )
    group.add_argument(
        "--max-concurrency", type=_integer(1, 1 << 20), help="requests under way at a time"
    )
    group.add_argument(
        "--request-timeout", type=_number(0.001, 86400), default=600.0, help="seconds for one"
    )
    group.add_argument(
        "--disable-ignore-eos", action="store_true", help="let the model end before its length"
    )
    group.add_argument(
        "--extra-request-body", type=_json_object, default={}, help="JSON, added to every body"
    )
    group.add_argument(
        "--warmup-requests", type=_integer(0, 1 << 16), default=1, help="sent before, not counted"
    )
    group.add_argument("--flush-cache", action="store_true", help="POST /flush_cache before")


def _add_result_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument(
        "--metric-percentiles", type=_percentiles, default=(50.0, 90.0, 95.0, 99.0), help="of 100"
    )
    group.add_argument(
        "--goodput",
        type=_goal,
        nargs="+",
        default=[],
        metavar="KEY:MS",
        help=f"limits of a good request, of {', '.join(GOALS)}; itl: its longest gap",
    )
    group.add_argument("--result-file", type=Path, help="JSON")
    group.add_argument("--save-detailed", action="store_true", help="every request in it as well")
    group.add_argument("--picture", type=_picture, help="curves and timeline: .svg, .png or .pdf")
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"{text}: must be an integer in {low}..{high}")
        return int(text)

    return parse


def _number(low: float, high: float) -> Callable[[str], float]:
    check = number(low, high)

    def parse(text: str) -> float:
        try:
            return check(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(f"{text}: {exc}") from exc

    return parse


def _percentiles(text: str) -> tuple[float, ...]:
    parse = _number(0, 100)
    return tuple(sorted({parse(part) for part in text.split(",")}))


def _goal(text: str) -> tuple[str, float]:
    key, _, value = text.partition(":")
    if key not in GOALS:
        raise argparse.ArgumentTypeError(f"{text}: must be KEY:MS, KEY one of {', '.join(GOALS)}")
    return key, _number(0, 1e9)(value)


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in PICTURE_SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text}: must end with {', '.join(PICTURE_SUFFIXES)}")
    return path


def _json_object(text: str) -> dict[str, object]:
    try:
        value = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, msgspec.ValidationError) as exc:
        raise argparse.ArgumentTypeError(f"{text}: must be a JSON object: {exc}") from exc
    return value
