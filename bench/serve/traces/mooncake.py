"""Mooncake's traces: a .jsonl with one request a line.

`timestamp` (ms), `input_length`, `output_length`, `hash_ids`: one id for every 512 tokens of the
prompt, and equal ids are equal tokens in the whole file.
"""

from __future__ import annotations

import msgspec

from bench.serve.traces.row import BLOCK_TOKENS, Trace, TraceRow, checked, packed
from common.errors import ConfigError


class _Request(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_mooncake(where: str, text: str) -> Trace:
    """Raises: ConfigError with the line."""
    rows: list[TraceRow] = []
    decoder = msgspec.json.Decoder(_Request)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        at = f"{where}: line {number}"
        try:
            one = decoder.decode(line)
        except msgspec.DecodeError as exc:
            raise ConfigError(f"{at}: {exc}") from exc
        ids = packed(at, one.hash_ids)
        rows.append(checked(at, TraceRow(one.timestamp, one.input_length, one.output_length, ids)))
    return Trace(rows, BLOCK_TOKENS)
