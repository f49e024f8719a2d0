"""What other systems reached, measured once, by the names that the GPU check's figures have.

Llama-3.1-8B's shape with random weights in bf16 on one card, both servers of a pair on it; a closed
loop over HTTP streaming, random token prompts, prefix caches off, one client for all. Ratios mean
something on the same card only.
"""

from __future__ import annotations

from dataclasses import dataclass

CARD = "NVIDIA H200"
VLLM = "vLLM 0.24.0"
VLLM_PAIR = f"{VLLM} + NIXL 1.5.1 pair"
SGLANG = "SGLang 0.5.16"


@dataclass(frozen=True, slots=True)
class Peer:
    """One system. key: in rows' names. kind: which of ours it is held against.

    figures: name -> number; what it was not asked for, or never finished, is not there.
    """

    key: str
    name: str
    kind: str
    figures: dict[str, float]


def _ttft(short: float, middle: float, long: float) -> dict[str, float]:
    lengths = {128: short, 2048: middle, 8192: long}
    return {f"TTFT p50, {length} tokens, ms": value for length, value in lengths.items()}


def _load(case: str, rate: float, itl_p50: float, itl_p99: float) -> dict[str, float]:
    return {
        f"{case}: output tokens/s": rate,
        f"{case}: ITL p50, ms": itl_p50,
        f"{case}: ITL p99, ms": itl_p99,
    }


ONE_STREAM = "ITL p50, 1 stream, ms"
STREAMS_32, STREAMS_128, LONG = "512/256 x 32", "512/256 x 128", "4096/256 x 32"

PEERS = (
    Peer(
        "vllm",
        f"{VLLM} single",
        "single",
        _ttft(12.4, 55.5, 226.0)
        | {ONE_STREAM: 4.74}
        | _load(STREAMS_32, 4330, 5.7, 9.0)
        | _load(STREAMS_128, 8652, 8.8, 186)
        | _load(LONG, 1487, 9.1, 207),
    ),
    Peer(
        "sglang",
        f"{SGLANG} single",
        "single",
        _ttft(12.3, 52.1, 218.9)
        | {ONE_STREAM: 4.80}
        | _load(STREAMS_32, 4285, 5.8, 7.0)
        | _load(STREAMS_128, 8188, 8.9, 11.3)
        | _load(LONG, 1475, 9.1, 10.4),
    ),
    Peer(
        "vllm",  # with its own defaults
        VLLM_PAIR,
        "pair",
        _ttft(73.6, 735.7, 2904.6)
        | {ONE_STREAM: 4.70}
        | _load(STREAMS_32, 1099, 5.5, 13.2)
        | _load(STREAMS_128, 1297, 6.7, 12.3),
    ),
    Peer(
        "vllm_tuned",  # UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on
        f"{VLLM_PAIR}, tuned",
        "pair",
        _ttft(33.9, 97.6, 357.1)
        | {ONE_STREAM: 4.92}
        | _load(STREAMS_32, 3521, 5.9, 12.7)
        | _load(STREAMS_128, 7008, 9.0, 127)
        | _load(LONG, 1186, 18.1, 116),
    ),
    Peer(
        "sglang",
        f"{SGLANG} + NIXL 1.5.1 pair",
        "pair",
        _ttft(16.8, 56.2, 227.7)
        | {ONE_STREAM: 4.78}
        | _load(STREAMS_32, 2984, 6.2, 13.7)
        | _load(STREAMS_128, 5680, 9.5, 23.3),
    ),
)
