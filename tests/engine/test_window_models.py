"""Models with windows under the real scheduling: recycled pages, chunks, several at a time.

`Batcher` and `PageAccount` give pages out and take them back as a server does, over a pool so small
that every page of a window group is used many times; tokens must still be transformers'.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.clock import ManualClock
from common.engine.cache.kv_pool import KvPool
from common.engine.loader import load_model
from common.engine.model_runner import ModelRunner
from common.engine.models.registry import cache_components
from common.layout.cache_layout import ServerLayout
from common.layout.component import LiveKind
from common.request import SamplingParams
from common.scheduling.batch_limits import BatchLimits
from common.scheduling.batcher import Batcher
from common.scheduling.page_account import PageAccount
from common.scheduling.sequence import Sequence
from tests.engine.tiny_checkpoints import Reference, random_prompt

Checkpoints = Callable[[str], Path]
TOKEN_COUNT = 64
LENGTHS = (1, 9, 25, 140)  # within every window, at the ends of some, and many times as long


@pytest.mark.slow
@pytest.mark.parametrize("chunk_token_max", [7, 64])
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("name", ["mistral_window", "gemma2", "gemma3"])
def test_recycled_pages_do_not_change_tokens(
    name: str, page_size: int, chunk_token_max: int, tiny_checkpoint: Checkpoints
) -> None:
    model = load_model(tiny_checkpoint(name))
    layers = ((0, model.config.layer_count),)
    layout = ServerLayout(cache_components(model.config, "auto"), 1, layers, page_size)
    windows = [g for g, group in enumerate(layout.groups) if group.live.kind is LiveKind.WINDOW]
    counts = [200] * len(layout.groups)
    for group in windows:
        # Every request's window, and one small chunk.
        width = layout.groups[group].live.size
        counts[group] = len(LENGTHS) * (-(-width // page_size) + 1) + -(-7 // page_size)
    pool = KvPool.allocate(layout.rank(0, 0), counts, "cpu")
    for buffer in pool.buffers:
        buffer.view(torch.float32).fill_(float("nan"))
    runner = ModelRunner(model, pool, ManualClock())
    account = PageAccount(
        layout.groups, counts, has_prefix_cache=True, chunk_token_max=chunk_token_max
    )
    batcher = Batcher(account, BatchLimits(chunk_token_max, 8, 1024, frozenset()))
    sampling = SamplingParams(max_new_tokens=TOKEN_COUNT, temperature=0.0, ignore_eos=True, seed=0)
    waiting = [
        (request_id, random_prompt(length, request_id))
        for request_id, length in enumerate(LENGTHS, 1)
    ]
    prompts = dict(waiting)
    outputs: dict[int, list[int]] = {}
    used: list[set[int]] = [set() for _ in counts]
    granted = [0] * len(counts)
    while len(outputs) < len(LENGTHS):
        for request_id, prompt in list(waiting):
            sequence = account.open(request_id, list(prompt), len(prompt), sampling)
            if sequence is not None:
                batcher.add(sequence)
                waiting.remove((request_id, prompt))
        planned = batcher.plan_step()
        assert planned.step is not None and not planned.retracted
        for grant in planned.step.grants:
            used[grant.group].update(grant.page_ids)
            granted[grant.group] += len(grant.page_ids)
        for token in batcher.apply_done(runner.run(planned.step)).tokens:
            if token.finish is not None:
                finish(batcher, token.sequence, outputs)
        account.pool.check()
    reference = Reference.load(tiny_checkpoint(name))
    for request_id, output in outputs.items():
        assert len(output) == TOKEN_COUNT
        assert reference.continues(prompts[request_id], output) == output
    assert [account.pool.free_count(group) for group in range(len(counts))] == counts
    for group in windows:
        assert granted[group] > len(used[group]), "no page was used twice"


def finish(batcher: Batcher, sequence: Sequence, outputs: dict[int, list[int]]) -> None:
    outputs[sequence.request_id] = sequence.token_ids[sequence.prompt_count :]
    batcher.remove(sequence)
