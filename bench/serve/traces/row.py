"""What every format of a trace is read into. Knows nothing of files or of tokens."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from common.errors import ConfigError

LENGTH_MAX = 1 << 24
TIMESTAMP_MAX_MS = 1e15
SECONDS_MAX = 1e9
HASH_ID_MAX = (1 << 63) - 1
BLOCK_TOKENS = 512  # of a hash id, where a trace doesn't say


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a recorded service.

    timestamp: ms. hash_ids: int64, one for every block of the prompt, equal ids are equal tokens;
        empty if nothing is known. scope: ids of two scopes have nothing in common.
    session: rows of one name are turns of one session; "": the row is a session by itself.
    elapsed_s: how long the answer took, if known. think_s: from the end of the answer before to
        this request; None: to be found from the timestamps.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: array[int] = field(default_factory=lambda: array("q"))
    scope: int = 0
    session: str = ""
    elapsed_s: float = 0.0
    think_s: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """rows: in the order of their timestamps. block_size: tokens that a hash id stands for."""

    rows: list[TraceRow]
    block_size: int


def checked(where: str, row: TraceRow) -> TraceRow:
    """Raises: ConfigError with the place, the value and what is allowed."""
    for name, value, low, high in (
        ("timestamp", row.timestamp, 0, TIMESTAMP_MAX_MS),
        ("input length", row.input_length, 1, LENGTH_MAX),
        ("output length", row.output_length, 1, LENGTH_MAX),
        ("elapsed time", row.elapsed_s, 0, SECONDS_MAX),
        ("think time", row.think_s or 0.0, 0, SECONDS_MAX),
    ):
        if not low <= value <= high:  # neither is nan
            raise ConfigError(f"{where}: {name} {value:g}: must be in {low:g}..{high:g}")
    return row


def packed(where: str, hash_ids: list[int]) -> array[int]:
    """Raises: ConfigError for an id that is out of range."""
    if hash_ids and not (min(hash_ids) >= 0 and max(hash_ids) <= HASH_ID_MAX):
        bad = next(one for one in hash_ids if not 0 <= one <= HASH_ID_MAX)
        raise ConfigError(f"{where}: hash id {bad}: must be in 0..{HASH_ID_MAX}")
    return array("q", hash_ids)
