"""The gated delta rule against its recurrence in float64, token by token."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.engine.layers.choose_delta import (
    TOLERANCE,
    DeltaShape,
    check_delta_kernels,
    choose_delta_kernels,
)
from common.engine.layers.delta_rule import DeltaInputs, TorchDelta, apply_delta_rule
from common.engine.layers.sequence_rows import SequencePart, SequenceRows

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 12
CPU = torch.device("cpu")


def draw_inputs(
    token_count: int, *, is_per_channel: bool, decay: float, dtype: torch.dtype
) -> DeltaInputs:
    generator = torch.Generator().manual_seed(token_count)

    def draw(*shape: int) -> Tensor:
        return torch.randn(token_count, *shape, generator=generator)

    return DeltaInputs(
        query=(draw(KEY_HEADS, KEY_DIM) * 3).to(dtype),
        key=(draw(KEY_HEADS, KEY_DIM) * 3).to(dtype),
        value=draw(HEADS, VALUE_DIM).to(dtype),
        log_decay=-decay * draw(HEADS, KEY_DIM if is_per_channel else 1).abs(),
        beta=draw(HEADS).sigmoid().to(dtype),
    )


def recur(inputs: DeltaInputs, lengths: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence as the file's docstring states it."""
    outputs, after = inputs.value.double(), states.double()
    shares = HEADS // KEY_HEADS
    row = 0
    for sequence, length in enumerate(lengths):
        for _ in range(length):
            for head in range(HEADS):
                key = inputs.key[row, head // shares].double()
                query = inputs.query[row, head // shares].double()
                key = key / (key.square().sum() + 1e-6).sqrt()
                query = query / (query.square().sum() + 1e-6).sqrt() / KEY_DIM**0.5
                state = after[sequence, head]
                state *= inputs.log_decay[row, head].double().exp()[:, None]
                wrong = inputs.value[row, head].double() - key @ state
                state += torch.outer(key, inputs.beta[row, head].double() * wrong)
                outputs[row, head] = query @ state
            row += 1
    return outputs, after


@pytest.mark.parametrize("decay", [0.05, 1.0, 60.0])
@pytest.mark.parametrize("is_per_channel", [False, True])
@pytest.mark.parametrize(
    "lengths", [[1, 1, 1], [130], [64, 1, 65, 3, 1], [2, 17, 16], [1, 128, 15]]
)
def test_any_batch_equals_the_recurrence(
    lengths: list[int], is_per_channel: bool, decay: float
) -> None:
    inputs = draw_inputs(
        sum(lengths), is_per_channel=is_per_channel, decay=decay, dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(len(lengths), HEADS, KEY_DIM, VALUE_DIM, generator=generator)
    kept = states.clone()
    outputs, after = apply_delta_rule(TorchDelta(), inputs, SequenceRows(lengths, CPU), states)
    expected, expected_after = recur(inputs, lengths, states)
    torch.testing.assert_close(outputs.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(after.double(), expected_after, atol=2e-5, rtol=1e-4)
    assert torch.equal(states, kept)


@pytest.mark.parametrize("is_per_channel", [False, True])
def test_cutting_a_sequence_into_passes_changes_nothing(is_per_channel: bool) -> None:
    inputs = draw_inputs(100, is_per_channel=is_per_channel, decay=0.1, dtype=torch.float32)
    states = torch.zeros(1, HEADS, KEY_DIM, VALUE_DIM)
    whole, whole_after = apply_delta_rule(TorchDelta(), inputs, SequenceRows([100], CPU), states)
    parts, first = [], 0
    for length in (1, 63, 1, 20, 15):
        taken = slice(first, first + length)
        part = DeltaInputs(
            inputs.query[taken],
            inputs.key[taken],
            inputs.value[taken],
            inputs.log_decay[taken],
            inputs.beta[taken],
        )
        outputs, states = apply_delta_rule(TorchDelta(), part, SequenceRows([length], CPU), states)
        parts.append(outputs)
        first += length
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states, whole_after, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_per_channel", [False, True])
def test_sequences_that_go_on_from_others_of_a_pass_are_one(is_per_channel: bool) -> None:
    """In the pass, 40 and 1 and 2 rows of one sequence, 5 of another, and 70 and 1 of a third."""
    lengths, wholes = [40, 1, 2, 5, 70, 1], [43, 5, 71]
    inputs = draw_inputs(119, is_per_channel=is_per_channel, decay=0.1, dtype=torch.float32)
    states = torch.randn(3, HEADS, KEY_DIM, VALUE_DIM, generator=torch.Generator().manual_seed(2))
    expected, expected_after = apply_delta_rule(
        TorchDelta(), inputs, SequenceRows(wholes, CPU), states
    )
    before = torch.full((6, HEADS, KEY_DIM, VALUE_DIM), torch.nan)
    before[[0, 3, 4]] = states
    rows = SequenceRows(lengths, CPU, {0, 1, 4})
    outputs, after = apply_delta_rule(TorchDelta(), inputs, rows, before)
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(after[[2, 3, 5]], expected_after, atol=1e-5, rtol=1e-4)
    # What is kept of the first one is the state behind its 40 rows.
    first = inputs.take(SequencePart(rows, torch.tensor([0]), torch.arange(40)))
    _, kept = apply_delta_rule(TorchDelta(), first, SequenceRows([40], CPU), states[:1])
    torch.testing.assert_close(after[:1], kept, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_per_channel", [False, True])
def test_half_precision_goes_in_and_out_but_the_state_is_fp32(is_per_channel: bool) -> None:
    lengths = [1, 40]
    inputs = draw_inputs(41, is_per_channel=is_per_channel, decay=0.1, dtype=torch.bfloat16)
    states = torch.zeros(2, HEADS, KEY_DIM, VALUE_DIM)
    outputs, after = apply_delta_rule(TorchDelta(), inputs, SequenceRows(lengths, CPU), states)
    expected, expected_after = recur(inputs, lengths, states)
    assert (outputs.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(outputs.double(), expected, atol=2e-3, rtol=1e-2)
    torch.testing.assert_close(after.double(), expected_after, atol=1e-5, rtol=1e-4)


def test_rows_of_sequences_are_found_for_any_lengths() -> None:
    rng = random.Random(0)
    for _ in range(40):
        lengths = [rng.choice([1, 1, 2, 3, 7, 8, 9, 17]) for _ in range(rng.randint(1, 6))]
        rows = SequenceRows(lengths, CPU)
        values = torch.arange(1, sum(lengths) + 1)
        sequences = list(torch.split(values, lengths))
        padded, front = rows.padded(3), 3
        filled = torch.zeros(padded.count, dtype=torch.int64)
        filled[padded.rows] = values
        expected = [torch.cat((torch.zeros(front, dtype=torch.int64), s)) for s in sequences]
        assert torch.equal(filled, torch.cat(expected))
        assert all(
            filled[back].tolist() == whole[-front:].tolist()
            for back, whole in zip(padded.backs, expected, strict=True)
        )
        assert not filled[padded.fronts].any()
        chunks = rows.chunks(8)
        packed = chunks.pack(values)
        assert torch.equal(chunks.unpack(packed), values)
        rebuilt: dict[int, list[int]] = {b: [] for b in range(len(lengths))}
        for wave in chunks.waves:
            for sequence, chunk in zip(chunks.order.tolist(), packed[wave], strict=False):
                rebuilt[sequence] += chunk.tolist()
        for sequence, whole in enumerate(sequences):
            found = rebuilt[sequence]
            assert found[: len(whole)] == whole.tolist() and not any(found[len(whole) :])
            assert len(found) == -(-len(whole) // 8) * 8


def shape_of(device: str, *, is_per_channel: bool = False) -> DeltaShape:
    return DeltaShape(
        KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, is_per_channel, torch.float32, torch.device(device)
    )


class WithoutDecay(TorchDelta):
    """Kernels that forget to forget."""

    name = "wrong"

    def step(self, inputs: DeltaInputs, states: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.zeros_like(inputs.log_decay)
        return super().step(replace(inputs, log_decay=kept), states)


@pytest.mark.parametrize("is_per_channel", [False, True])
def test_wrong_kernels_are_found_out_at_start(is_per_channel: bool) -> None:
    shape = shape_of("cpu", is_per_channel=is_per_channel)
    assert check_delta_kernels(TorchDelta(), shape) == 0.0
    assert check_delta_kernels(WithoutDecay(), shape) > TOLERANCE[torch.float32]


def test_without_a_gpu_the_rule_is_torch_and_the_reason_is_said() -> None:
    choice = choose_delta_kernels(shape_of("cpu"))
    assert (choice.kernels.name, choice.reason) == ("torch", "the path of cpu")
    choice = choose_delta_kernels(shape_of("cuda"))
    assert choice.kernels.name == "torch" and choice.reason.startswith("fla can't be imported")
