"""Fills a model's tensors from a checkpoint, this rank's slices only, or with seeded noise.

A layer declares its tensors as `Weight`s; what a model is made of is not known here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.engine.checkpoint.files import TensorEntry, read_tensor_entries
from common.engine.checkpoint.scaled_tensors import (
    FLOAT_DTYPES,
    check_scaled,
    is_scaled,
    read_scaled,
    scales_name,
)
from common.engine.config.weight_format import WeightFormat
from common.errors import ConfigError, config_error

INTEGER_DTYPES = ("I64", "I32")
NAMES_SHOWN_MAX = 8


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One tensor of a checkpoint and the part of it that goes into a view of a layer's tensor.

    shape: of the whole tensor in the checkpoint. take: one slice per dimension.
    target: what the taken part is copied to; it may be broadcast to it.
    index_count: of a tensor of integers, which are in 0..index_count - 1; 0 for one of numbers.
    """

    name: str
    shape: tuple[int, ...]
    take: tuple[slice, ...]
    target: Tensor
    index_count: int = 0


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
    """Where a piece is found. scales: of a quantised tensor, which then are multiplied out."""

    piece: TensorSlice
    values: TensorEntry
    scales: TensorEntry | None = None


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
    pieces = [piece for weight in weights for piece in _choose_way(weight, entries)]
    scales: dict[str, str] = {}
    if weight_format is not None:
        scales = {
            piece.name: scales_name(piece.name, weight_format)
            for piece in pieces
            if piece.name in entries and is_scaled(piece.name, entries[piece.name], weight_format)
        }
    # First, because a tensor that is not announced as quantised may have scales all the same.
    allowed = {p.name: INTEGER_DTYPES if p.index_count else FLOAT_DTYPES for p in pieces}
    for name in sorted(allowed.keys() & entries.keys() - scales.keys()):
        _check_dtype(entries[name], allowed[name])
    wanted = allowed.keys() | set(scales.values())
    _check_names(model_path, wanted, entries, is_ignored)
    sources = [
        _Source(piece, entries[piece.name], entries[scales[piece.name]])
        if piece.name in scales
        else _Source(piece, entries[piece.name])
        for piece in pieces
    ]
    for source in sources:
        _check_source(source, weight_format)
    for path in sorted({source.values.path for source in sources}):
        found = [source for source in sources if source.values.path == path]
        _copy_file(path, found, weight_format)


def fill_with_noise(weights: Iterable[Weight], *, seed: int) -> None:
    """Random weights that keep activations of order one, without reading any file.

    A tensor's values depend on (seed, its name, its whole shape) alone, so that ranks that hold
    different slices of it hold parts of the same model.
    """
    for weight in weights:
        for piece in weight.ways[0]:
            piece.target.copy_(_noise(piece, seed)[piece.take])


def _noise(piece: TensorSlice, seed: int) -> Tensor:
    if len(piece.shape) == 1 and not piece.name.endswith(".bias"):
        return torch.ones(piece.shape)
    digest = hashlib.sha256(f"{seed}:{piece.name}".encode()).digest()
    device = piece.target.device
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


def _choose_way(weight: Weight, entries: dict[str, TensorEntry]) -> tuple[TensorSlice, ...]:
    """The first way that the checkpoint has a tensor of; the first of all if it has none."""
    for way in weight.ways:
        if any(piece.name in entries for piece in way):
            return way
    return weight.ways[0]


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


def _check_source(source: _Source, weight_format: WeightFormat | None) -> None:
    piece, entry = source.piece, source.values
    if source.scales is not None and weight_format is not None:
        check_scaled(entry, source.scales, piece.shape, weight_format)
        return
    if entry.shape != piece.shape:
        raise ConfigError(
            f"{entry.path}: tensor {entry.name} has shape {list(entry.shape)}: "
            f"config.json asks for {list(piece.shape)}"
        )


def _copy_file(path: Path, sources: list[_Source], weight_format: WeightFormat | None) -> None:
    """Copy the pieces whose values lie in one file; their scales may lie in others."""
    paths = {path} | {source.scales.path for source in sources if source.scales is not None}
    try:
        with ExitStack() as stack:
            files = {
                path: stack.enter_context(safe_open(path, framework="pt")) for path in sorted(paths)
            }

            def read(entry: TensorEntry, take: tuple[slice, ...]) -> Tensor:
                part: Tensor = files[entry.path].get_slice(entry.name)[take]
                return part

            for source in sources:
                piece = source.piece
                if source.scales is None or weight_format is None:
                    part = read(source.values, piece.take)
                else:
                    part = read_scaled(
                        read,
                        source.values,
                        source.scales,
                        piece.shape,
                        piece.take,
                        weight_format,
                        piece.target.device,
                    )
                if piece.index_count:
                    _check_indexes(source.values, part, piece.index_count)
                piece.target.copy_(part)
    except OSError as exc:
        raise config_error(f"{path}: can't be read: {exc}", exc) from exc
    except SafetensorError as exc:
        raise ConfigError(f"{path}: can't be read: {exc}") from exc


def _check_indexes(entry: TensorEntry, part: Tensor, count: int) -> None:
    low, high = int(part.min()), int(part.max())
    if low < 0 or high >= count:
        raise ConfigError(
            f"{entry.path}: tensor {entry.name} holds {low if low < 0 else high}: must hold "
            f"integers in 0..{count - 1}"
        )
