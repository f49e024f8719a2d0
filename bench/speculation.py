"""Verified proposals on a CPU: tokens a second with NGRAM and with the demo model's draft over
without, and the cost of proposals that are never right.

A draft of one layer costs a third of a model of three. So it is measured a second time on the demo
model with idle layers behind its own, as many as small models in use have. They compute in full and
add nothing: tokens, and the share of proposals that is accepted, stay the same.

The demo model answers questions of `demo/facts.py` and goes on behind the answers, greedily, in one
thread, driven by the scheduler's own batcher. Prompts are not timed. Outputs are compared first;
the share of proposals that was accepted has a row of its own, since it decides the speed.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from bench.report import NotRun, Row, Target, at_least, at_most, row_of_medians
from common.clock import SystemClock
from common.engine.cache.kv_pool import KvPool
from common.engine.config.draft import split_stages
from common.engine.draft_loader import read_draft
from common.engine.heap import keep_freed_memory
from common.engine.loader import load_model, read_served_config
from common.engine.model_runner import ModelRunner
from common.engine.models.registry import cache_components
from common.engine.speculation.backoff import Backoff
from common.engine.speculation.ngram import NgramProposer
from common.engine.speculation.proposer import Drawn, Proposer
from common.frontend.text.tokenizer import load_tokenizer
from common.layout.cache_layout import ServerLayout
from common.request import SamplingParams
from common.scheduling.batch_limits import BatchLimits
from common.scheduling.batcher import Batcher
from common.scheduling.page_account import PageAccount
from common.speculative import DEFAULT_DRAFT_P_MIN, DEFAULT_PROPOSAL_MAX, SpeculativeAlgorithm
from demo.facts import make_question

CHECKPOINT = Path(__file__).parent.parent / "demo" / "checkpoint"
DRAFT_CHECKPOINT = CHECKPOINT.parent / "draft_checkpoint"
DRAFT_PROPOSAL_MAX = 1
"""More guesses are slower: a pass of the head takes a third of the time of one of the model."""
DEEP_LAYER_COUNT = 24
DEEP_PROPOSAL_MAX = 3
DEEP_GAINS = {1: 1.6, 4: 1.3}
"""At least, by the number of sequences."""
BATCHES = (1, 4)
OUTPUT_LENGTH = 128
PAGE_SIZE, PAGE_COUNT = 16, 400
ROUND_COUNT, DEEP_ROUND_COUNT = 15, 9
FACT_COUNT = 6
OVERHEAD_MAX = 1.25

Tokens = list[list[int]]


def run() -> list[Row | NotRun]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        rows: list[Row | NotRun] = [row for batch in BATCHES for row in _measure(batch)]
        with tempfile.TemporaryDirectory(prefix="baton-deep-") as directory:
            deep = _deepen(Path(directory))
            return [*rows, *(row for batch in BATCHES for row in _measure_deep(batch, deep))]
    finally:
        torch.set_num_threads(threads)


def _prompts(batch: int) -> Tokens:
    tokenizer = load_tokenizer(str(CHECKPOINT), time.monotonic)
    questions = [make_question(700 + index, FACT_COUNT) for index in range(batch)]
    return [tokenizer.encode(question.prompt) for question in questions]


def _measure(batch: int) -> list[Row]:
    prompts = _prompts(batch)
    plain, ngram = _Engine(), _Engine(NgramProposer())
    expected = plain.generate(prompts)[0]
    texts = [prompt + output for prompt, output in zip(prompts, expected, strict=True)]
    wrong, stubborn = (_Engine(_WrongProposer(texts, is_stubborn=is_so)) for is_so in (False, True))
    draft = _Engine(draft_max=DRAFT_PROPOSAL_MAX)
    for engine in (ngram, draft, wrong, stubborn):
        assert engine.generate(prompts)[0] == expected
    assert wrong.batcher.proposals.total.accepted_count == 0
    engines = {"plain": plain, "ngram": ngram, "draft": draft}
    engines |= {"wrong": wrong, "stubborn": stubborn}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    step_ms: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(ROUND_COUNT):
        for name, engine in engines.items():
            _, seconds, steps = engine.generate(prompts)
            rates[name].append(batch * (OUTPUT_LENGTH - 1) / seconds)
            step_ms[name].append(1e3 * seconds / steps)
    name = f"speculation_batch_{batch}"
    return [
        *_gains(f"{name}_ngram", ngram, rates["ngram"], rates["plain"]),
        *_gains(f"{name}_draft", draft, rates["draft"], rates["plain"]),
        row_of_medians(
            f"{name}_nothing_accepted",
            "ms/step",
            step_ms["wrong"],
            "no proposals",
            step_ms["plain"],
            at_most(OVERHEAD_MAX),
        ),
        row_of_medians(
            f"{name}_nothing_accepted_of_{DEFAULT_PROPOSAL_MAX}_in_every_step",
            "ms/step",
            step_ms["stubborn"],
            "no proposals",
            step_ms["plain"],
        ),
    ]


def _measure_deep(batch: int, checkpoint: Path) -> list[Row]:
    prompts = _prompts(batch)
    plain = _Engine(checkpoint=checkpoint)
    draft = _Engine(checkpoint=checkpoint, draft_max=DEEP_PROPOSAL_MAX)
    rates: tuple[list[float], list[float]] = ([], [])
    assert draft.generate(prompts)[0] == plain.generate(prompts)[0]
    for _ in range(DEEP_ROUND_COUNT):
        for found, engine in zip(rates, (draft, plain), strict=True):
            found.append(batch * (OUTPUT_LENGTH - 1) / engine.generate(prompts)[1])
    name = f"speculation_batch_{batch}_draft_of_{DEEP_LAYER_COUNT}_layers"
    return _gains(name, draft, *rates, at_least(DEEP_GAINS[batch]))


def _deepen(directory: Path) -> Path:
    """The demo checkpoint with layers whose outputs are zero behind its own."""
    config = json.loads((CHECKPOINT / "config.json").read_text())
    own = config["num_hidden_layers"]
    config |= {"num_hidden_layers": DEEP_LAYER_COUNT, "max_window_layers": DEEP_LAYER_COUNT}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(CHECKPOINT / "model.safetensors")
    first = "model.layers.0."
    for layer in range(own, DEEP_LAYER_COUNT):
        for name in [name for name in tensors if name.startswith(first)]:
            tensor = tensors[name]
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor = torch.zeros_like(tensor)
            tensors[f"model.layers.{layer}.{name.removeprefix(first)}"] = tensor.clone()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def _gains(
    name: str,
    engine: _Engine,
    rates: list[float],
    plain: list[float],
    target: Target | None = None,
) -> list[Row]:
    total = engine.batcher.proposals.total
    return [
        row_of_medians(name, "tokens/s", rates, "no proposals", plain, target),
        Row(f"{name}_accepted", total.accepted_count / total.proposed_count, "share"),
        Row(f"{name}_length", 1 + total.accepted_count / total.step_count, "tokens"),
    ]


class _WrongProposer:
    """Proposes no token that will be drawn: as many and as often as NGRAM does in spite of that, or
    as it may in every step."""

    name = "wrong"
    tapped: tuple[int, ...] = ()
    layer_ids: tuple[int, ...] = ()

    def __init__(self, texts: Tokens, *, is_stubborn: bool) -> None:
        self._texts = texts
        self._is_stubborn = is_stubborn
        self._rest: dict[int, list[int]] = {}
        self._backoffs: dict[int, Backoff] = {}
        self._proposed: dict[int, int] = {}

    def add(self, slot: int, token_ids: NDArray[np.int64]) -> None:
        known = token_ids.tolist()
        (text,) = [text for text in self._texts if text[: len(known)] == known]
        self._rest[slot] = text[len(known) :]
        self._backoffs[slot], self._proposed[slot] = Backoff(), 0

    def remove(self, slot: int) -> None:
        del self._rest[slot]

    def note(self, drawn: Drawn) -> None:
        for slot, tokens in zip(drawn.slots, drawn.tokens, strict=True):
            self._backoffs[slot].note(self._proposed[slot], 0)
            del self._rest[slot][: len(tokens)]

    def propose(self, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        return [self._propose(slot, count) for slot, count in zip(slots, counts, strict=True)]

    def _propose(self, slot: int, count: int) -> list[int]:
        limit = count if self._is_stubborn else self._backoffs[slot].limit(count)
        proposed = [abs(token - 1) for token in self._rest[slot][:limit]]
        self._proposed[slot] = len(proposed)
        return proposed


class _Engine:
    """A runner under a batcher, in one thread. draft_max: proposals of the demo model's head."""

    def __init__(
        self,
        proposer: Proposer | None = None,
        *,
        draft_max: int = 0,
        checkpoint: Path = CHECKPOINT,
    ) -> None:
        config = read_served_config(checkpoint, dtype="float32")
        algorithm = SpeculativeAlgorithm.EAGLE3 if draft_max else SpeculativeAlgorithm.OFF
        draft_path = str(DRAFT_CHECKPOINT) if draft_max else ""
        draft = read_draft(config, algorithm, draft_path)
        model = load_model(
            checkpoint, dtype="float32", packs=True, draft=draft, draft_path=draft_path
        )
        layout = ServerLayout(
            components=cache_components(config, "auto", draft),
            tp_size=1,
            stages=split_stages(config, 1, draft),
            page_size=PAGE_SIZE,
        )
        pool = KvPool.allocate(layout.rank(0, 0), [PAGE_COUNT], "cpu")
        self._runner = ModelRunner(
            model, pool, SystemClock(), proposer=proposer, draft_p_min=DEFAULT_DRAFT_P_MIN
        )
        self._account = PageAccount(layout.groups, [PAGE_COUNT], has_prefix_cache=False)
        proposal_max = DEFAULT_PROPOSAL_MAX if proposer is not None else draft_max
        limits = BatchLimits(2048, 64, 4096, frozenset(), proposal_max=proposal_max)
        self.batcher = Batcher(self._account, limits)
        self._next_id = 1

    def generate(self, prompts: Tokens) -> tuple[Tokens, float, int]:
        """Outputs, and the thread's seconds and the steps from their first tokens on."""
        sampling = SamplingParams(
            max_new_tokens=OUTPUT_LENGTH, seed=1, temperature=0.0, ignore_eos=True
        )
        sequences = []
        for prompt in prompts:
            self._next_id += 1
            sequence = self._account.open(self._next_id, list(prompt), len(prompt), sampling)
            assert sequence is not None
            self.batcher.add(sequence)
            sequences.append(sequence)
        while self.batcher.prompt_count:
            self._step()
        began_at, steps = time.thread_time(), 0
        while self.batcher.running_count:
            self._step()
            steps += 1
        seconds = time.thread_time() - began_at
        return [one.token_ids[one.prompt_count :] for one in sequences], seconds, steps

    def _step(self) -> None:
        step = self.batcher.plan_step().step
        assert step is not None
        for drawn in self.batcher.apply_done(self._runner.run(step)).tokens:
            if drawn.finish is not None:
                self.batcher.remove(drawn.sequence)
