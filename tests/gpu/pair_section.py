"""A prefill and a decode server on one device: the same tokens as one server alone, and how fast.

The model is random: its tokens mean nothing, but greedy ones follow from every byte of the cache,
so a page that was handed over wrongly shows. One request at a time is compared: the kernels are
then given the same shapes on both sides, and must give the same bits.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from demo.servers import Server, free_ports, start_server, stop_servers
from tests.gpu.report import Section

TOKENIZER = Path(__file__).parents[2] / "demo" / "checkpoint"
# The first start on a machine compiles attention kernels, and both servers load at once.
READY_TIMEOUT_S = 420.0
REQUEST_TIMEOUT_S = 300.0
GREEDY_TOKENS = 64
ITL_TOKENS = 256
TTFT_REPEATS = 5
CONCURRENT_COUNT = 16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model with random weights. compared: prompt lengths whose answers must be equal.

    timed: prompt lengths whose first token is timed. itl_prompt: prompt of the timed decode.
    """

    name: str
    config: dict[str, object]
    pool_tokens: int
    compared: tuple[int, ...]
    timed: tuple[int, ...]
    itl_prompt: int

    @property
    def vocab_size(self) -> int:
        return int(str(self.config["vocab_size"]))


LLAMA_8B = ModelShape(
    "Llama-3.1-8B",
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    pool_tokens=65536,
    compared=(1, 15, 16, 17, 300, 2148),
    timed=(128, 2048, 8192),
    itl_prompt=512,
)
# For a rehearsal of this script where there is no GPU.
TINY = ModelShape(
    "tiny",
    LLAMA_8B.config
    | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 4096,
    },
    pool_tokens=8192,
    compared=(1, 15, 16, 17, 300, 2148),
    timed=(128,),
    itl_prompt=64,
)


class HandOver(msgspec.Struct):
    transfer_s: float
    nbytes: int
    run_count: int


class Timeline(msgspec.Struct):
    hand_over: HandOver
    ttft_s: float


class Meta(msgspec.Struct):
    completion_tokens: int
    timeline: Timeline | None = None


class Reply(msgspec.Struct):
    """What is read of an answer of /generate, or of one event of its stream."""

    output_ids: list[int]
    meta_info: Meta


def check_pair_section(section: Section, device: str, shape: ModelShape) -> None:
    section.figure("model", f"{shape.name}, random weights")
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as directory:
        model = write_model(Path(directory), shape)
        with servers(model, device, shape, is_pair=False) as alone:
            expected = greedy(alone, shape)
            for length, tokens in expected.items():
                is_full = len(tokens) == GREEDY_TOKENS
                section.check(f"{length} tokens, alone: answered", is_full, f"{len(tokens)} tokens")
            measure(section, "single", alone, shape)
        with servers(model, device, shape, is_pair=True) as pair:
            describe(section, pair)
            for length, tokens in greedy(pair, shape).items():
                is_equal = tokens == expected[length]
                first = first_difference(tokens, expected[length])
                section.check(
                    f"{length} tokens: the pair's answer is the single server's",
                    is_equal,
                    f"differs from token {first} on",
                )
            answer_together(section, pair, shape, expected)
            measure(section, "pair", pair, shape)
            measure_hand_over(section, pair, shape)


# Servers ------------------------------------------------------------------------------------------


