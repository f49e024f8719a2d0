"""What one rank runs in the tests of parallel ranks. Imports no transformers, which is slow."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from common.engine.distributed import ParallelContext
from common.engine.loader import load_model
from tests.engine.paged_decoding import Sequence, make_batch, make_pool, shuffled_pages

CHUNKS = (20, 13, 1, 1)
TOPOLOGIES = ((2, 1), (1, 2))
# A rank that failed leaves the other waiting this long at most.
TIMEOUT_S = 60.0
PASS_TIMEOUT_S = 61.0


def compute(path: Path, prompt: list[int], parallel: ParallelContext) -> Tensor | None:
    """Logits of every token of CHUNKS; None on a rank that has none."""
    model = load_model(path, parallel=parallel)
    pool = make_pool(model, 8)
    sequence = Sequence(prompt, shuffled_pages(8, 5))
    parts: list[Tensor] = []
    for size in CHUNKS:
        chunk = sequence.chunk(size, all_logits=True)
        logits = model.forward(make_batch(pool, [chunk]), pool)
        if logits is not None:
            parts.append(logits)
    return torch.cat(parts) if parts else None


def run_rank(rank: int, paths: list[Path], prompt: list[int], shared: Path) -> None:
    """Every topology of two ranks: join, compute every checkpoint, leave the logits behind."""
    torch.set_num_threads(1)
    for tp_size, pp_size in TOPOLOGIES:
        parallel = ParallelContext.join(
            rank=rank,
            tp_size=tp_size,
            pp_size=pp_size,
            backend="gloo",
            init_method=f"file://{shared / f'meeting-{tp_size}-{pp_size}'}",
            meet_timeout_s=TIMEOUT_S,
            pass_timeout_s=PASS_TIMEOUT_S,
        )
        timeouts = shared / f"timeouts-{tp_size}-{pp_size}-{rank}"
        timeouts.write_text(json.dumps(group_timeouts_s(parallel)))
        assert parallel.least(9 - rank, torch.device("cpu")) == 8
        (shared / f"here-{tp_size}-{pp_size}-{rank}").touch()
        parallel.wait_for_ranks(torch.device("cpu"))
        assert len(list(shared.glob(f"here-{tp_size}-{pp_size}-*"))) == 2, "a rank did not wait"
        logits = [compute(path, prompt, parallel) for path in paths]
        torch.save(logits, shared / f"logits-{tp_size}-{pp_size}-{rank}.pt")
        parallel.leave()


def group_timeouts_s(parallel: ParallelContext) -> list[float]:
    """Of the group of all ranks, and of the stage's if there is one."""
    groups = [dist.group.WORLD, parallel.tp_group]
    return [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for group in groups
        if group is not None
    ]
