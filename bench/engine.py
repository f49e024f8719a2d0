"""The CPU engine against `transformers`' generate: the same checkpoint, prompts and greedy tokens.

Both compute the same sequences together, in one process and by turns, with a worker's settings of
malloc; the runner is driven as a worker drives it, by steps that carry what changed. Before
anything is timed, tokens are compared. Other processes of the machine take turns too: what counts
is the time that the thread computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench import engine_servers
from bench.engine_bound import Products
from bench.report import NotRun, Row, at_least, row_of_medians
from common.clock import SystemClock
from common.engine.cache.kv_pool import KvPool
from common.engine.heap import keep_freed_memory
from common.engine.loader import load_model
from common.engine.model_runner import ModelRunner
from common.engine.models.registry import cache_components
from common.layout.cache_layout import ServerLayout
from common.layout.parallel import split_layers
from common.protocol.worker import NewSequence, PageGrant, PrefillChunk, Step
from common.request import SamplingParams

CHECKPOINT = Path(__file__).parent.parent / "demo" / "checkpoint"
BATCHES = (1, 4, 16)
PROMPT_LENGTH = 128
OUTPUT_LENGTH = 64
PAGE_SIZE = 16
ROUND_COUNT = 7
TARGET_BATCH = 16
GENERATE_RATIO_MIN = 1.3


def run() -> list[Row | NotRun]:
    """The engine by itself, then whole servers (`engine_servers.py`)."""
    return [*_measure_engine(), *engine_servers.run()]


def _measure_engine() -> list[Row]:
    """Tokens generated per second of one thread, prompts included."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        return _measure()
    finally:
        torch.set_num_threads(threads)


def _measure() -> list[Row]:
    reference = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    engine = Engine(max(BATCHES))
    return [row for batch in BATCHES for row in _measure_batch(engine, reference, batch)]


def _measure_batch(engine: Engine, reference: PreTrainedModel, batch: int) -> list[Row]:
    """The engine's row, and one of what could be reached with torch's kernels at most."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(10, 1000, (batch, PROMPT_LENGTH), generator=generator)
    assert engine.generate(prompts.tolist()) == _generate(reference, prompts)
    ours: list[float] = []
    theirs: list[float] = []
    bound: list[float] = []
    products = Products(engine.config, batch, PROMPT_LENGTH, OUTPUT_LENGTH)
    products.run()
    for _ in range(ROUND_COUNT):
        ours.append(_rate(batch, lambda: engine.generate(prompts.tolist())))
        theirs.append(_rate(batch, lambda: _generate(reference, prompts)))
        bound.append(_rate(batch, products.run))
    target = at_least(GENERATE_RATIO_MIN) if batch == TARGET_BATCH else None
    name, theirs_is = f"engine_batch_{batch}", "transformers generate"
    return [
        row_of_medians(name, "tokens/s", ours, theirs_is, theirs, target),
        row_of_medians(f"{name}_products_alone", "tokens/s", bound, theirs_is, theirs),
    ]


def _rate(batch: int, generate: Callable[[], object]) -> float:
    started_at = time.thread_time()
    generate()
    return batch * OUTPUT_LENGTH / (time.thread_time() - started_at)


class Engine:
    """A runner over a pool, driven by the steps of a whole batch."""

    def __init__(self, batch_max: int) -> None:
        model = load_model(CHECKPOINT, dtype="float32")
        self.config = model.config
        layout = ServerLayout(
            components=cache_components(model.config, "auto"),
            tp_size=1,
            stages=split_layers(model.config.layer_count, 1),
            page_size=PAGE_SIZE,
        )
        self._pages_each = -(-(PROMPT_LENGTH + OUTPUT_LENGTH) // PAGE_SIZE)
        pool = KvPool.allocate(layout.rank(0, 0), [batch_max * self._pages_each], "cpu")
        self._runner = ModelRunner(model, pool, SystemClock())

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        ids = list(range(len(prompts)))
        sampling = SamplingParams(
            max_new_tokens=OUTPUT_LENGTH, seed=1, temperature=0.0, ignore_eos=True
        )
        new = [NewSequence(i, prompts[i], PROMPT_LENGTH, sampling) for i in ids]
        grants = [
            PageGrant(
                i, 0, 0, list(range(1 + i * self._pages_each, 1 + (i + 1) * self._pages_each))
            )
            for i in ids
        ]
        chunks = [PrefillChunk(i, 0, PROMPT_LENGTH, True) for i in ids]
        rounds = [self._runner.run(Step(1, new, grants, chunks, [], [])).token_ids]
        for step_id in range(2, OUTPUT_LENGTH + 1):
            rounds.append(self._runner.run(Step(step_id, [], [], [], ids, [])).token_ids)
        self._runner.run(Step(0, [], [], [], [], ids))
        return [list(tokens) for tokens in zip(*rounds, strict=True)]


def _generate(model: PreTrainedModel, prompts: torch.Tensor) -> list[list[int]]:
    output: torch.Tensor = model.generate(  # type: ignore[operator]
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        min_new_tokens=OUTPUT_LENGTH,
        max_new_tokens=OUTPUT_LENGTH,
        eos_token_id=None,
    )
    tokens: list[list[int]] = output[:, PROMPT_LENGTH:].tolist()
    return tokens