def write_model(directory: Path, shape: ModelShape) -> Path:
    """A checkpoint without weights: its config, and the demo's tokenizer."""
    (directory / "config.json").write_text(json.dumps(shape.config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, directory / name)
    return directory


@dataclass(slots=True)
class Running:
    """Servers that are up; the last one answers."""

    servers: list[Server]
    client: httpx.Client = field(
        default_factory=lambda: httpx.Client(
            timeout=REQUEST_TIMEOUT_S, limits=httpx.Limits(max_connections=CONCURRENT_COUNT)
        )
    )

    @property
    def url(self) -> str:
        return self.servers[-1].url

    def generate(self, prompt: list[int], token_count: int) -> Reply:
        response = self.client.post(f"{self.url}/generate", json=body_of(prompt, token_count))
        assert response.status_code == 200, response.text
        return msgspec.json.decode(response.content, type=Reply)

    def stream_times(self, prompt: list[int], token_count: int) -> list[float]:
        """Seconds from sending to each event that brought new tokens."""
        times: list[float] = []
        body = body_of(prompt, token_count) | {"stream": True}
        started_at = time.perf_counter()
        with self.client.stream("POST", f"{self.url}/generate", json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: ") and not line.endswith("[DONE]"):
                    times.append(time.perf_counter() - started_at)
        return times


@contextmanager
def servers(model: Path, device: str, shape: ModelShape, *, is_pair: bool) -> Iterator[Running]:
    decode_port, prefill_port, bootstrap_port = free_ports(3)
    flags = ["--device", device, "--load-format", "dummy", "--dtype", "bfloat16"]
    flags += ["--max-total-tokens", str(shape.pool_tokens), "--context-length", "16384"]
    # A cached prefix would change the shapes of a pass, and so the last bits.
    flags += ["--disable-radix-cache"]
    log_dir = Path(tempfile.mkdtemp(prefix="baton-gpu-logs-"))
    started: list[Server] = []

    def start(role: str, port: int, *args: str) -> None:
        started.append(start_server(role, port, *args, *flags, model_path=model, log_dir=log_dir))

    try:
        if is_pair:
            start("prefill", prefill_port, "--bootstrap-port", str(bootstrap_port))
        dial = f"127.0.0.1:{bootstrap_port}" if is_pair else "none"
        start("decode", decode_port, "--prefill", dial)
        running = Running(started)
        for server in started:
            wait_ready(server)
        yield running
        running.client.close()
    except Exception as error:
        words = "\n".join(f"{s.name}: {s.last_words()}" for s in started)
        raise RuntimeError(f"{error}\n{words}") from error
    finally:
        stop_servers(started)


def wait_ready(server: Server) -> None:
    """Raises: RuntimeError if the server ends or takes too long."""
    end_at = time.monotonic() + READY_TIMEOUT_S
    while server.process.poll() is None and time.monotonic() < end_at:
        try:
            if httpx.get(f"{server.url}/health", timeout=5.0).status_code == 200:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.2)
    code = server.process.returncode
    what = f"is not ready after {READY_TIMEOUT_S:.0f} s" if code is None else f"ended with {code}"
    raise RuntimeError(f"the {server.name} server {what}")


# Asking -------------------------------------------------------------------------------------------


def body_of(prompt: list[int], token_count: int) -> dict[str, object]:
    sampling = {"temperature": 0.0, "max_new_tokens": token_count, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling}


def prompt_of(length: int, shape: ModelShape, seed: int = 0) -> list[int]:
    """Different tokens for different lengths and seeds; nothing is a prefix of anything."""
    step = 7919 + 2 * seed
    return [
        3 + (length * 31 + seed * 101 + i * step) % (shape.vocab_size - 3) for i in range(length)
    ]


def greedy(running: Running, shape: ModelShape) -> dict[int, list[int]]:
    """Greedy tokens by prompt length, one request at a time."""
    return {
        length: running.generate(prompt_of(length, shape), GREEDY_TOKENS).output_ids
        for length in shape.compared
    }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def answer_together(
    section: Section, running: Running, shape: ModelShape, expected: dict[int, list[int]]
) -> None:
    """All at once: each must be answered in full. In bf16 a batch may round otherwise, so how many
    are equal to the answers of one at a time is a figure, no check."""
    lengths = [shape.compared[i % len(shape.compared)] for i in range(CONCURRENT_COUNT)]
    with ThreadPoolExecutor(CONCURRENT_COUNT) as threads:
        replies = list(
            threads.map(
                lambda length: running.generate(prompt_of(length, shape), GREEDY_TOKENS), lengths
            )
        )
    counts = [len(reply.output_ids) for reply in replies]
    is_full = all(count == GREEDY_TOKENS for count in counts)
    section.check(f"{CONCURRENT_COUNT} at once: all answered in full", is_full, f"{counts}")
    equal_count = sum(
        reply.output_ids == expected[length] for reply, length in zip(replies, lengths, strict=True)
    )
    section.figure("equal to one at a time", f"{equal_count} of {CONCURRENT_COUNT}")


def measure(section: Section, name: str, running: Running, shape: ModelShape) -> None:
    """Time to the first token by prompt length, and between tokens of one stream; in ms."""
    running.stream_times(prompt_of(33, shape, seed=99), 4)
    for length in shape.timed:
        firsts = [
            running.stream_times(prompt_of(length, shape, seed), 2)[0]
            for seed in range(1, TTFT_REPEATS + 1)
        ]
        section.figure(f"{name}: TTFT p50, {length} tokens, ms", statistics.median(firsts) * 1e3)
    times = running.stream_times(prompt_of(shape.itl_prompt, shape, seed=50), ITL_TOKENS)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    section.figure(f"{name}: ITL p50, 1 stream, ms", statistics.median(gaps) * 1e3)
    section.figure(f"{name}: ITL p99, 1 stream, ms", sorted(gaps)[len(gaps) * 99 // 100] * 1e3)
    per_token = (times[-1] - times[0]) / (ITL_TOKENS - 1)
    section.figure(f"{name}: mean per token, ms", per_token * 1e3)


def measure_hand_over(section: Section, running: Running, shape: ModelShape) -> None:
    """What the reply's timeline says of the largest timed prompt."""
    reply = running.generate(prompt_of(shape.timed[-1], shape, seed=70), 2)
    timeline = reply.meta_info.timeline
    section.check("the reply has a timeline", timeline is not None)
    if timeline is not None:
        hand_over = timeline.hand_over
        section.figure("hand-over: bytes", hand_over.nbytes)
        section.figure("hand-over: runs", hand_over.run_count)
        section.figure("hand-over: transfer_s", hand_over.transfer_s)
        section.figure("timeline: ttft_s", timeline.ttft_s)


def describe(section: Section, running: Running) -> None:
    """Which transports and which attention the servers say they use."""
    info = running.client.get(f"{running.url}/server_info").json()
    section.figure("peers", json.dumps(info.get("peers"))[:400])
    section.figure("workers", json.dumps(info.get("workers", info.get("ranks", "")))[:1200])
