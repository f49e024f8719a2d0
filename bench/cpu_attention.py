"""Attention over pages on a CPU, against torch's over gathered pages: CPU time of one thread.

A layer of 16 heads of 64 over 8 KV heads, as the Llama of `engine_servers.py` has them. Other
processes of the machine take turns too: what counts is the time that the thread computed.
"""

from __future__ import annotations

import time

import torch

from bench.report import NotRun, Row, at_most, row_of_medians
from common.engine.attention.attention import Attention, AttentionPass
from common.engine.attention.kinds import AttentionKind
from common.engine.attention.paged_cpu import PagedCpuAttention
from common.engine.attention.sdpa import SdpaAttention
from common.engine.attention.trial import random_batch
from common.engine.cache.cast import CACHE_DTYPES
from common.engine.cache.kv_pool import KvPool
from common.layout.cache_layout import ServerLayout
from common.layout.families import gqa_components

KIND = AttentionKind(16, 8, 64)
PAGE_SIZE = 16
# (tokens in the cache before, new tokens) of each sequence.
CASES = {
    "prompt_128": ((0, 128),),
    "prompt_512": ((0, 512),),
    "prompt_2048": ((0, 2048),),
    "chunk_512_behind_1024": ((1024, 512),),
    "decode_16_at_200": ((200, 1),) * 16,
    "decode_16_at_1500": ((1500, 1),) * 16,
}
ROUNDS = 7
ROUND_S = 0.1
RATIO_MAX = 1.0


def run() -> list[Row | NotRun]:
    try:
        paged = PagedCpuAttention([KIND])
    except RuntimeError as exc:
        return [NotRun("cpu_attention", str(exc))]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return [
                _measure(paged, name, lengths, dtype)
                for dtype in ("bfloat16", "float32")
                for name, lengths in CASES.items()
            ]
    finally:
        torch.set_num_threads(threads)


def _measure(paged: Attention, name: str, lengths: tuple[tuple[int, int], ...], dtype: str) -> Row:
    components = gqa_components(
        layer_count=1,
        kv_head_count=KIND.kv_head_count,
        head_dim=KIND.head_dim,
        dtype=dtype,
    )
    page_count = sum(-(-sum(each) // PAGE_SIZE) for each in lengths)
    layout = ServerLayout(components, 1, ((0, 1),), PAGE_SIZE)
    pool = KvPool.allocate(layout.rank(0, 0), [page_count], "cpu")
    pool.buffers[0].view(CACHE_DTYPES[dtype]).normal_()
    batch = random_batch(lengths, pool, torch.device("cpu"))
    heads = (KIND.head_count, KIND.kv_head_count, KIND.kv_head_count)
    parts = tuple(
        torch.randn(batch.token_count, count, KIND.head_dim).to(CACHE_DTYPES[dtype])
        for count in heads
    )
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(ROUNDS):
        ours.append(_us(paged.start(batch, pool), parts))
        theirs.append(_us(SdpaAttention().start(batch, pool), parts))
    row_name = f"cpu_attention_{dtype}_{name}"
    return row_of_medians(row_name, "us", ours, "sdpa", theirs, at_most(RATIO_MAX))


def _us(one: AttentionPass, parts: tuple[torch.Tensor, ...]) -> float:
    """Of a layer once its pass is prepared."""
    query, key, value = parts
    one.attend(0, query, key, value)
    count, began_at = 0, time.thread_time()
    while time.thread_time() - began_at < ROUND_S:
        one.attend(0, query, key, value)
        count += 1
    return 1e6 * (time.thread_time() - began_at) / count
