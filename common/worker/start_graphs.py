"""Records a rank's decode passes before it is ready, where that is possible.

Recordings share the device's memory with weights and pool, so their memory is measured before the
pool takes the rest. So they are made twice, first over a pool of one page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.config import DEFAULT_MAX_RUNNING_REQUESTS, Role, ServerConfig
from common.engine.attention.choose import AttentionChoice
from common.engine.cache.kv_pool import KvPool
from common.engine.graphs.cuda_graphs import CudaRecorder, recorded_sizes
from common.engine.graphs.decode_graphs import DecodeGraphs
from common.engine.kernel_trial import KERNEL_FAILURES, give_memory_back
from common.engine.models.causal_lm import CausalLm
from common.layout.cache_layout import RankLayout

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The passes to record.

    sizes: of batches, ascending; empty if none is recorded. nbytes: of torch's memory that
    recordings keep. summary: for /server_info, with the reason if none is recorded.
    """

    sizes: tuple[int, ...]
    nbytes: int
    summary: str


def why_not_recorded(config: ServerConfig, device: torch.device) -> str:
    """The reason why a rank records no decode passes, its attention left out; "" if it may."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if config.role is Role.PREFILL and not config.enable_role_switch:
        return "a prefill server decodes nothing"
    if config.disable_cuda_graph:
        return "--disable-cuda-graph"
    if config.speculative_algorithm.has_draft:
        return "a draft reads the hidden states of every pass"
    if config.pp_size > 1:
        return "a pipeline stage waits for another one inside its pass"
    return ""


def plan_graphs(
    config: ServerConfig,
    model: CausalLm,
    layout: RankLayout,
    choice: AttentionChoice,
    context_length: int,
) -> GraphPlan:
    """Try all recordings over a pool of one page, and measure their memory."""
    device = model.context.device
    reason = why_not_recorded(config, device)
    if not reason and choice.recordable is None:
        reason = f"{choice.attention.name} attention can't be recorded"
    if reason:
        return GraphPlan((), 0, f"off: {reason}")
    sizes = tuple(recorded_sizes(largest_batch(config)))

    def record() -> DecodeGraphs:
        pool = KvPool.allocate(layout, [1] * len(layout.groups), device)
        return _record(sizes, model, pool, choice, context_length)

    try:
        nbytes = kept_nbytes(
            record,
            lambda: torch.cuda.memory_reserved(device),
            lambda: give_memory_back(device),
        )
    except KERNEL_FAILURES as exc:
        plan = _failed(exc)
    else:
        plan = GraphPlan(sizes, nbytes, f"batches of {sizes[0]} to {sizes[-1]}, {nbytes >> 20} MiB")
    give_memory_back(device)
    return plan


def start_graphs(
    plan: GraphPlan, model: CausalLm, pool: KvPool, choice: AttentionChoice, context_length: int
) -> tuple[DecodeGraphs | None, GraphPlan]:
    """(recordings or None, the plan as it came out). Writes to the scratch page only."""
    if not plan.sizes:
        return None, plan
    graphs: DecodeGraphs | None = None
    try:
        graphs = _record(plan.sizes, model, pool, choice, context_length)
    except KERNEL_FAILURES as exc:
        plan = _failed(exc)
    # Of the passes before each recording, on a stream that is not used again.
    give_memory_back(model.context.device)
    return graphs, plan


def kept_nbytes(
    make: Callable[[], object], reserved: Callable[[], int], give_back: Callable[[], None]
) -> int:
    """Bytes that the result of `make` keeps while it lives.

    reserved: bytes of the device that this process holds. give_back: releases the unused ones.
    """
    give_back()
    before = reserved()
    made = make()
    give_back()
    taken = reserved() - before
    del made
    return max(0, taken)


def _record(
    sizes: tuple[int, ...],
    model: CausalLm,
    pool: KvPool,
    choice: AttentionChoice,
    context_length: int,
) -> DecodeGraphs:
    assert choice.recordable is not None
    recorder = CudaRecorder(model.context.device)
    return DecodeGraphs(
        model, pool, choice.recordable, recorder, batch_sizes=sizes, token_max=context_length
    )


def _failed(exc: Exception) -> GraphPlan:
    reason = f"off: recording failed: {type(exc).__name__}: {exc}"[:300]
    log.warning("decode passes are not recorded, which is slower: %s", reason)
    return GraphPlan((), 0, reason)


def largest_batch(config: ServerConfig) -> int:
    """Of those that are recorded: no batch is larger than the requests that may run, each with as
    many rows as are verified of it. Without a wish, a row for each is enough."""
    running_max = config.max_running_requests or DEFAULT_MAX_RUNNING_REQUESTS
    row_max = running_max * (1 + config.verified_max)
    return min(config.cuda_graph_max_bs or running_max, row_max)
