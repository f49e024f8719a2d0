"""Fills a model's tensors from a checkpoint, this rank's slices only, or with seeded noise.

A layer declares its tensors as `Weight`s; what a model is made of is not known here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.engine.checkpoint.codes import Codes
from common.engine.checkpoint.files import TensorEntry, read_tensor_entries
from common.engine.checkpoint.scaled_tensors import (
    FLOAT_DTYPES,
    UNREAD_SUFFIXES,
    Entries,
    Parts,
    ReadSlice,
    Role,
    check_parts,
    find_format,
    read_stored,
    weight_name,
)
from common.engine.config.weight_format import Integers, Packing, StoredFormat, WeightFormat
from common.errors import ConfigError, config_error

INTEGER_DTYPES = ("I64", "I32")
NAMES_SHOWN_MAX = 8


class CodesKeeper(Protocol):
    """What may multiply by a weight as it is stored."""

    def keep(self, parts: Sequence[Codes]) -> bool:
        """Take a weight's parts, rows below rows; False if they must be made wide."""

    def room(self, view: Tensor) -> Tensor:
        """The memory of a piece's target, to be written."""

    @property
    def device(self) -> torch.device:
        """Where the weight is multiplied by."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One tensor of a checkpoint and the part of it that goes into a view of a layer's tensor.

    shape: of the whole tensor in the checkpoint. take: one slice per dimension.
    target: what the taken part is copied to; it may be broadcast to it.
    keeper: what may keep a quantised weight that this is some rows of as it is stored.
    index_count: of a tensor of integers, which are in 0..index_count - 1; 0 for one of numbers.
    """

    name: str
    shape: tuple[int, ...]
    take: tuple[slice, ...]
    target: Tensor
    index_count: int = 0
    keeper: CodesKeeper | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a layer and the ways a checkpoint may hold it, the most common one first."""

    ways: tuple[tuple[TensorSlice, ...], ...]

    @staticmethod
    def whole(name: str, tensor: Tensor) -> Weight:
        """A tensor that a checkpoint holds under one name and every rank takes all of."""
        take = tuple(slice(None) for _ in tensor.shape)
        return Weight(((TensorSlice(name, tuple(tensor.shape), take, tensor),),))

    @staticmethod
    def cut(name: str, size: int, rows: range, tensor: Tensor) -> Weight:
        """`rows` of a vector of `size`; tensor: [len(rows)]."""
        return Weight(((TensorSlice(name, (size,), (slice(rows.start, rows.stop),), tensor),),))

    @staticmethod
    def indexes(name: str, tensor: Tensor, count: int) -> Weight:
        """As `whole`, of integers in 0..count - 1."""
        take = tuple(slice(None) for _ in tensor.shape)
        return Weight(((TensorSlice(name, tuple(tensor.shape), take, tensor, count),),))


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a piece is found. stored: how, if it is quantised."""

    piece: TensorSlice
    parts: Parts
    stored: StoredFormat | None = None

    @property
    def values(self) -> TensorEntry:
        return self.parts[Role.VALUES]


Found = tuple[StoredFormat, dict[Role, str]] | None
"""How a quantised weight is stored, and what its tensors are called."""


def same_name(name: str) -> str:
    """For checkpoints that name tensors as layers do."""
    return name


def text_name(name: str) -> str | None:
    """For composite checkpoints: the language model's tensors as one alone would name them.

    Everything else belongs to towers for images or sound.
    """
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    name = name.removeprefix("language_model.")
    return name if name.startswith("lm_head.") else None


