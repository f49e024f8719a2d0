"""Steps that are launched before the last one's tokens are on the host."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.clock import ManualClock
from common.engine.cache.kv_pool import KvPool
from common.engine.host_copy import pack, unpack, upload
from common.engine.layers.sequence_rows import SequenceRows
from common.engine.loader import load_model
from common.engine.model_runner import ModelRunner
from common.protocol.worker import NewSequence, PageCopies, PageGrant, PrefillChunk, Step, StepDone
from common.request import Grammar, GrammarKind, SamplingParams
from tests.engine.runner_driver import PAGE_SIZE, greedy, layout_of, random_prompt
from tests.engine.tiny_checkpoints import VOCAB_SIZE

DECODE_COUNT = 12
PROMPT_LENGTH = 11
PAGES_EACH = -(-(PROMPT_LENGTH + DECODE_COUNT + 1) // PAGE_SIZE)

KINDS = [
    greedy(),
    greedy(temperature=1.0, seed=1),
    greedy(temperature=1.1, top_p=0.8, min_p=0.02, seed=3, frequency_penalty=0.4),
    greedy(temperature=0.8, top_k=20, seed=2, presence_penalty=0.6, repetition_penalty=1.3),
    greedy(return_logprob=True, logprob_start_len=2, top_logprobs_num=2, token_ids_logprob=(9, 4)),
    greedy(temperature=1.0, seed=4, logit_bias={7: 2.5}, min_new_tokens=5),
    greedy(grammar=Grammar(GrammarKind.REGEX, "[a-f]+[0-9]{3}")),  # refused: no tokenizer
]


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("qwen3")


def runner_on(checkpoint: Path, device: str) -> ModelRunner:
    model = load_model(checkpoint, dtype="float32", device=device)
    page_count = PAGES_EACH * len(KINDS)
    pool = KvPool.allocate(layout_of(model).rank(0, 0), [page_count], device)
    return ModelRunner(model, pool, ManualClock())


def story(kinds: list[SamplingParams]) -> list[Step]:
    """Prompts in two chunks, then decodes; at the end others take the slots of all of them."""
    ids = list(range(len(kinds)))
    new = [
        NewSequence(i, random_prompt(PROMPT_LENGTH, VOCAB_SIZE, i), PROMPT_LENGTH, kind)
        for i, kind in enumerate(kinds)
    ]
    grants = [
        PageGrant(i, 0, 0, list(range(1 + i * PAGES_EACH, 1 + (i + 1) * PAGES_EACH))) for i in ids
    ]
    first = [PrefillChunk(i, 0, 5, is_last=False) for i in ids]
    rest = [PrefillChunk(i, 5, PROMPT_LENGTH, is_last=True) for i in ids]
    steps = [Step(1, new, grants, first), Step(2, chunks=rest)]
    steps += [Step(number, decode=ids) for number in range(3, 3 + DECODE_COUNT)]
    return [*steps, Step(99, new, grants, rest, retired=ids), Step(100, decode=ids)]


def run_each(runner: ModelRunner, steps: list[Step]) -> list[StepDone]:
    return [runner.run(step) for step in steps]


def run_ahead(runner: ModelRunner, steps: list[Step]) -> list[StepDone]:
    """Every step is launched before the one before it is finished."""
    done: list[StepDone] = []
    pending = runner.launch(steps[0])
    for step in steps[1:]:
        following = runner.launch(step)
        done.append(pending.finish())
        pending = following
    return [*done, pending.finish()]


def test_steps_launched_ahead_draw_the_same_tokens(checkpoint: Path) -> None:
    steps = story(KINDS)
    expected = run_each(runner_on(checkpoint, "cpu"), steps)
    assert run_ahead(runner_on(checkpoint, "cpu"), steps) == expected
    assert expected[1].prompt_logprobs and expected[5].logprobs and expected[5].failed


class Waits(TorchDispatchMode):
    """Records what would make a CUDA stream wait, as it is dispatched on the meta device: copies
    from host memory that is not pinned, and numbers of the host that are made tensors first. What
    reads values raises there anyhow."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.upload_count = 0
        self._numbers: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        name = str(func)
        result = func(*args, **kwargs)
        if name.startswith(("aten.to.", "aten._to_copy")) and result.is_meta:
            if not args[0].is_meta and kwargs.get("non_blocking"):
                self.upload_count += 1
            elif not args[0].is_meta:
                self._note(name)
        elif name.startswith("aten.copy_"):
            if args[0].is_meta and not args[1].is_meta:
                self._note(name)
        elif name.startswith("aten.scalar_tensor"):
            self._numbers.append(result)
        elif name.startswith("aten.where.Scalar"):
            self._note(name)
        elif name.startswith("aten.index") and isinstance(args[1], list) and args[0].is_meta:
            is_there = all(index is None or index.is_meta for index in args[1])
            if not is_there or any(args[-1] is number for number in self._numbers):
                self._note(name)
        return result

    def _note(self, name: str) -> None:
        ours = [f for f in traceback.extract_stack() if "/common/engine/" in f.filename]
        where = ours[-1]
        self.found.append(f"{name} in {Path(where.filename).name}:{where.lineno}")


