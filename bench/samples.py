"""n samples of one prompt over a pair, against one: bytes moved, and time to all first tokens.

One model for each kind of cache. Prompts share nothing, so each is computed and sent. Taken by
turns; bytes are those that the prefill server counted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import httpx
import msgspec
import numpy as np

from bench.report import Row, at_most, row_of_medians
from bench.reuse_models import CONTEXT_LENGTH, MODELS, VOCAB_SIZE, ReuseModel, written
from demo.servers import Pair

FLAGS = (
    *("--load-format", "dummy", "--dtype", "float32", "--cpu-threads", "1", "--page-size", "16"),
    *("--max-total-tokens", "32768", "--context-length", str(CONTEXT_LENGTH)),
)
SAMPLE_COUNT = 8
PROMPT_LENGTH, ANSWER = 1500, 12
ROUNDS = 12
FIRST_TOKENS_RATIO_MAX = 1.3
BYTES_RATIO_MAX = 1.0
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Answered:
    """first_tokens_ms: until the last of the samples had its first token. nbytes: that moved."""

    first_tokens_ms: float
    nbytes: int


def run() -> list[Row]:
    return [row for model in MODELS for row in measure(model)]


def measure(model: ReuseModel) -> list[Row]:
    one: list[Answered] = []
    several: list[Answered] = []
    with written(model) as path, Pair(path, FLAGS, FLAGS) as pair:
        url = f"{pair.decode.url}/generate"
        for number in range(-1, ROUNDS):
            for count, found in ((1, one), (SAMPLE_COUNT, several)):
                answered = ask(url, count, seed=2 * number + (count > 1) + 2)
                if number >= 0:  # the round before warms what all use
                    found.append(answered)
    name = f"samples_{model.name}"
    return [
        row_of_medians(
            f"{name}_first_tokens", "ms",
            [answered.first_tokens_ms for answered in several],
            "one sample", [answered.first_tokens_ms for answered in one],
            at_most(FIRST_TOKENS_RATIO_MAX),
        ),
        row_of_medians(
            f"{name}_moved", "MB",
            [answered.nbytes / 1e6 for answered in several],
            "one sample", [answered.nbytes / 1e6 for answered in one],
            at_most(BYTES_RATIO_MAX),
        ),
    ]  # fmt: skip


def ask(url: str, count: int, seed: int) -> Answered:
    """Stream `count` samples of a new prompt."""
    prompt = np.random.default_rng(seed).integers(3, VOCAB_SIZE, size=PROMPT_LENGTH).tolist()
    sampling = {"n": count, "max_new_tokens": ANSWER, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    first_s: dict[int, float] = {}
    nbytes: dict[int, int] = {}
    began_s = time.perf_counter()
    with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            payload = line.removeprefix("data: ")
            if not payload or payload == "[DONE]":
                continue
            event = msgspec.json.decode(payload)
            index = event.get("index", 0)
            first_s.setdefault(index, time.perf_counter() - began_s)
            timeline = event["meta_info"].get("timeline")
            if timeline is not None:
                nbytes[index] = timeline["transfer"]["nbytes"]
    assert len(first_s) == len(nbytes) == count, f"{len(first_s)} of {count} samples came"
    return Answered(1e3 * max(first_s.values()), sum(nbytes.values()))