def load_weights(
    model_path: Path,
    weights: Iterable[Weight],
    *,
    is_ignored: Callable[[str], bool],
    rename: Callable[[str], str | None] = same_name,
    weight_format: WeightFormat | None = None,
) -> None:
    """Fill every weight from the safetensors files of a checkpoint directory.

    is_ignored: tells for a name that no weight asks for whether that is in order (another pipeline
        stage, a tied head, a derived buffer).
    rename: a name in the files to the one that weights ask for, None for a tensor to leave out.
    weight_format: of quantised tensors, which are multiplied out; None if there may be none.
    Raises: ConfigError naming missing, unexpected, wrongly shaped or non-float tensors.
    """
    entries = _rename_entries(read_tensor_entries(model_path), rename)

    def find(name: str) -> Found:
        return find_format(name, entries, weight_format) if weight_format is not None else None

    def is_there(name: str) -> bool:
        found = find(name)
        return (name if found is None else found[1][Role.VALUES]) in entries

    pieces = [piece for weight in weights for piece in _choose_way(weight, is_there)]
    found = {piece.name: find(piece.name) for piece in pieces}
    # First, because a tensor that is not announced as quantised may have scales all the same.
    for piece in sorted(pieces, key=lambda piece: piece.name):
        if found[piece.name] is None and piece.name in entries:
            allowed = INTEGER_DTYPES if piece.index_count else FLOAT_DTYPES
            _check_dtype(entries[piece.name], allowed)
    wanted = {
        part
        for name, stored in found.items()
        for part in ([name] if stored is None else stored[1].values())
    }

    def is_in_order(name: str) -> bool:
        weight = weight_name(name)
        if weight != name and name.endswith(UNREAD_SUFFIXES) and found.get(weight) is not None:
            return True
        return is_ignored(name) or is_ignored(weight) or _is_zero_bias(name, entries, found)

    _check_names(model_path, wanted, entries, is_in_order)
    sources = [_find_source(piece, entries, found[piece.name]) for piece in pieces]
    for source in sources:
        _check_source(source)
    groups = _by_keeper(sources)
    for path in sorted({group[0].values.path for group in groups}):
        _copy_file([group for group in groups if group[0].values.path == path])


def fill_with_noise(weights: Iterable[Weight], *, seed: int) -> None:
    """Random weights that keep activations of order one, without reading any file.

    A tensor's values depend on (seed, its name, its whole shape) alone, so that ranks that hold
    different slices of it hold parts of the same model.
    """
    for weight in weights:
        for piece in weight.ways[0]:
            _room(piece).copy_(_noise(piece, seed)[piece.take])


def _room(piece: TensorSlice) -> Tensor:
    return piece.target if piece.keeper is None else piece.keeper.room(piece.target)


def _noise(piece: TensorSlice, seed: int) -> Tensor:
    if len(piece.shape) == 1 and not piece.name.endswith(".bias"):
        return torch.ones(piece.shape)
    digest = hashlib.sha256(f"{seed}:{piece.name}".encode()).digest()
    device = _room(piece).device
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if piece.index_count:
        return torch.randint(piece.index_count, piece.shape, generator=generator, device=device)
    deviation = piece.shape[-1] ** -0.5
    values = torch.empty(piece.shape, dtype=torch.float32, device=device)
    return values.normal_(0.0, deviation, generator=generator)


def _rename_entries(
    entries: dict[str, TensorEntry], rename: Callable[[str], str | None]
) -> dict[str, TensorEntry]:
    renamed: dict[str, TensorEntry] = {}
    for entry in entries.values():
        name = rename(entry.name)
        if name is None:
            continue
        if name in renamed:
            raise ConfigError(
                f"{entry.path}: tensors {renamed[name].name} and {entry.name} are the same tensor"
            )
        renamed[name] = entry
    return renamed


def _choose_way(weight: Weight, is_there: Callable[[str], bool]) -> tuple[TensorSlice, ...]:
    """The first way that the checkpoint has a tensor of; the first of all if it has none."""
    for way in weight.ways:
        if any(is_there(piece.name) for piece in way):
            return way
    return weight.ways[0]


def _find_source(piece: TensorSlice, entries: Entries, found: Found) -> _Source:
    if found is None:
        return _Source(piece, {Role.VALUES: entries[piece.name]})
    stored, names = found
    return _Source(piece, {role: entries[name] for role, name in names.items()}, stored)


def _is_zero_bias(name: str, entries: Entries, found: dict[str, Found]) -> bool:
    """Whether it is one of the biases of zeros that GPTQ gives to layers that have none."""
    stored = found.get(name.removesuffix(".bias") + ".weight") if name.endswith(".bias") else None
    if stored is None or not isinstance(stored[0], Integers) or stored[0].packing != Packing.GPTQ:
        return False
    entry = entries[name]
    with _open_files({entry.path}) as read:
        return not read(entry, (slice(None),)).any()


