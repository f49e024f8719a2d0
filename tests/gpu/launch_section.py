"""Steps that are launched while another one runs: without waits, with the same tokens, and layer
groups that are reported only when their pages are written.

The runner and the notifier are the worker's own; on a CPU a launch computes, and all of it is a
rehearsal.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from common.clock import SystemClock
from common.engine.attention.choose import AttentionChoice, choose_attention
from common.engine.cache.kv_pool import DTYPES, KvPool
from common.engine.distributed import ParallelContext
from common.engine.graphs.cuda_graphs import CudaRecorder
from common.engine.graphs.decode_graphs import DecodeGraphs
from common.engine.loader import attention_shape, load_model, read_served_config
from common.engine.model_runner import ModelRunner
from common.engine.models.registry import cache_components
from common.layout.cache_layout import ServerLayout
from common.layout.parallel import split_layers
from common.protocol.worker import (
    NewSequence,
    PageGrant,
    PrefillChunk,
    Step,
    StepDone,
    WorkerToScheduler,
)
from common.request import SamplingParams
from common.worker.completion_notifiers import start_notifier
from common.worker.io_loop import EngineOutbox, Progress
from common.worker.sends import Computed
from tests.gpu.model_shapes import ModelShape, write_model
from tests.gpu.report import Section

PAGE_SIZE = 16
LAYER_GROUP_COUNT = 4
PROMPT_LENGTH = 700
DECODE_COUNT = 24
STEADY_FROM = 8
"""Decodes before it may have to make room, or do something for the first time."""

PAGES_EACH = -(-(PROMPT_LENGTH + DECODE_COUNT + 1) // PAGE_SIZE)
GREEDY = SamplingParams(max_new_tokens=DECODE_COUNT, seed=1, temperature=0.0, ignore_eos=True)
KINDS = (
    GREEDY,
    SamplingParams(max_new_tokens=DECODE_COUNT, seed=2),
    SamplingParams(max_new_tokens=DECODE_COUNT, seed=3, temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(
        max_new_tokens=DECODE_COUNT, seed=4, repetition_penalty=1.3, frequency_penalty=0.2
    ),
    SamplingParams(max_new_tokens=DECODE_COUNT, seed=5, logit_bias={7: 3.0}, min_new_tokens=20),
    SamplingParams(max_new_tokens=DECODE_COUNT, seed=6, return_logprob=True, top_logprobs_num=2),
    SamplingParams(max_new_tokens=DECODE_COUNT, seed=7, top_p=0.9),
)


def check_launch_section(section: Section, device: torch.device, shape: ModelShape) -> None:
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as directory:
        rig = Rig(write_model(Path(directory), shape), device)
    section.figure("attention", f"{rig.choice.attention.name} ({rig.choice.reason})")
    check_reported_pages(section, rig)
    for name, graphs in (("", None), (", recorded", rig.record())):
        if name and graphs is None:
            section.skip("recorded passes", f"{rig.choice.attention.name} on {device} has none")
            continue
        check_waits(section, rig, graphs, name)
        check_tokens(section, rig, graphs, name)


class Rig:
    """A model with random weights, and a pool that is full of random numbers."""

    def __init__(self, model_path: Path, device: torch.device) -> None:
        self.device = device
        config = read_served_config(model_path, dtype="bfloat16")
        self.choice: AttentionChoice = choose_attention(
            attention_shape(config, ParallelContext(), device, PAGE_SIZE)
        )
        self.model = load_model(
            model_path,
            dtype="bfloat16",
            device=device,
            load_format="dummy",
            page_size=PAGE_SIZE,
            attention=self.choice.attention,
        )
        self.layout = ServerLayout(
            components=cache_components(config, "auto"),
            tp_size=1,
            stages=split_layers(config.layer_count, 1),
            page_size=PAGE_SIZE,
            layer_group_count=LAYER_GROUP_COUNT,
        ).rank(0, 0)
        self.pool = KvPool.allocate(self.layout, [PAGES_EACH * len(KINDS)], device)
        self.pool.buffers[0].view(DTYPES["bfloat16"]).normal_()

    def record(self) -> DecodeGraphs | None:
        if self.choice.recordable is None or self.device.type != "cuda":
            return None
        return DecodeGraphs(
            self.model,
            self.pool,
            self.choice.recordable,
            CudaRecorder(self.device),
            batch_sizes=[len(KINDS)],
            token_max=PROMPT_LENGTH + DECODE_COUNT + 1,
        )

    def runner(self, graphs: DecodeGraphs | None = None) -> ModelRunner:
        return ModelRunner(self.model, self.pool, SystemClock(), graphs=graphs)

    def steps(self, kinds: Sequence[SamplingParams]) -> list[Step]:
        """All prompts in one step, then decodes."""
        ids = list(range(len(kinds)))
        generator = torch.Generator().manual_seed(1)
        vocab_size = self.model.config.vocab_size
        prompts = torch.randint(3, vocab_size, (len(kinds), PROMPT_LENGTH), generator=generator)
        prefill = Step(
            1,
            new=[NewSequence(i, prompts[i].tolist(), PROMPT_LENGTH, kinds[i]) for i in ids],
            grants=[
                PageGrant(i, 0, 0, list(range(1 + i * PAGES_EACH, 1 + (i + 1) * PAGES_EACH)))
                for i in ids
            ],
            chunks=[PrefillChunk(i, 0, PROMPT_LENGTH, is_last=True) for i in ids],
        )
        return [prefill, *(Step(2 + count, decode=ids) for count in range(DECODE_COUNT))]


# Without waits ------------------------------------------------------------------------------------


def check_waits(section: Section, rig: Rig, graphs: DecodeGraphs | None, name: str) -> None:
    if rig.device.type != "cuda":
        section.skip(f"waits of a decode{name}", "torch tells of them on CUDA only")
        return
    if rig.choice.attention.name == "sdpa":
        section.skip(f"waits of a decode{name}", "sdpa copies its masks, which waits")
        return
    for kinds, asked in (([GREEDY] * len(KINDS), "greedy"), (KINDS, "of all kinds")):
        found = waits_of(rig.runner(graphs), rig.steps(kinds))
        section.check(f"a decode, {asked}{name}, waits for nothing", not found, "; ".join(found))


def waits_of(runner: ModelRunner, steps: list[Step]) -> list[str]:
    """Where torch was made to wait for the device while a steady decode was launched."""
    for step in steps[:STEADY_FROM]:
        runner.run(step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            runner.launch(steps[STEADY_FROM])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchron" in str(w.message)]
    return sorted(set(places))


# The same tokens ----------------------------------------------------------------------------------


def check_tokens(section: Section, rig: Rig, graphs: DecodeGraphs | None, name: str) -> None:
    steps = rig.steps(KINDS)
    run_ahead(rig.runner(graphs), steps)  # what is done for the first time is done
    expected, apart_s = run_each(rig.runner(graphs), steps)
    actual, ahead_s = run_ahead(rig.runner(graphs), steps)
    failed = [reason for done in expected for reason in done.failed.values()]
    section.check(f"no sequence fails{name}", not failed, "; ".join(failed[:1]))
    equal_count = sum(a.token_ids == b.token_ids for a, b in zip(actual, expected, strict=True))
    section.check(
        f"steps launched ahead draw the same tokens{name}",
        equal_count == len(steps),
        f"{equal_count} of {len(steps)} steps are equal",
    )
    section.figure(f"decode of all kinds{name}, one by one, ms", apart_s * 1e3)
    section.figure(f"decode of all kinds{name}, launched ahead, ms", ahead_s * 1e3)
    steps = rig.steps([GREEDY] * len(KINDS))
    section.figure(
        f"greedy decode{name}, one by one, ms", run_each(rig.runner(graphs), steps)[1] * 1e3
    )
    section.figure(
        f"greedy decode{name}, launched ahead, ms", run_ahead(rig.runner(graphs), steps)[1] * 1e3
    )


def run_each(runner: ModelRunner, steps: list[Step]) -> tuple[list[StepDone], float]:
    """What is answered, and the median seconds between two answers of steady decodes."""
    done: list[StepDone] = []
    times: list[float] = []
    for step in steps:
        done.append(runner.run(step))
        times.append(time.perf_counter())
    return done, _median_gap(times)


def run_ahead(runner: ModelRunner, steps: list[Step]) -> tuple[list[StepDone], float]:
    """The same, every step launched before the one before it is finished."""
    done: list[StepDone] = []
    times: list[float] = []
    pending = runner.launch(steps[0])
    for step in steps[1:]:
        following = runner.launch(step)
        done.append(pending.finish())
        times.append(time.perf_counter())
        pending = following
    return [*done, pending.finish()], _median_gap(times)


def _median_gap(times: list[float]) -> float:
    steady = times[STEADY_FROM:]
    return statistics.median(after - before for before, after in pairwise(steady))


# Layer groups -------------------------------------------------------------------------------------


class Snapshots(EngineOutbox):
    """Copies the pages of a layer group at the moment of its report, on a stream that waits
    for no other, as a peer's copy engine would."""

    def __init__(self, rig: Rig, page_ids: list[int]) -> None:
        super().__init__()
        self.reported: list[tuple[int, float]] = []
        self.taken: dict[int, Tensor] = {}
        self._rig = rig
        self._pages = torch.tensor(page_ids, device=rig.device)
        self._stream = torch.cuda.Stream(rig.device) if rig.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def put(self, message: WorkerToScheduler | Computed) -> None:
        if isinstance(message, Computed):
            self.reported.append((message.layer_group_count, time.perf_counter()))
            for group in self._rig.layout.layer_groups[: message.layer_group_count]:
                for layer in group:
                    if layer not in self.taken:
                        self.taken[layer] = self.read(layer)
        super().put(message)

    def read(self, layer: int) -> Tensor:
        """The keys and values of one layer, as they are now."""
        stream: AbstractContextManager[object] = nullcontext()
        if self._stream is not None:
            stream = torch.cuda.stream(self._stream)
        with stream:
            views = [self._rig.pool.view(component, layer) for component in ("k", "v")]
            return torch.stack([view.index_select(0, self._pages) for view in views]).cpu()


