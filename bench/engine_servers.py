"""Servers beside vLLM's CPU build: one alone on two cores, and pairs with a core for each half.

A Llama of 220M parameters in bf16 with random weights, prompts of random tokens, no prefix cache,
one client for all. They take turns; vLLM is stopped meanwhile.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np

from bench import vllm_cpu
from bench.deployment import missing_cores
from bench.report import NotRun, Row, Target, at_least, at_most, row_of_medians
from bench.reuse_models import COMMON, ReuseModel, written
from demo.servers import Server, free_ports, start_server, stop_servers, wait_ready

VOCAB_SIZE = 32000
LAYERS, KV_HEADS, HEAD_DIM = 12, 8, 64
LLAMA = ReuseModel(
    "llama",
    COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "torch_dtype": "bfloat16",
    },
    token_nbytes=LAYERS * 2 * KV_HEADS * HEAD_DIM * 2,
)
FLAGS = (*("--load-format", "dummy", "--disable-radix-cache", "--max-total-tokens", "32768"),)
CORES = ("0", "1")
PROMPTS = (128, 512, 2048)
STREAMS = (1, 8, 16)
STREAM_PROMPT, STREAM_OUTPUT = 64, 64
ROUNDS = 5
TIMEOUT_S = 120.0
ALONE_RATIO = 1.0
PAIR_TTFT_RATIO_MAX = 1.1


@dataclass(frozen=True, slots=True)
class Asked:
    """What is measured. url: that streams.

    vllm: its servers, stopped while others are measured; of two, the first is asked first.
    """

    url: str
    vllm: Sequence[Server] = ()


@dataclass(slots=True)
class Found:
    """Samples: ms to the first token by prompt length; of each number of streams, ms between tokens
    and tokens per second."""

    ttft: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in PROMPTS})
    itl: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in STREAMS})
    rate: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in STREAMS})


def run() -> list[Row | NotRun]:
    if why := missing_cores():
        return [NotRun("engine_servers", why)]
    with ExitStack() as stack:
        model = stack.enter_context(written(LLAMA))
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        python, nixl = vllm_cpu.find_python("vllm"), vllm_cpu.find_python("nixl")
        starts: dict[str, Callable[[], Asked]] = {
            "alone": lambda: stack.enter_context(_alone(model, logs)),
            "pair": lambda: stack.enter_context(_pair(model, logs, "2", split=False)),
            "split": lambda: stack.enter_context(_pair(model, logs, "1", split=True)),
        }
        if python is not None:
            starts["vllm"] = lambda: stack.enter_context(_vllm(python, model, ("0-1",), logs))
        if python is not None and nixl is not None:
            starts["vllm_pair"] = lambda: stack.enter_context(_vllm(python, model, CORES, logs))
        asked = {name: start() for name, start in starts.items()}
        found = {name: Found() for name in asked}
        for number in range(-1, ROUNDS):
            for name in list(found):
                sample = found[name] if number >= 0 else Found()  # the first one warms
                try:
                    with _awake(asked[name].vllm):
                        asyncio.run(_measure(asked[name], sample, seed=number + 1))
                except TimeoutError:
                    if not asked[name].vllm:
                        raise
                    del found[name]
    return _rows(found, asked)


def _rows(found: Mapping[str, Found], asked: Collection[str]) -> list[Row | NotRun]:
    """asked: all of whom some may not have answered in time."""
    alone, pair, split = (found[name] for name in ("alone", "pair", "split"))
    rows: list[Row | NotRun] = [
        *_beside("engine_alone", alone, "vllm-cpu", found.get("vllm"), strict=True),
        *_beside("engine_pair", split, "vllm-cpu with NIXL", found.get("vllm_pair"), strict=False),
    ]
    rows += [
        row_of_medians(
            f"pair_ttft_{count}", "ms", pair.ttft[count], "alone", alone.ttft[count],
            at_most(PAIR_TTFT_RATIO_MAX),
        )
        for count in PROMPTS
    ]  # fmt: skip
    for name, what, where in (
        ("vllm", "engine_alone beside vllm-cpu", vllm_cpu.WHERE),
        ("vllm_pair", "engine_pair beside vllm-cpu", f"{vllm_cpu.WHERE} and nixl"),
    ):
        if name not in found:
            is_late = name in asked
            rows.append(NotRun(what, f"no answer in {TIMEOUT_S:.0f} s" if is_late else where))
    return rows


def _beside(
    name: str, ours: Found, peer: str, theirs: Found | None, *, strict: bool
) -> Iterator[Row]:
    """strict: whether there are targets."""
    reference = peer if theirs is not None else None
    other = theirs or Found()

    def row(what: str, unit: str, a: Sequence[float], b: Sequence[float], target: Target) -> Row:
        wanted = target if strict and reference else None
        return row_of_medians(f"{name}_{what}", unit, a, reference, b, wanted)

    for count in PROMPTS:
        ttft = ours.ttft[count], other.ttft[count]
        yield row(f"ttft_{count}", "ms", *ttft, at_most(ALONE_RATIO))
    for count in STREAMS:
        yield row(f"itl_{count}", "ms", ours.itl[count], other.itl[count], at_most(ALONE_RATIO))
    last = STREAMS[-1]
    yield row(
        f"tokens_{last}", "tokens/s", ours.rate[last], other.rate[last], at_least(ALONE_RATIO)
    )


# ---- servers -------------------------------------------------------------------------------------


@contextmanager
def _alone(model: Path, logs: Path) -> Iterator[Asked]:
    (port,) = free_ports(1)
    with _baton(
        [
            start_server(
                "decode", port, "--prefill", "none", "--cpu-threads", "2", *FLAGS,
                model_path=model, log_dir=logs, name="alone",
            )
        ]
    ) as servers:  # fmt: skip
        yield Asked(servers[0].url)


@contextmanager
def _pair(model: Path, logs: Path, threads: str, *, split: bool) -> Iterator[Asked]:
    """split: each half has a core."""
    bootstrap, *ports = free_ports(3)
    meets = (("--bootstrap-port", str(bootstrap)), ("--prefill", f"127.0.0.1:{bootstrap}"))
    servers = [
        start_server(
            role, port, *meet, "--cpu-threads", threads, *FLAGS, model_path=model, log_dir=logs,
            name=f"{role}-{threads}", prefix=("taskset", "--cpu-list", core) if split else (),
        )
        for role, port, meet, core in zip(("prefill", "decode"), ports, meets, CORES, strict=True)
    ]  # fmt: skip
    with _baton(servers):
        yield Asked(servers[1].url)


@contextmanager
def _baton(servers: list[Server]) -> Iterator[list[Server]]:
    try:
        for server in servers:
            wait_ready(server, lambda _: None)
        yield servers
    finally:
        stop_servers(servers)


@contextmanager
def _vllm(python: str, model: Path, cores: Sequence[str], logs: Path) -> Iterator[Asked]:
    with vllm_cpu.started(python, model, cores, logs) as servers:
        yield Asked(servers[-1].url, servers)


@contextmanager
def _awake(servers: Sequence[Server]) -> Iterator[None]:
    for server in servers:
        vllm_cpu.resume(server)
    try:
        yield
    finally:
        for server in servers:
            vllm_cpu.pause(server)


# ---- the client ----------------------------------------------------------------------------------


async def _measure(asked: Asked, found: Found, seed: int) -> None:
    """One sample of each figure."""
    rng = np.random.default_rng(seed)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        stream = partial(_stream, http, asked)
        for count in PROMPTS:
            sent_at = time.perf_counter()
            arrivals = await stream(_prompt(rng, count), 2)
            found.ttft[count].append(1e3 * (arrivals[0] - sent_at))
        for count in STREAMS:
            sent_at = time.perf_counter()
            prompts = [_prompt(rng, STREAM_PROMPT) for _ in range(count)]
            streams = await asyncio.gather(*(stream(one, STREAM_OUTPUT) for one in prompts))
            took_s = time.perf_counter() - sent_at
            gaps = np.concatenate([np.diff(arrivals) for arrivals in streams])
            found.itl[count].append(1e3 * statistics.median(gaps.tolist()))
            found.rate[count].append(count * STREAM_OUTPUT / took_s)


def _prompt(rng: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = rng.integers(3, VOCAB_SIZE, size=count).tolist()
    return tokens


async def _stream(
    http: aiohttp.ClientSession, asked: Asked, prompt: list[int], count: int
) -> list[float]:
    """When each event of an answer of `count` tokens came."""
    path, body = await _request(http, asked, prompt, count)
    arrivals: list[float] = []
    async with http.post(f"{asked.url}{path}", json={**body, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                arrivals.append(time.perf_counter())
    if len(arrivals) < min(count, 2):
        raise RuntimeError(f"{asked.url} streamed {len(arrivals)} events of {count} tokens")
    return arrivals


async def _request(
    http: aiohttp.ClientSession, asked: Asked, prompt: list[int], count: int
) -> tuple[str, dict[str, object]]:
    """Path and body. Of each the API that has an event for every token, text or none."""
    sampling = {"temperature": 0.0, "ignore_eos": True}
    if not asked.vllm:
        sampling_params = {"max_new_tokens": count, **sampling}
        return "/generate", {"input_ids": prompt, "sampling_params": sampling_params}
    path = "/v1/completions"
    body = {"model": vllm_cpu.MODEL_NAME, "prompt": prompt, "max_tokens": count, **sampling}
    if len(asked.vllm) > 1:
        told = {"max_tokens": 1, "kv_transfer_params": vllm_cpu.REMOTE_DECODE}
        async with http.post(f"{asked.vllm[0].url}{path}", json={**body, **told}) as response:
            response.raise_for_status()
            body["kv_transfer_params"] = (await response.json())["kv_transfer_params"]
    return path, body
