"""Sessions recorded for kv-cache-tester: one .json for each, or a directory of them.

    {"block_size": 64, "hash_id_scope": "local", "requests": [
        {"t": 0.0, "type": "n", "in": 128679, "out": 838, "hash_ids": [1, 2, ...],
         "api_time": 19.6, "think_time": 0.0}, ...]}

Times in seconds; `think_time` is before its own request. An entry of the type `subagent` has
`requests` of its own, on the same clock: a session beside its parent's, which does not wait for it.
Local ids are those of one file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench.serve.traces.row import Trace, TraceRow, checked, packed
from common.errors import ConfigError

SUBAGENT = "subagent"


class _Entry(msgspec.Struct, rename={"input_length": "in", "output_length": "out"}):
    """A request, or the requests of a subagent."""

    t: float
    type: str = ""
    input_length: int = 0
    output_length: int = 0
    hash_ids: list[int] = []
    api_time: float | None = None
    think_time: float | None = None
    requests: list[_Entry] = []


class _File(msgspec.Struct):
    requests: list[_Entry]
    block_size: int = 64
    hash_id_scope: str = "local"


def read_kv_cache_tester(where: str, path: Path, file_max: int | None) -> Trace:
    """The first `file_max` files of a directory by their names, or one file.

    Raises: ConfigError with the file and the number of the request, counted from 0.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    rows: list[TraceRow] = []
    block_size = 0
    for number, one in enumerate(files[:file_max], 1):
        at = f"{where}: {one.name}"
        read = _read(at, one)
        if block_size and read.block_size != block_size:
            raise ConfigError(f"{at}: block_size {read.block_size}: other files have {block_size}")
        block_size = read.block_size
        scope = 0 if read.hash_id_scope == "global" else number
        rows += _rows(at, read.requests, one.stem, scope)
    return Trace(rows, block_size)


def _read(where: str, path: Path) -> _File:
    try:
        read = msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as exc:
        raise ConfigError(f"{where}: can't be read: {exc.strerror}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{where}: {exc}") from exc
    if not 1 <= read.block_size <= 1 << 20:
        raise ConfigError(f"{where}: block_size {read.block_size}: must be in 1..{1 << 20}")
    return read


def _rows(where: str, entries: list[_Entry], session: str, scope: int) -> Iterator[TraceRow]:
    for index, entry in enumerate(entries):
        at = f"{where}: request {index}"
        if entry.type == SUBAGENT:
            yield from _rows(at, entry.requests, f"{session}/{index}", scope)
            continue
        row = TraceRow(
            timestamp=1e3 * entry.t,
            input_length=entry.input_length,
            output_length=entry.output_length,
            hash_ids=packed(at, entry.hash_ids),
            scope=scope,
            session=session,
            elapsed_s=entry.api_time or 0.0,
            think_s=entry.think_time,
        )
        yield checked(at, row)