def check_reported_pages(section: Section, rig: Rig) -> None:
    """A prompt's pages, taken as they are reported, are those that are there in the end."""
    (prefill, *_) = rig.steps(KINDS)
    pages = [
        page for grant in prefill.grants for page in grant.page_ids[: PROMPT_LENGTH // PAGE_SIZE]
    ]
    rig.runner().run(prefill)  # what is done for the first time is done
    rig.pool.buffers[0].view(DTYPES["bfloat16"]).normal_()
    outbox, progress = Snapshots(rig, pages), Progress()
    failed: list[str] = []
    notifier = start_notifier(
        rig.device, outbox, progress, lambda: failed.append("a thread failed")
    )
    notifier.start()
    if rig.device.type == "cuda":
        torch.cuda.synchronize(rig.device)
    ends = {group[-1]: index + 1 for index, group in enumerate(rig.layout.layer_groups)}

    def on_layer(layer: int) -> None:
        if layer in ends:
            notifier.notify(1, Computed(prefill.step_id, ends[layer]))

    started_at = time.perf_counter()
    pending = rig.runner().launch(prefill, on_layer)
    launched_s = time.perf_counter() - started_at
    notifier.notify(1, Computed(prefill.step_id, len(ends)), pending)
    notifier.end()
    torn = [
        layer for layer, taken in outbox.taken.items() if not torch.equal(taken, outbox.read(layer))
    ]
    outbox.close()
    section.check(
        "all layer groups were reported", not failed and len(outbox.taken) == len(rig.layout.layers)
    )
    section.check("pages are written when they are reported", not torn, f"layers {torn} were not")
    section.figure("prefill launched, ms", launched_s * 1e3)
    for count, reported_at in outbox.reported:
        section.figure(f"layer groups reported: {count}, ms", (reported_at - started_at) * 1e3)
