"""The sampler's noise against the same hash in Python integers, and its distribution."""

from __future__ import annotations

import math

import torch

from common.engine.sampling.noise import gumbel, hash_bits, row_keys, wrap_seed


def plain_hash(seed: int, position: int, vocab_id: int) -> int:
    """The same hash in Python integers, which never overflow."""
    m64, m32 = 2**64 - 1, 2**32 - 1

    def mix_64(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & m64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & m64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & m64
        return x ^ (x >> 31)

    key = mix_64((mix_64(seed & m64) + position * 0x9E3779B97F4A7C15) & m64)
    low, high = key & m32, key >> 32
    x = (vocab_id * 0x9E3779B1 + low) & m32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & m32
    x ^= high
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & m32
    return x ^ (x >> 16)


def test_hash_equals_the_same_arithmetic_in_python_integers() -> None:
    seeds = [0, 1, -1, 2**63 - 1, 2**64 - 5, 123456789012345]
    positions = [0, 1, 7, 4096, 2**31, 12]
    ids = [0, 1, 2, 151_935, 2**20 + 3]
    wrapped = torch.tensor([wrap_seed(seed) for seed in seeds])
    keys = row_keys(wrapped, torch.tensor(positions))
    bits = hash_bits(keys, torch.tensor(ids, dtype=torch.int32))
    expected = [[plain_hash(s, p, i) for i in ids] for s, p in zip(seeds, positions, strict=True)]
    assert (bits.to(torch.int64) & 0xFFFFFFFF).tolist() == expected


def test_noise_is_finite_at_the_ends_of_the_hash_and_has_gumbel_moments() -> None:
    keys = row_keys(torch.arange(64), torch.arange(64))
    noise = gumbel(keys, torch.arange(20_000, dtype=torch.int32)).double()
    assert torch.isfinite(noise).all()
    # Mean 0.5772 and variance pi^2/6; one sigma of the mean over 1.28 million draws is 0.0011.
    assert abs(float(noise.mean()) - 0.5772) < 0.005
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    correlation = torch.corrcoef(noise)
    off_diagonal = correlation - torch.eye(64)
    assert float(off_diagonal.abs().max()) < 0.04  # 5.6 sigma for 20,000 samples per row


def test_noise_of_a_subset_of_ids_equals_that_of_the_whole_vocabulary() -> None:
    keys = row_keys(torch.tensor([5, 6]), torch.tensor([10, 11]))
    whole = gumbel(keys, torch.arange(1000, dtype=torch.int32))
    ids = torch.tensor([[3, 999, 0], [500, 1, 2]], dtype=torch.int32)
    assert torch.equal(gumbel(keys, ids), whole.gather(1, ids.long()))
