"""Profiles and workloads of which the times can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.serve.workload import Ask
from bench.simulator.profile import Profile

FREE = Profile(
    source="nothing takes time",
    prefill_fixed_s=0.0,
    prefill_token_s=0.0,
    prefill_pair_s=0.0,
    decode_fixed_s=0.0,
    decode_sequence_s=0.0,
    decode_context_s=0.0,
    frontend_s=0.0,
    frontend_token_s=0.0,
    dispatch_s=0.0,
    message_s=0.0,
    transfer_s=0.0,
    bandwidth=1.0,
    token_nbytes=0.0,
    chunk_token_max=1000,
    running_max=256,
    token_capacity=1 << 20,
)


def profile_of(**costs: float) -> Profile:
    return msgspec.structs.replace(FREE, **costs)


def asks_of(*requests: tuple[float, int, int]) -> list[Ask]:
    """Of (arrival in s, prompt tokens, output tokens)."""
    return [Ask(i, at_s, (0,) * prompt, out) for i, (at_s, prompt, out) in enumerate(requests)]


def at_the_same_time(count: int, prompt: int, output: int) -> list[Ask]:
    return asks_of(*[(0.0, prompt, output)] * count)


def times_of(streams: Sequence[Sequence[tuple[float, int]]]) -> list[list[float]]:
    """When each token came, to the microsecond."""
    return [[round(at_s, 6) for at_s, _ in events] for events in streams]
