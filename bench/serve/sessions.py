"""Sessions: the turns of a trace or drawn ones, and the prompt of each turn. Sends nothing.

The prompt of a turn is what its session has said so far, prompts and answers as they really were,
and new tokens behind it. Only the new ones are made here.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.serve.noise import block_tokens, own_tokens
from bench.serve.settings import SESSION_COUNT_DEFAULT, Settings
from bench.serve.traces.read import read_trace
from bench.serve.traces.row import BLOCK_TOKENS, Trace, TraceRow
from bench.serve.workload import draw_arrivals, draw_lengths


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session. Lengths in tokens.

    think_s: from the end of the answer before to this request.
    kept_max: how much of what was said before it may keep; input_length: all that fits.
    hash_ids: of the blocks of the recorded prompt from `first_block` on, as far as they are known.
    """

    input_length: int
    output_count: int
    think_s: float = 0.0
    kept_max: int = 0
    first_block: int = 0
    hash_ids: array[int] = field(default_factory=lambda: array("q"))

    @property
    def is_append_only(self) -> bool:
        return self.kept_max == self.input_length


@dataclass(frozen=True, slots=True)
class Session:
    """index: of all. begin_s: when its first request is due. scope: of its hash ids."""

    index: int
    begin_s: float
    turns: tuple[Turn, ...]
    scope: int = 0


@dataclass(frozen=True, slots=True)
class PromptSource:
    """New tokens of any turn; the same turn always has the same."""

    seed: int
    vocab_size: int
    block_size: int

    def tokens(self, session: Session, number: int, start: int, stop: int) -> list[int]:
        """Tokens start .. stop of the recorded prompt of turn `number`."""
        turn = session.turns[number]
        first = turn.first_block * self.block_size
        covered = min(stop, first + len(turn.hash_ids) * self.block_size)
        shared: list[int] = []
        if first <= start < covered:
            span = (start - first, covered - first)
            shared = block_tokens(
                self.seed, session.scope, turn.hash_ids, self.block_size, span, self.vocab_size
            )
        owner = (session.index, number)
        begin = start + len(shared)
        return shared + own_tokens(self.seed, owner, begin, stop, self.vocab_size)


def make_sessions(settings: Settings, vocab_size: int) -> tuple[list[Session], PromptSource]:
    """Sessions in the order of their beginnings. Raises: ConfigError for an unusable trace."""
    if settings.dataset_path is None:
        source = PromptSource(settings.seed, vocab_size, BLOCK_TOKENS)
        return _draw(settings), source
    trace = read_trace(settings.dataset_path, settings.trace_format, settings.num_sessions)
    block_size = settings.trace_block_size or trace.block_size
    sessions = _of_trace(trace, settings, block_size)
    return sessions, PromptSource(settings.seed, vocab_size, block_size)


def lengths_of_first_turns(sessions: Sequence[Session]) -> list[tuple[int, int]]:
    return [(one.turns[0].input_length, one.turns[0].output_count) for one in sessions]


def turn_count(sessions: Sequence[Session]) -> int:
    return sum(len(session.turns) for session in sessions)


def _draw(settings: Settings) -> list[Session]:
    assert settings.request_rate is not None, "only of a trace"
    rng = np.random.default_rng(settings.seed)
    count = settings.num_sessions or SESSION_COUNT_DEFAULT
    begins = draw_arrivals(count, settings.request_rate, settings.burstiness, rng)
    lengths = draw_lengths(settings.random_input_len, settings.random_range_ratio, count, rng)
    output_count = settings.random_output_len
    sessions: list[Session] = []
    for index, (begin_s, input_length) in enumerate(zip(begins, lengths, strict=True)):
        turns = [Turn(input_length, output_count)]
        for _ in range(1, settings.session_turns):
            input_length += output_count + settings.session_turn_len
            turns.append(Turn(input_length, output_count, settings.think_time_s, input_length))
        sessions.append(Session(index, begin_s, tuple(turns)))
    return sessions


def _of_trace(trace: Trace, settings: Settings, block_size: int) -> list[Session]:
    """Rows of one session in the order of their times; a row without one is a session by itself."""
    rows_of: dict[str | int, list[TraceRow]] = defaultdict(list)
    for index, row in enumerate(trace.rows):
        rows_of[row.session or index].append(row)
    recorded = list(rows_of.values())[: settings.num_sessions]
    if settings.request_rate is None:
        first = recorded[0][0].timestamp
        begins = [(rows[0].timestamp - first) / 1e3 * settings.trace_slowdown for rows in recorded]
    else:
        rng = np.random.default_rng(settings.seed)
        begins = draw_arrivals(len(recorded), settings.request_rate, settings.burstiness, rng)
    return [
        Session(
            index,
            begin_s,
            tuple(_turns(rows, block_size, settings.trace_slowdown)),
            rows[0].scope,
        )
        for index, (begin_s, rows) in enumerate(zip(begins, recorded, strict=True))
    ]


def _turns(rows: Sequence[TraceRow], block_size: int, slowdown: float) -> list[Turn]:
    turns: list[Turn] = []
    before: TraceRow | None = None
    for row in rows:
        if before is None:
            turns.append(Turn(row.input_length, row.output_length, hash_ids=row.hash_ids))
        else:
            turns.append(_later_turn(before, row, block_size, slowdown))
        before = row
    return turns


def _later_turn(before: TraceRow, row: TraceRow, block_size: int, slowdown: float) -> Turn:
    """A turn that keeps what the trace shows it to share with the prompt before.

    If that is all of the prompt's blocks, the answer is kept too: no trace has ids of answers.
    Without ids, a longer prompt keeps everything, and any other nothing.
    """
    shared = 0
    if row.hash_ids and before.hash_ids:
        pairs = zip(before.hash_ids, row.hash_ids, strict=False)
        length = min(len(before.hash_ids), len(row.hash_ids))
        shared = next((index for index, (a, b) in enumerate(pairs) if a != b), length)
        is_append_only = shared >= before.input_length // block_size
    else:
        is_append_only = row.input_length > before.input_length
    think_s = row.think_s
    if think_s is None:
        think_s = max(0.0, (row.timestamp - before.timestamp) / 1e3 - before.elapsed_s)
    first_block = max(0, shared - 1)  # a prompt may end within the last one
    kept_max = row.input_length if is_append_only else min(shared * block_size, row.input_length)
    return Turn(
        row.input_length,
        row.output_length,
        think_s * slowdown,
        kept_max,
        first_block,
        row.hash_ids[first_block:],
    )
