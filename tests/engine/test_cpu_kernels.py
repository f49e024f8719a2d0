"""The engine's own CPU kernels against torch's operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine import cpu_kernels

PAGE, DIM = 16, 32


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("heads", [noise(5, 48), noise(5, 7, 32), noise(5, 9, 32)[:, 1:4]])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_rms_norm_equals_torchs(heads: Tensor, is_weighted: bool) -> None:
    assert cpu_kernels.fit(heads)
    weight = noise(*heads.shape[1:], seed=1) if is_weighted else None
    expected = F.rms_norm(heads, heads.shape[-1:], None, 1e-5)
    if weight is not None:
        expected = expected * weight
    torch.testing.assert_close(
        cpu_kernels.rms_norm(heads, weight, 1e-5), expected, atol=1e-6, rtol=2e-6
    )


def test_one_norm_weight_serves_every_head() -> None:
    heads, weight = noise(3, 4, 16), noise(16, seed=1)
    expected = F.rms_norm(heads, (16,), weight, 1e-5)
    actual = cpu_kernels.rms_norm(heads, weight, 1e-5)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=2e-6)


def test_rotation_equals_torchs() -> None:
    heads, cos, sin = noise(5, 9, 32)[:, 1:8], noise(5, 1, 32, seed=1), noise(5, 1, 32, seed=2)
    expected = heads * cos + heads.roll(16, dims=-1) * sin
    torch.testing.assert_close(cpu_kernels.rotate(heads, cos, sin), expected, atol=1e-6, rtol=1e-6)


def test_gated_silu_equals_torchs_over_the_whole_range() -> None:
    gate = torch.linspace(-120, 120, 32 * 40).view(32, 40).contiguous()
    gate_up = torch.cat((gate, noise(32, 40)), dim=-1)
    expected = F.silu(gate) * gate_up[:, 40:]
    torch.testing.assert_close(cpu_kernels.gated_silu(gate_up), expected, atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    gate_up = torch.ones(1, 32)
    gate_up[0, 3] = value
    assert not cpu_kernels.gated_silu(gate_up)[0, 3].isfinite()
    assert not cpu_kernels.rms_norm(gate_up, None, 1e-5).isfinite().all()


@pytest.mark.parametrize(
    "heads",
    [
        noise(4, 24),
        noise(4, 2, 64)[..., :32],
        noise(4, 64).double(),
        noise(4, 64).bfloat16(),
        noise(2, 3, 4, 32),
    ],
)
def test_what_the_kernels_do_not_take_is_left_to_torch(heads: Tensor) -> None:
    assert not cpu_kernels.fit(heads)


class Cache:
    """Pages of random content for some sequences, as envelopes lay them."""

    def __init__(self, lengths: list[int], *, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        width = -(-max(lengths) // PAGE)
        count = len(lengths) * width
        planes = noise(count + 1, kv_heads, 2, PAGE, dim).to(dtype)
        self.keys, self.values = planes[:, :, 0], planes[:, :, 1]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(3)) + 1
        self.page_table = order.view(-1, width).to(torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)

    def attend(self, query: Tensor, window: int, picked: list[int] | None = None) -> Tensor:
        """Of some sequences, all if None; the rows of the others are NaN."""
        rows = torch.tensor(picked if picked is not None else range(len(self.lengths)))
        assert cpu_kernels.can_attend(query, self.keys, self.values)
        output = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
        cpu_kernels.attend(
            output,
            query,
            self.keys,
            self.values,
            rows=rows,
            page_table=self.page_table[rows],
            lengths=self.lengths[rows],
            window=window,
            scale=0.2,
        )
        return output

    def expected(self, query: Tensor, window: int) -> Tensor:
        """Sequence by sequence, in fp64."""
        outputs = []
        for row, (pages, length) in enumerate(
            zip(self.page_table.long(), self.lengths.tolist(), strict=True)
        ):
            first = max(0, length - window) if window else 0
            keys, values = (
                plane[pages].double().transpose(0, 1).flatten(1, 2)[None, :, first:length]
                for plane in (self.keys, self.values)
            )
            outputs.append(
                F.scaled_dot_product_attention(
                    query[row : row + 1, :, None].double(), keys, values, scale=0.2, enable_gqa=True
                )[0, :, 0]
            )
        return torch.stack(outputs)


@pytest.mark.parametrize("dtype", cpu_kernels.ELEMENTS)
@pytest.mark.parametrize("cache_dtype", cpu_kernels.ELEMENTS)
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(2, 1, 8), (1, 3, 40), (2, 7, 72)])
@pytest.mark.parametrize("window", [0, 21])
def test_attention_over_pages_equals_torchs(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    kv_heads: int,
    group: int,
    dim: int,
    window: int,
) -> None:
    """Groups and dims that are a whole number of nothing; lengths around pages and lanes."""
    lengths = [1, 7, 8, 15, 16, 17, 33, 90]
    cache = Cache(lengths, kv_heads=kv_heads, dim=dim, dtype=cache_dtype)
    query = noise(len(lengths), kv_heads * group, dim, seed=4).to(dtype)
    # bfloat16 rounds the output by half of its last bit, 2 ** -9 of the value.
    tolerance = {"atol": 1e-6, "rtol": 1e-5 if dtype == torch.float32 else 4e-3}
    actual = cache.attend(query, window).double()
    torch.testing.assert_close(actual, cache.expected(query, window), **tolerance)


def test_a_sequences_attention_depends_on_nothing_else_in_the_batch() -> None:
    """Bit for bit: neither on the other sequences nor on the number of threads."""
    lengths = [700, 3, 1100, 20, 900]
    cache = Cache(lengths, kv_heads=2, dim=DIM, dtype=torch.float32)
    query = noise(len(lengths), 8, DIM, seed=4)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.stack([cache.attend(query, 0, [row])[row] for row in range(len(lengths))])
        torch.set_num_threads(3)
        together = cache.attend(query, 0)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, together)


def test_rows_that_are_not_named_are_not_written() -> None:
    cache = Cache([5, 40, 9], kv_heads=2, dim=DIM, dtype=torch.float32)
    output = cache.attend(noise(3, 4, DIM, seed=4), 0, [0, 2])
    assert output[1].isnan().all() and output[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_items_go_to_their_pages_and_nowhere_else(dtype: torch.dtype) -> None:
    buffer = torch.zeros(6, 3, 2, PAGE, DIM, dtype=dtype)
    view, expected = buffer[:, :, 1], buffer.clone()
    pages, rows = torch.tensor([5, 1, 1, 3]), torch.tensor([15, 0, 7, 8])
    values = (noise(4, 5, DIM) * 50).to(dtype)[:, 1:4]
    expected[:, :, 1][pages, :, rows] = values
    cpu_kernels.write_items(view, pages, rows, values)
    assert torch.equal(buffer, expected)
