"""The demo pair as a client sees it: what a transfer costs beyond the wire, and its memory.

Overhead is counted from the first token being ready on the prefill server to the client having it,
less the bytes at the best bandwidth of the run. The time before the prompt's computation
starts (HTTP, tokenizer) can't be separated from outside and is counted as overhead too.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import httpx
import msgspec

from bench.report import Row, at_most
from demo.__main__ import CHECKPOINT, Reply, TransferTimes
from demo.facts import make_question
from demo.servers import Pair

REQUEST_COUNT = 60
WARM_UP_COUNT = 10
TARGET_MS = 10.0
FACT_COUNTS = (4, 16, 40, 60)
CHUNK_SIZE = 64
FOUR_CHUNKS_FACT_COUNT = 40  # 251 tokens


def run() -> list[Row]:
    with Pair(CHECKPOINT, say=_say) as pair:
        with httpx.Client(base_url=pair.decode.url, timeout=60.0) as client:
            samples = [
                _ask(client, index, FACT_COUNTS[index % len(FACT_COUNTS)])
                for index in range(REQUEST_COUNT)
            ][WARM_UP_COUNT:]
        memory = _memory_rows(pair.decode.process.pid)
    bandwidth = max(transfer.nbytes / transfer.wire_s for _, transfer in samples)
    overhead_ms = [1e3 * (seconds - h.nbytes / bandwidth) for seconds, h in samples]
    p50 = statistics.median(overhead_ms)
    return [
        Row("transfer_overhead_p50", p50, "ms", samples=len(samples), target=at_most(TARGET_MS)),
        _hidden_row(),
        *memory,
    ]


def _say(line: str) -> None:
    print(line, flush=True)


def _hidden_row() -> Row:
    """Share of the bytes that are at the target before the last layer of the last chunk is done."""
    chunks = ("--chunked-prefill-size", str(CHUNK_SIZE), "--layer-group-count", "3")
    with (
        Pair(CHECKPOINT, prefill_args=chunks, say=_say) as pair,
        httpx.Client(base_url=pair.decode.url, timeout=60.0) as client,
    ):
        transfers = [_ask(client, index, FOUR_CHUNKS_FACT_COUNT)[1] for index in range(20)]
    shares = [1 - h.exposed_nbytes / h.nbytes for h in transfers]
    value = statistics.median(shares)
    return Row("transfer_hidden_share_4_chunks", value, "of bytes", samples=len(shares))


def _ask(client: httpx.Client, index: int, fact_count: int) -> tuple[float, TransferTimes]:
    """(seconds from the first token on prefill to the client, the transfer's account)."""
    question = make_question(5000 + index, fact_count)
    sampling = {"temperature": 0, "max_new_tokens": 4}
    body = {"text": question.prompt, "sampling_params": sampling, "stream": True}
    first_at = 0.0
    last = ""
    started_at = time.perf_counter()
    with client.stream("POST", "/generate", json=body) as response:
        for line in response.iter_lines():
            payload = line.removeprefix("data: ")
            if payload and payload != "[DONE]":
                first_at = first_at or time.perf_counter()
                last = payload
    stages = msgspec.json.decode(last, type=Reply).meta_info.timeline
    assert stages is not None
    transfer = stages.transfer
    computed_s = stages.reserve_s + transfer.queue_s + transfer.prefill_s
    return first_at - started_at - computed_s, transfer


def _memory_rows(supervisor_pid: int) -> list[Row]:
    """Resident memory of each process of a server, by what it is."""
    children = Path(f"/proc/{supervisor_pid}/task/{supervisor_pid}/children").read_text().split()
    rows: list[Row] = []
    for pid in children:
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        module = next(part for part in command if "_process" in part or part.startswith("common."))
        kind = "scheduler" if "scheduler" in module else module.removeprefix("common.")
        status = Path(f"/proc/{pid}/status").read_text()
        kib = next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1]
        rows.append(Row(f"rss_{kind}", int(kib) / 1024, "MiB"))
    return sorted(rows, key=lambda row: row.name)
