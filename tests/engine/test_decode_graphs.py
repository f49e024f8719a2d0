"""A replayed decode pass computes what the same pass computes when it is not recorded.

What CUDA records is the kernels with their addresses and arguments. Here torch's tracer records the
same: operations on the very tensors of the first run, whatever Python computed baked in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from common.clock import ManualClock
from common.engine import loader
from common.engine.cache.kv_pool import KvPool
from common.engine.forward_batch import ForwardBatch, HostRows, SequenceChunk
from common.engine.graphs.cuda_graphs import recorded_sizes
from common.engine.graphs.decode_graphs import DecodeGraphs
from common.engine.layers import moe
from common.engine.layers.choose_fused import FusedChoice
from common.engine.loader import load_model
from common.engine.model_runner import ModelRunner
from common.engine.models.causal_lm import CausalLm
from tests.engine.dense_attention import DenseAttention
from tests.engine.guided import GuidedProposer
from tests.engine.paged_decoding import PAGE_SIZE, make_batch, make_pool
from tests.engine.runner_driver import Driver, random_prompt, track

Checkpoints = Callable[[str], Path]
TOKEN_MAX = 5 * PAGE_SIZE
# Groups of one page a sequence have a slot for each of these pages, so that they are enough.
PAGE_COUNT = 40
SIZES = [1, 4, 8]


@pytest.fixture(autouse=True)
def _functions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced here can't be what takes addresses."""
    monkeypatch.setattr(loader, "choose_fused", lambda _: FusedChoice(None, "spelled out"))


