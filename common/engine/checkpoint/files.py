"""Where each tensor of a checkpoint lies: file, dtype, shape and byte range, from headers alone.

Knows nothing of models or ranks, and reads no weights.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from common.engine.config.json_fields import JsonFields
from common.errors import ConfigError, config_error

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# The format's own bound; a larger length means that the file is something else.
HEADER_NBYTES_MAX = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint. dtype: as safetensors spells it ("BF16").

    start, stop: half-open byte range in the file.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_tensor_entries(model_path: Path) -> dict[str, TensorEntry]:
    """Every tensor of a checkpoint in one or many safetensors files, by name.

    Raises: ConfigError if files are missing, cut short or malformed, or the index disagrees.
    """
    files = _weight_files(model_path)
    entries: dict[str, TensorEntry] = {}
    for path in sorted(set(files.values())) if files else [model_path / SINGLE_NAME]:
        for entry in _read_header(path):
            if entry.name in entries:
                raise ConfigError(
                    f"{path}: tensor {entry.name} is also in {entries[entry.name].path.name}"
                )
            entries[entry.name] = entry
    for name, path in files.items():
        if name not in entries or entries[name].path != path:
            raise ConfigError(
                f"{model_path / INDEX_NAME}: tensor {name} is not in {path.name} as it says"
            )
    return entries


def _weight_files(model_path: Path) -> dict[str, Path]:
    """Tensor name -> file of a checkpoint with an index; empty for one in a single file."""
    if (model_path / INDEX_NAME).is_file():
        index = JsonFields.read(model_path / INDEX_NAME)
        weight_map = index.object("weight_map")
        if weight_map is None or not weight_map.values:
            raise index.error("weight_map", "an object from tensor names to file names")
        names = {name: weight_map.text(name) for name in weight_map.values}
        for file_name in sorted(set(names.values())):
            if Path(file_name).name != file_name:
                raise ConfigError(f"{index.where}: file {file_name!r}: must be a plain file name")
            if not (model_path / file_name).is_file():
                raise ConfigError(f"{model_path / file_name}: is named by the index but missing")
        return {name: model_path / file_name for name, file_name in names.items()}
    if not (model_path / SINGLE_NAME).is_file():
        raise ConfigError(f"{model_path}: must hold {SINGLE_NAME} or {INDEX_NAME}")
    return {}


def _read_header(path: Path) -> list[TensorEntry]:
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            header_nbytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= header_nbytes <= HEADER_NBYTES_MAX:
                raise ConfigError(f"{path}: is not a safetensors file")
            header = file.read(header_nbytes)
        file_nbytes = path.stat().st_size
    except OSError as exc:
        raise config_error(f"{path}: can't be read: {exc.strerror or exc}", exc) from exc
    try:
        parsed: object = json.loads(header)
    except ValueError as exc:
        raise ConfigError(f"{path}: has a broken safetensors header: {exc}") from exc
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path}: has a broken safetensors header: no object")
    first = 8 + header_nbytes
    entries = [
        _read_entry(name, value, path, first)
        for name, value in parsed.items()
        if name != "__metadata__"
    ]
    for entry in entries:
        if entry.stop > file_nbytes:
            raise ConfigError(
                f"{path}: is cut short: tensor {entry.name} ends at byte {entry.stop}, "
                f"the file at {file_nbytes}"
            )
    return entries


def _read_entry(name: str, value: object, path: Path, first: int) -> TensorEntry:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: has a broken safetensors header: tensor {name}")
    fields = JsonFields(value, f"{path}: tensor {name}")
    start, *rest = fields.integers("data_offsets") or (0,)
    if len(rest) != 1 or rest[0] < start:
        raise fields.error("data_offsets", "a pair of ascending offsets")
    return TensorEntry(
        name=name,
        path=path,
        dtype=fields.text("dtype"),
        shape=fields.integers("shape"),
        start=first + start,
        stop=first + rest[0],
    )
