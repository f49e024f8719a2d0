"""Reads a trace of any known format. The format is that of the file, if it is not named."""

from __future__ import annotations

from pathlib import Path

from bench.serve.traces.kv_cache_tester import read_kv_cache_tester
from bench.serve.traces.mooncake import read_mooncake
from bench.serve.traces.row import Trace
from bench.serve.traces.tables import TABLES, find_table, read_table
from common.errors import ConfigError

HEADER_SHOWN_MAX = 200  # characters
MOONCAKE, KV_CACHE_TESTER = "mooncake", "kv-cache-tester"
FORMATS = (MOONCAKE, KV_CACHE_TESTER, *(table.name for table in TABLES))


def read_trace(path: Path, name: str | None = None, file_max: int | None = None) -> Trace:
    """Rows in the order of their timestamps. name: of FORMATS; None: found from the file.

    file_max: of a directory of sessions. Raises: ConfigError naming the file and the line.
    """
    where = f"--dataset-path {path}"
    if name == KV_CACHE_TESTER or (name is None and (path.is_dir() or path.suffix == ".json")):
        trace = read_kv_cache_tester(where, path, file_max)
    else:
        trace = _read_text(where, path, name)
    if not trace.rows:
        raise ConfigError(f"{where}: must hold at least one request")
    return Trace(sorted(trace.rows, key=lambda row: row.timestamp), trace.block_size)


def _read_text(where: str, path: Path, name: str | None) -> Trace:
    if name is None and path.suffix not in (".jsonl", ".csv"):
        raise ConfigError(
            f"{where}: must end with .jsonl, .csv or .json, or be a directory of .json; "
            f"or give --trace-format, one of {', '.join(FORMATS)}"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as exc:
        raise ConfigError(f"{where}: can't be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{where}: must be text") from exc
    if name == MOONCAKE or (name is None and path.suffix == ".jsonl"):
        return read_mooncake(where, text)
    table = next((table for table in TABLES if table.name == name), None)
    table = table or find_table(text)
    if table is None:
        known = "; ".join(f"{one.name}: {', '.join(one.needed)}" for one in TABLES)
        found = (text.splitlines() or [""])[0][:HEADER_SHOWN_MAX]
        raise ConfigError(
            f"{where}: line 1 {found!r}: must name the columns of one format ({known})"
        )
    return read_table(where, text, table)
