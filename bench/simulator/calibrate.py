"""Measures a profile from a running pair, over HTTP, with short loads and the servers' timelines.

    prompts    one at a time, so that nothing waits: stages of their timelines, by length
    a queue    prompts that come all at once: what a prefill server needs beside its steps
    streams    so many together: time from token to token, by how many and by how much cache

Lines are fitted to these by least squares of relative errors, none of them falling. The servers
must be idle otherwise, and every server of a plan is taken to be like the one measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import msgspec
import numpy as np

from bench.serve.outcome import Run
from bench.serve.summary import measure
from bench.serve.workload import Ask
from bench.simulator.fit import fit_costs
from bench.simulator.profile import Profile
from common.errors import ConfigError

Send = Callable[[Sequence[Ask]], Run]

PROMPTS_EACH = 4  # per round and length
QUEUE_COUNT = 12
STREAM_TOKEN_COUNT = 60
STREAM_TOKEN_MAX = 960
STEPS_TOGETHER_MIN = 30
SHORT_PROMPT = 16
ASK_TIMEOUT_S = 10.0
LEAST_S = 1e-9  # what can't be seen takes so long


@dataclass(frozen=True, slots=True)
class Ranges:
    """What a round tries, rising: lengths of prompts, and how many streams together."""

    prompt_lengths: tuple[int, ...]
    stream_counts: tuple[int, ...]


class _Span(msgspec.Struct):
    name: str
    duration_s: float


class _Transfer(msgspec.Struct):
    """wire_s: that the bytes took. exposed_bytes: of them, sent after the last layer was done."""

    wire_s: float
    bytes: int
    exposed_bytes: int


class _Timeline(msgspec.Struct):
    """The part of /requests/RID/timeline that is read."""

    ttft_s: float
    spans: list[_Span]
    transfer: _Transfer

    def span_s(self, name: str) -> float:
        return sum(span.duration_s for span in self.spans if span.name == name)


class _Summary(msgspec.Struct):
    rid: str
    prompt_tokens: int


class _Requests(msgspec.Struct):
    requests: list[_Summary]


class _Info(msgspec.Struct):
    """The part of /server_info that is read. chunked_prefill_size: the decode server's own, which
    the prefill server is taken to have too."""

    disaggregation_mode: str
    vocab_size: int
    model_path: str
    device: str
    max_total_num_tokens: int
    chunked_prefill_size: int
    max_running_requests: int


class Calibration:
    """Of the pair whose decode server is at `url`: rounds of samples, and what they come to.

    send: sends a workload to it. Rounds may lie between other measurements, so that a slow minute
    of the machine hits both.
    Raises: ConfigError if it is none, OSError, RuntimeError if a server fails.
    """

    def __init__(self, url: str, send: Send, ranges: Ranges) -> None:
        self._url = url
        self._send = send
        self._ranges = ranges
        self._info = msgspec.json.decode(_get(url, "/server_info"), type=_Info)
        if self._info.disaggregation_mode != "decode":
            raise ConfigError(f"--url {url}: must be the decode server of a pair")
        self._draw = _Drawer(np.random.default_rng(1), self._info.vocab_size)
        self._stages: list[_Stages] = []
        self._steps: list[StepSample] = []
        self._queues_s: list[float] = []
        send([self._draw.ask(0, 0.0, SHORT_PROMPT, 8)])  # warms both servers

    @property
    def _queue_length(self) -> int:
        lengths = self._ranges.prompt_lengths
        return lengths[len(lengths) // 2]

    def run_round(self) -> None:
        ranges, send, draw = self._ranges, self._send, self._draw
        for length in ranges.prompt_lengths:
            for _ in range(PROMPTS_EACH):
                self._stages.append(_one_alone(self._url, send, draw, length))
        for count in ranges.stream_counts:
            self._steps.append(_together(send, draw, count, SHORT_PROMPT))
        few = max(1, ranges.stream_counts[-1] // 2)
        self._steps.append(_together(send, draw, few, ranges.prompt_lengths[-1]))
        queue = [draw.ask(i, 0.0, self._queue_length, 1) for i in range(QUEUE_COUNT)]
        self._queues_s.append(send(queue).duration_s)

    def profile(self) -> Profile:
        """After one round or more."""
        profile = _fit(self._stages, self._steps, self._info)
        found_s = [_dispatch_s(queue_s, self._queue_length, profile) for queue_s in self._queues_s]
        return msgspec.structs.replace(profile, dispatch_s=max(0.0, float(np.median(found_s))))


def _fit(stages: Sequence[_Stages], steps: Sequence[StepSample], info: _Info) -> Profile:
    """All but dispatch_s."""
    tokens = np.array([float(one.token_count) for one in stages])
    ones = np.ones(len(stages))
    exposed = np.array([float(one.exposed_nbytes) for one in stages])
    prefill = fit_costs(
        np.stack([ones, tokens, tokens**2 / 2], axis=1),
        np.array([one.prefill_s for one in stages]),
    )
    decode = fit_costs(
        np.array([(1.0, one.stream_count, one.context_count) for one in steps]),
        np.array([one.step_s for one in steps]),
    )
    frontend = fit_costs(
        np.stack([ones, tokens], axis=1), np.array([one.frontend_s for one in stages])
    )
    wire = fit_costs(np.stack([ones, exposed], axis=1), np.array([one.exposed_s for one in stages]))
    return Profile(
        source=f"{Path(info.model_path).name} on {info.device}",
        prefill_fixed_s=prefill[0],
        prefill_token_s=prefill[1],
        prefill_pair_s=prefill[2],
        decode_fixed_s=decode[0],
        decode_sequence_s=decode[1],
        decode_context_s=decode[2],
        frontend_s=frontend[0],
        frontend_token_s=frontend[1],
        dispatch_s=0.0,
        message_s=float(np.median([one.message_s for one in stages])),
        transfer_s=wire[0],
        bandwidth=1 / max(wire[1], LEAST_S),
        token_nbytes=float(np.median(exposed / tokens)),
        client_token_s=float(np.median([one.client_token_s for one in steps])),
        chunk_token_max=info.chunked_prefill_size,
        running_max=info.max_running_requests,
        token_capacity=info.max_total_num_tokens,
    )


# ---- samples -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stages:
    """Of one prompt that found idle servers. frontend_s: the client's waiting time beyond the
    scheduler's account; message_s: the part of that account without computing or sending.
    exposed_s, exposed_nbytes: of the transfer, after the last layer."""

    token_count: int
    prefill_s: float
    frontend_s: float
    message_s: float
    exposed_s: float
    exposed_nbytes: int


@dataclass(frozen=True, slots=True)
class StepSample:
    """stream_count, context_count: sequences of the steps, and tokens of their caches together."""

    stream_count: int
    context_count: float
    step_s: float
    client_token_s: float


class _Drawer:
    """Prompts that share nothing."""

    def __init__(self, rng: np.random.Generator, vocab_size: int) -> None:
        self._rng = rng
        self._vocab_size = vocab_size

    def ask(self, index: int, at_s: float, prompt_count: int, output_count: int) -> Ask:
        prompt = tuple(self._rng.integers(0, self._vocab_size, size=prompt_count).tolist())
        return Ask(index, at_s, prompt, output_count)


def _one_alone(url: str, send: Send, draw: _Drawer, length: int) -> _Stages:
    outcome = send([draw.ask(0, 0.0, length, 2)]).outcomes[0]
    listed = msgspec.json.decode(_get(url, "/requests"), type=_Requests).requests
    rid = next(one.rid for one in listed if one.prompt_tokens == length)  # the newest
    timeline = msgspec.json.decode(_get(url, f"/requests/{rid}/timeline"), type=_Timeline)
    wire = timeline.transfer
    exposed_s = wire.wire_s * wire.exposed_bytes / wire.bytes
    # Where the scheduler heard of both ends together, the wire is in the stage before.
    both_s = timeline.span_s("prefill") + timeline.span_s("transfer")
    return _Stages(
        token_count=length,
        prefill_s=max(LEAST_S, both_s - exposed_s),
        frontend_s=max(LEAST_S, measure(outcome).ttft / 1e3 - timeline.ttft_s),
        message_s=max(LEAST_S, timeline.ttft_s - both_s),
        exposed_s=max(LEAST_S, exposed_s),
        exposed_nbytes=wire.exposed_bytes,
    )


def _together(send: Send, draw: _Drawer, count: int, prompt_count: int) -> StepSample:
    """Mean time of a step while all of so many streams run: longer ones, until they overlap."""
    token_count = STREAM_TOKEN_COUNT
    while token_count <= STREAM_TOKEN_MAX:
        asks = [draw.ask(i, 0.0, prompt_count, token_count) for i in range(count)]
        began_s = time.process_time()
        streams = [outcome.arrivals for outcome in send(asks).outcomes]
        client_token_s = (time.process_time() - began_s) / (count * token_count)
        sample = step_sample(streams, prompt_count, client_token_s)
        if sample is not None:
            return sample
        token_count *= 2
    raise RuntimeError(f"{count} streams of {token_count // 2} tokens never ran at the same time")


def step_sample(
    streams: Sequence[Sequence[tuple[float, int]]], prompt_count: int, client_token_s: float
) -> StepSample | None:
    """Of the time when all streams ran; None if it was too short."""
    start_s = max(events[0][0] for events in streams)
    end_s = min(events[-1][0] for events in streams)
    periods_s: list[float] = []
    context_count = 0.0
    for events in streams:
        inside = [(at_s, tokens) for at_s, tokens in events if start_s <= at_s <= end_s]
        if len(inside) < 2 or inside[-1][1] - inside[0][1] < STEPS_TOGETHER_MIN:
            return None
        (first_s, first), (last_s, last) = inside[0], inside[-1]
        periods_s.append((last_s - first_s) / (last - first))
        context_count += prompt_count + (first + last) / 2
    return StepSample(len(streams), context_count, float(np.mean(periods_s)), client_token_s)


def _dispatch_s(queue_s: float, length: int, profile: Profile) -> float:
    """What a prompt of a queue takes beyond its share of the steps. queue_s: until all are done."""
    each_step = max(1, profile.chunk_token_max // length)
    step_count = -(-QUEUE_COUNT // each_step)
    variable_s = profile.step_s([(0, length)], 0, 0) - profile.prefill_fixed_s
    computed_s = step_count * profile.prefill_fixed_s + QUEUE_COUNT * variable_s
    edges_s = profile.frontend_s + profile.message_s + profile.transferred_s(length)
    return (queue_s - edges_s - computed_s) / QUEUE_COUNT


def _get(url: str, path: str) -> bytes:
    with urlopen(url + path, timeout=ASK_TIMEOUT_S) as response:
        content: bytes = response.read()
    return content
