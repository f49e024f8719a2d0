"""The cost of verified transfers: time to first token, and digests by size.

One prefill server, and a decode server per mode, asked in turns; the client's own clock, from the
request to the first token. Digests: a full one of a 4096-token prompt of a 32-layer model, on one
CPU thread, in GB/s (10^9 bytes) of cache, held against a copy of the same pages.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import torch

from bench.report import Row, row_of_medians
from common.config import Verify
from common.layout.cache_layout import ServerLayout
from common.layout.families import gqa_components
from common.protocol.codec import encode_layout
from common.protocol.digests import Digest
from common.worker.digester import Digester
from demo.__main__ import CHECKPOINT
from demo.facts import make_question
from demo.servers import Server, free_ports, start_server, stop_servers, wait_ready

REQUEST_COUNT = 40
WARM_UP_COUNT = 5
FACT_COUNT = 40  # 251 tokens

TOKEN_COUNT = 4096
PAGE_SIZE = 16
DIGEST_COUNT = 5


def run() -> list[Row]:
    return [*run_digests(), *run_first_tokens()]


def run_first_tokens() -> list[Row]:
    servers: list[Server] = []
    log_dir = Path(tempfile.mkdtemp(prefix="baton-bench-"))
    prefill_port, bootstrap_port, *ports = free_ports(2 + len(Verify))

    def start(role: str, port: int, name: str, *args: str) -> Server:
        server = start_server(role, port, *args, model_path=CHECKPOINT, log_dir=log_dir, name=name)
        servers.append(server)
        return server

    try:
        start("prefill", prefill_port, "prefill", "--bootstrap-port", str(bootstrap_port))
        dial = ("--prefill", f"127.0.0.1:{bootstrap_port}")
        asked = {
            mode: start("decode", port, f"decode-{mode}", *dial, "--verify-transfer", mode)
            for mode, port in zip(Verify, ports, strict=True)
        }
        for server in servers:
            wait_ready(server, print)
        samples: dict[Verify, list[float]] = {mode: [] for mode in Verify}
        with httpx.Client(timeout=60.0) as client:
            # No prompt twice: the prefill server would have its cache.
            for number in range((WARM_UP_COUNT + REQUEST_COUNT) * len(asked)):
                mode = list(asked)[number % len(asked)]
                samples[mode].append(_first_token_ms(client, asked[mode], number))
    finally:
        stop_servers(servers)
    samples = {mode: values[WARM_UP_COUNT:] for mode, values in samples.items()}
    off = samples[Verify.OFF]
    return [
        row_of_medians(f"verify_ttft_{mode}", "ms", values, "off", off)
        for mode, values in samples.items()
    ]


def _first_token_ms(client: httpx.Client, server: Server, index: int) -> float:
    body = {
        "text": make_question(7000 + index, FACT_COUNT).prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 2},
        "stream": True,
    }
    started_at = time.perf_counter()
    first_at = 0.0
    with client.stream("POST", f"{server.url}/generate", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data:") and not first_at:
                first_at = time.perf_counter()
    return 1e3 * (first_at - started_at)


def run_digests() -> list[Row]:
    """Pages in no order, as a pool that was used for a while has them."""
    torch.set_num_threads(1)
    components = gqa_components(layer_count=32, kv_head_count=8, head_dim=64, dtype="bfloat16")
    layout = ServerLayout(components, 1, ((0, 32),), PAGE_SIZE)
    (rank,) = layout.ranks
    page_nbytes, page_count = rank.groups[0].page_nbytes, TOKEN_COUNT // PAGE_SIZE
    pool = torch.randint(0, 256, ((page_count + 1) * page_nbytes,), dtype=torch.uint8)
    pages = 1 + torch.randperm(page_count, generator=torch.Generator().manual_seed(0))
    copied = torch.zeros((page_count, page_nbytes), dtype=torch.uint8)
    digester = Digester([pool], rank)

    def digest(verify: Verify) -> Callable[[], object]:
        page_lists = [(0, pages.tolist())]
        job = Digest(1, encode_layout(layout), False, TOKEN_COUNT, page_lists, verify)
        return lambda: digester.run(job)

    works = {
        "copy": lambda: torch.index_select(pool.view(-1, page_nbytes), 0, pages, out=copied),
        "full": digest(Verify.FULL),
        "sample": digest(Verify.SAMPLE),
    }
    speeds: dict[str, list[float]] = {name: [] for name in works}
    for round_index in range(DIGEST_COUNT + 1):
        for name, work in works.items():
            started_at = time.perf_counter()
            work()
            seconds = time.perf_counter() - started_at
            if round_index:
                speeds[name].append(copied.nbytes / 1e9 / seconds)
    copy = speeds.pop("copy")
    return [
        row_of_medians(f"verify_digest_{name}", "GB/s of cache", values, "copy", copy)
        for name, values in speeds.items()
    ]