DEVICE_ONLY = [kind for kind in KINDS if kind.grammar is None]


@pytest.mark.parametrize(
    ("kinds", "number", "upload_max"),
    [([greedy()] * 4, 4, 3), ([greedy()] * 4, 1, 3), (DEVICE_ONLY, 4, 30), (DEVICE_ONLY, 1, 30)],
    ids=["greedy decode", "greedy chunks", "decode of all kinds", "chunks of all kinds"],
)
def test_a_step_is_launched_without_a_look_at_the_device(
    checkpoint: Path, kinds: list[SamplingParams], number: int, upload_max: int
) -> None:
    runner = runner_on(checkpoint, "meta")
    steps = story(kinds)
    for step in steps[:number]:
        runner.launch(step)
    with Waits() as waits:
        pending = runner.launch(steps[number])
    assert waits.found == []
    assert 0 < waits.upload_count <= upload_max
    with pytest.raises(TypeError, match="meta"):  # there is nothing to be read on this device
        pending.finish()


@pytest.mark.parametrize("number", [4, 1])
def test_pages_are_copied_without_a_look_at_the_device(checkpoint: Path, number: int) -> None:
    steps = story([greedy()] * 4)
    counts = []
    for copies in ([], [PageCopies(0, [1, 2], [9, 12]), PageCopies(0, [3], [10])]):
        runner = runner_on(checkpoint, "meta")
        for step in steps[:number]:
            runner.launch(step)
        with Waits() as waits:
            runner.launch(msgspec.structs.replace(steps[number], copies=copies))
        assert waits.found == []
        counts.append(waits.upload_count)
    assert counts[1] == counts[0] + 1, "one for the ids of all pages"


def test_rows_of_a_ragged_batch_are_found_without_a_look_at_the_device() -> None:
    with Waits() as waits:
        rows = SequenceRows([3, 1, 9], torch.device("meta"))
        made = (rows.starts, *rows.by_length, rows.padded(3), rows.chunks(4))
        going_on = SequenceRows([3, 1, 9], torch.device("meta"), {0}).rounds
    assert len(made) == 5 and len(going_on) == 2
    # The second round has, beside its rows, the sequences that it goes on from.
    assert waits.found == [] and waits.upload_count == len(made) + len(going_on) + 1


def test_packed_arrays_come_out_as_they_went_in() -> None:
    arrays = [
        np.arange(5, dtype=np.int64) - 2,
        np.arange(3, dtype=np.int32),
        np.zeros(0, dtype=np.int64),
        np.linspace(0, 1, 7, dtype=np.float32),
        np.arange(12, dtype=np.uint8).reshape(3, 4),
        np.array([[True], [False]]),
    ]
    packed = pack(arrays, is_pinned=False)
    for array, view in zip(arrays, unpack(packed, arrays), strict=True):
        assert view.numpy().dtype == array.dtype and np.array_equal(view.numpy(), array)
    (same,) = upload(torch.device("cpu"), arrays[0])
    assert np.shares_memory(same.numpy(), arrays[0])  # nothing to copy there