def _check_names(
    model_path: Path,
    wanted: set[str],
    entries: dict[str, TensorEntry],
    is_ignored: Callable[[str], bool],
) -> None:
    missing = sorted(wanted - entries.keys())
    unexpected = sorted(name for name in entries if name not in wanted and not is_ignored(name))
    problems = [
        f"{kind} {len(names)} tensors: {', '.join(names[:NAMES_SHOWN_MAX])}"
        f"{', ...' if len(names) > NAMES_SHOWN_MAX else ''}"
        for kind, names in (("lacks", missing), ("has unexpected", unexpected))
        if names
    ]
    if problems:
        raise ConfigError(f"{model_path}: the checkpoint {'; and '.join(problems)}")


def _check_dtype(entry: TensorEntry, allowed: tuple[str, ...]) -> None:
    if entry.dtype not in allowed:
        raise ConfigError(
            f"{entry.path}: tensor {entry.name} has dtype {entry.dtype}: "
            f"must be one of {', '.join(allowed)} without a quantization_config of its kind"
        )


def _check_source(source: _Source) -> None:
    piece, entry = source.piece, source.values
    if source.stored is not None:
        check_parts(source.parts, piece.shape, source.stored)
        return
    if entry.shape != piece.shape:
        raise ConfigError(
            f"{entry.path}: tensor {entry.name} has shape {list(entry.shape)}: "
            f"config.json asks for {list(piece.shape)}"
        )


def _by_keeper(sources: list[_Source]) -> list[list[_Source]]:
    """Sources in their order, those of one keeper together."""
    groups: dict[int, list[_Source]] = {}
    for source in sources:
        groups.setdefault(id(source.piece.keeper or source.piece), []).append(source)
    return list(groups.values())


def _copy_file(groups: list[list[_Source]]) -> None:
    """Copy the pieces whose first values lie in one file; the rest may lie in others."""
    parts = (part for group in groups for source in group for part in source.parts.values())
    with _open_files({part.path for part in parts}) as read:
        for group in groups:
            _copy(read, group)


def _copy(read: ReadSlice, group: list[_Source]) -> None:
    """Copy the pieces of one weight, or leave them to its keeper as they are stored."""
    parts = [_read(read, source) for source in group]
    keeper, codes = group[0].piece.keeper, [part for part in parts if isinstance(part, Codes)]
    if keeper is not None and len(codes) == len(parts) and keeper.keep(codes):
        return
    for source, part in zip(group, parts, strict=True):
        wide = part.widen() if isinstance(part, Codes) else part
        if source.piece.index_count:
            _check_indexes(source.values, wide, source.piece.index_count)
        _room(source.piece).copy_(wide)


def _read(read: ReadSlice, source: _Source) -> Codes | Tensor:
    piece, stored = source.piece, source.stored
    if stored is None:
        return read(source.values, piece.take)
    device = piece.target.device if piece.keeper is None else piece.keeper.device
    return read_stored(read, source.parts, piece.shape, piece.take, stored, device)


@contextmanager
def _open_files(paths: set[Path]) -> Iterator[ReadSlice]:
    """What reads slices of the tensors in some files.

    Raises: ConfigError if a file can't be read.
    """
    try:
        with ExitStack() as stack:
            files = {
                path: stack.enter_context(safe_open(path, framework="pt")) for path in sorted(paths)
            }

            def read(entry: TensorEntry, take: tuple[slice, ...]) -> Tensor:
                part: Tensor = files[entry.path].get_slice(entry.name)[take]
                return part

            yield read
    except OSError as exc:
        raise config_error(f"{sorted(paths)[0]}: can't be read: {exc}", exc) from exc
    except SafetensorError as exc:
        raise ConfigError(f"{sorted(paths)[0]}: can't be read: {exc}") from exc


def _check_indexes(entry: TensorEntry, part: Tensor, count: int) -> None:
    low, high = int(part.min()), int(part.max())
    if low < 0 or high >= count:
        raise ConfigError(
            f"{entry.path}: tensor {entry.name} holds {low if low < 0 else high}: must hold "
            f"integers in 0..{count - 1}"
        )
