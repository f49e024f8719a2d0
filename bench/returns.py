"""Answers that go back to the prefill server, against a pair that leaves them where they are.

Sessions with long answers and short questions, one model for each kind of cache. The decode server
computes no rests, so that the prefill server gets every turn. Counted is what it computes of turns
2 and later; the pairs take turns.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from bench.report import Row, at_most, row_of_medians
from bench.reuse_account import account_since
from bench.reuse_models import CONTEXT_LENGTH, MODELS, VOCAB_SIZE, ReuseModel, written
from bench.sending import replay_to
from demo.servers import Pair

FLAGS = (
    *("--load-format", "dummy", "--dtype", "float32", "--cpu-threads", "1", "--page-size", "16"),
    *("--max-total-tokens", "32768", "--context-length", str(CONTEXT_LENGTH)),
    *("--request-history", "4096"),
)
ON, OFF = ("--return-cache", "auto"), ("--return-cache", "off")
DECODE = ("--local-prefill", "off")
# Without prefill work of its own, a decode server keeps checkpoints only if it is told to.
CHECKPOINTS = ("--max-checkpoints", "64")
ROUNDS = 2
SESSION_COUNT, TURN_COUNT = 4, 5
FIRST_PROMPT, NEW_TOKENS, ANSWER = 200, 12, 240
COMPUTED_RATIO_MAX = 0.1


def run() -> list[Row]:
    return [measure(model) for model in MODELS]


def measure(model: ReuseModel) -> Row:
    with ExitStack() as stack:
        path = stack.enter_context(written(model))
        returning = stack.enter_context(Pair(path, (*FLAGS, *ON), (*FLAGS, *DECODE, *ON)))
        plain = stack.enter_context(
            Pair(path, (*FLAGS, *OFF), (*FLAGS, *DECODE, *OFF, *CHECKPOINTS))
        )
        computed: dict[int, list[float]] = {0: [], 1: []}
        for number in range(ROUNDS):
            for which, pair in enumerate((returning, plain)):
                computed[which].append(_computed_later(pair, number))
    return row_of_medians(
        f"returns_{model.name}_computed", "tokens", computed[0], "left there", computed[1],
        at_most(COMPUTED_RATIO_MAX),
    )  # fmt: skip


def _computed_later(pair: Pair, number: int) -> float:
    """Prompt tokens that the prefill server computed of turns 2 and later. No two sessions begin
    alike, so all of a first prompt is computed."""
    began_wall_s = time.time()
    played = replay_to(
        pair.decode.url,
        *("--num-sessions", str(SESSION_COUNT), "--session-turns", str(TURN_COUNT)),
        *("--random-input-len", str(FIRST_PROMPT), "--session-turn-len", str(NEW_TOKENS)),
        *("--random-output-len", str(ANSWER), "--seed", str(number)),
        vocab_size=VOCAB_SIZE,
    )
    account = account_since(pair, began_wall_s, len(played.outcomes))
    return float(account.computed_count - SESSION_COUNT * FIRST_PROMPT)
