"""Records a rank's decode passes before it is ready, where that is possible."""

from __future__ import annotations

import logging

from common.config import ServerConfig
from common.engine.attention.choose import AttentionChoice
from common.engine.cuda_graphs import CudaRecorder, recorded_sizes
from common.engine.decode_graphs import DecodeGraphs
from common.engine.kernel_trial import KERNEL_FAILURES
from common.engine.kv_pool import KvPool
from common.engine.models.causal_lm import CausalLm

log = logging.getLogger(__name__)


def start_graphs(
    config: ServerConfig,
    model: CausalLm,
    pool: KvPool,
    choice: AttentionChoice,
    context_length: int,
) -> tuple[DecodeGraphs | None, str]:
    """(recordings or None, what is recorded or why nothing is; for /server_info).

    Writes to the scratch page only.
    """
    if model.context.device.type != "cuda":
        return None, f"off: the device is {model.context.device.type}"
    if config.disable_cuda_graph:
        return None, "off: --disable-cuda-graph"
    if config.pp_size > 1:
        return None, "off: a pipeline stage waits for another one inside its pass"
    if choice.recordable is None:
        return None, f"off: {choice.attention.name} attention can't be recorded"
    sizes = recorded_sizes(_largest(config))
    try:
        graphs = DecodeGraphs(
            model,
            pool,
            choice.recordable,
            CudaRecorder(model.context.device),
            batch_sizes=sizes,
            token_max=context_length,
        )
    except KERNEL_FAILURES as exc:
        reason = f"off: they can't be recorded: {type(exc).__name__}: {exc}"[:300]
        log.warning("decode passes are launched kernel by kernel, slower: %s", reason)
        return None, reason
    return graphs, f"batches of {sizes[0]} to {sizes[-1]}"


def _largest(config: ServerConfig) -> int:
    running_max = config.max_running_requests
    bound = config.cuda_graph_max_bs
    return bound if running_max is None else min(bound, running_max)