class Traced:
    """See `Recording`."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        compute()
        self._operations = make_fx(compute)()
        self.output = compute()

    def replay(self) -> None:
        self._operations()


def make_graphs(model: CausalLm, pool: KvPool) -> tuple[DecodeGraphs, DenseAttention]:
    attention = DenseAttention()
    graphs = DecodeGraphs(model, pool, attention, Traced, batch_sizes=SIZES, token_max=TOKEN_MAX)
    return graphs, attention


def replay(graphs: DecodeGraphs, batch: ForwardBatch) -> Tensor | None:
    """Tokens are found among others, as those of running sequences are."""
    tokens = torch.cat((torch.full((3,), 77), batch.token_ids.flip(0)))
    index = torch.arange(len(tokens) - 1, 2, -1)
    return graphs.run(HostRows.of(batch), tokens, index)


def decoding(lengths: list[int], seed: int) -> list[SequenceChunk]:
    """The next token of sequences with so many tokens, in random pages of their own."""
    generator = torch.Generator().manual_seed(seed)
    pages = (torch.randperm(PAGE_COUNT, generator=generator) + 1).tolist()
    tokens = torch.randint(3, 90, (len(lengths),), generator=generator).tolist()
    return [
        SequenceChunk(
            [token], length, ([pages.pop() for _ in range(length // PAGE_SIZE + 1)],), [0]
        )
        for token, length in zip(tokens, lengths, strict=True)
    ]


@pytest.mark.parametrize(
    ("recipe", "has_grouped_kernel"),
    [
        ("llama", True),
        ("qwen3_moe", True),
        ("qwen3_next", True),
        ("qwen3_moe", False),
        pytest.param("qwen3_next", False, marks=pytest.mark.soak),
    ],
)
def test_a_replay_is_the_pass_itself(
    tiny_checkpoint: Checkpoints,
    recipe: str,
    has_grouped_kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moe, "has_grouped_kernel", lambda device, dtype: has_grouped_kernel)
    model = load_model(tiny_checkpoint(recipe), dtype="float32")
    replayed, plain = make_pool(model, PAGE_COUNT), make_pool(model, PAGE_COUNT)
    graphs, attention = make_graphs(model, replayed)
    assert attention.reserved == (SIZES, 5)
    for buffers in zip(replayed.buffers, plain.buffers, strict=True):
        buffers[0].copy_(buffers[1])  # as if nothing had been recorded
    # Sizes between those recorded, and a smaller batch after a larger one.
    for seed, lengths in enumerate([[1, 40, 79], [16], [15, 17, 1, 2, 30, 31, 64], [63, 5]]):
        batch = make_batch(plain, decoding(lengths, seed))
        expected = model.forward(batch, plain)
        actual = replay(graphs, make_batch(replayed, decoding(lengths, seed)))
        assert expected is not None and actual is not None
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        assert attention.planned[-1][: len(lengths)] == batch.kv_length_list
        for group, buffers in enumerate(zip(replayed.buffers, plain.buffers, strict=True)):
            page_nbytes = replayed.layout.groups[group].page_nbytes
            after = [buffer[page_nbytes:].view(torch.float32) for buffer in buffers]
            torch.testing.assert_close(after[0], after[1], rtol=1e-4, atol=1e-4, equal_nan=True)


def test_all_sizes_keep_the_logits_of_the_largest(tiny_checkpoint: Checkpoints) -> None:
    model = load_model(tiny_checkpoint("llama"), dtype="float32")
    outputs: list[Tensor] = []

    def record(compute: Callable[[], Tensor]) -> Traced:
        recording = Traced(compute)
        outputs.append(recording.output)
        return recording

    pool = make_pool(model, PAGE_COUNT)
    DecodeGraphs(model, pool, DenseAttention(), record, batch_sizes=SIZES, token_max=TOKEN_MAX)
    assert sorted(len(output) for output in outputs) == SIZES
    kept = {o.untyped_storage().data_ptr(): o.untyped_storage().nbytes() for o in outputs}
    assert sum(kept.values()) == SIZES[-1] * model.config.vocab_size * 4


def test_a_batch_above_the_largest_recording_is_left_alone(tiny_checkpoint: Checkpoints) -> None:
    model = load_model(tiny_checkpoint("llama"), dtype="float32")
    pool = make_pool(model, PAGE_COUNT)
    graphs, attention = make_graphs(model, pool)
    before, plan_count = pool.buffers[0].clone(), len(attention.planned)
    assert replay(graphs, make_batch(pool, decoding([1] * 9, 0))) is None
    assert torch.equal(pool.buffers[0], before)
    assert len(attention.planned) == plan_count


def test_a_runner_draws_the_same_tokens_with_recordings(tiny_checkpoint: Checkpoints) -> None:
    checkpoint = tiny_checkpoint("qwen3")
    model = load_model(checkpoint, dtype="float32")
    plain, replaying = Driver(checkpoint), Driver(checkpoint)
    graphs, attention = make_graphs(model, replaying.pool)
    replaying.runner = ModelRunner(model, replaying.pool, ManualClock(), graphs=graphs)
    outputs: list[list[list[int]]] = []
    for driver in (plain, replaying):
        tracked = [
            track(i, random_prompt(n, model.config.vocab_size, i))
            for i, n in enumerate((9, 1, 24, 17))
        ]
        driver.prefill(tracked[0])
        for newcomer in tracked[1:]:  # a prompt beside a decode is no pass that only decodes
            driver.step(chunks=[(newcomer, len(newcomer.tokens))], decode=[tracked[0]])
        driver.decode(tracked, 5)
        driver.step(retired=[tracked[2]])
        driver.decode([tracked[0], tracked[3]], 5)
        outputs.append([one.output for one in tracked])
    assert outputs[0] == outputs[1]
    assert len(attention.planned) == len(SIZES) + 10


def test_a_runner_verifies_proposals_with_recordings(tiny_checkpoint: Checkpoints) -> None:
    checkpoint = tiny_checkpoint("qwen3")
    model = load_model(checkpoint, dtype="float32")
    vocab_size = model.config.vocab_size
    prompts = [random_prompt(count, vocab_size, count) for count in (9, 17)]
    plain = Driver(checkpoint)
    expected = [track(i, prompt) for i, prompt in enumerate(prompts)]
    for one in expected:
        plain.prefill(one)
    plain.decode(expected, 30)
    proposer = GuidedProposer([one.tokens for one in expected], 0.7, vocab_size)
    replaying = Driver(checkpoint)
    graphs, attention = make_graphs(model, replaying.pool)
    replaying.runner = ModelRunner(
        model, replaying.pool, ManualClock(), graphs=graphs, proposer=proposer
    )
    tracked = [track(i, prompt) for i, prompt in enumerate(prompts)]
    for one in tracked:
        replaying.prefill(one)
    for _ in range(8):
        replaying.step(decode=tracked, drafts=3)  # 8 rows, the largest recording
    for one, other in zip(tracked, expected, strict=True):
        assert one.output == other.output[: len(one.output)]
        assert sum(accepted for _, accepted in one.verified) > 0
    assert len(attention.planned) == len(SIZES) + 8
    replaying.step(decode=tracked, drafts=4)  # 10 rows are launched one by one
    assert len(attention.planned) == len(SIZES) + 8


def test_recorded_sizes_end_with_the_largest() -> None:
    assert recorded_sizes(1) == [1]
    assert recorded_sizes(3) == [1, 2, 3]
    assert recorded_sizes(8) == [1, 2, 4, 8]
    assert recorded_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert recorded_sizes(256)[-5:] == [152, 160, 192, 224, 256]
    assert recorded_sizes(700)[-4:] == [480, 512, 640, 700]
