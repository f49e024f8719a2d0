"""Fills a model's tensors from a checkpoint, this rank's slices only, or with seeded noise.

A layer declares its tensors as `Weight`s; what a model is made of is not known here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.engine.block_scales import scale_blocks
from common.engine.checkpoint_files import TensorEntry, read_tensor_entries
from common.errors import ConfigError

FLOAT_DTYPES = ("F32", "BF16", "F16", "F64")
FLOAT8_DTYPE = "F8_E4M3"
# Behind the name of a float8 tensor: fp32, one factor per block.
SCALE_SUFFIX = "_scale_inv"
NAMES_SHOWN_MAX = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a checkpoint and the part of it that goes into a view of a layer's tensor.

    shape: of the whole tensor in the checkpoint. take: one slice per dimension.
    target: what the taken part is copied to; it may be broadcast to it.
    """

    name: str
    shape: tuple[int, ...]
    take: tuple[slice, ...]
    target: Tensor


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a layer and the ways a checkpoint may hold it, the most common one first."""

    ways: tuple[tuple[Piece, ...], ...]

    @staticmethod
    def whole(name: str, tensor: Tensor) -> Weight:
        """A tensor that a checkpoint holds under one name and every rank takes all of."""
        take = tuple(slice(None) for _ in tensor.shape)
        return Weight(((Piece(name, tuple(tensor.shape), take, tensor),),))


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
    blocks: tuple[int, int] | None = None,
) -> None:
    """Fill every weight from the safetensors files of a checkpoint directory.

    is_ignored: tells for a name that no weight asks for whether that is in order (another pipeline
        stage, a tied head, a derived buffer).
    rename: a name in the files to the one that weights ask for, None for a tensor to leave out.
    blocks: (rows, columns) that share a factor in tensors of float8, which are multiplied out; None
        if there may be none.
    Raises: ConfigError naming missing, unexpected, wrongly shaped or non-float tensors.
    """
    entries = _rename_entries(read_tensor_entries(model_path), rename)
    pieces = [piece for weight in weights for piece in _choose_way(weight, entries)]
    _check_names(model_path, pieces, entries, is_ignored)
    scaled: dict[str, TensorEntry] = {}
    for piece in pieces:
        entry = entries[piece.name]
        if entry.shape != piece.shape:
            raise ConfigError(
                f"{entry.path}: tensor {entry.name} has shape {list(entry.shape)}: "
                f"config.json asks for {list(piece.shape)}"
            )
        if entry.dtype == FLOAT8_DTYPE and blocks is not None:
            scaled[piece.name] = _scales_of(piece, entries, blocks)
        elif entry.dtype not in FLOAT_DTYPES:
            raise ConfigError(
                f"{entry.path}: tensor {entry.name} has dtype {entry.dtype}: "
                f"must be one of {', '.join(FLOAT_DTYPES)}"
            )
    scales = _read_scales(scaled)
    for path in sorted({entries[piece.name].path for piece in pieces}):
        found = [piece for piece in pieces if entries[piece.name].path == path]
        _copy_file(path, found, entries, scales, blocks)


def fill_with_noise(weights: Iterable[Weight], *, seed: int) -> None:
    """Random weights that keep activations of order one, without reading any file.

    A tensor's values depend on (seed, its name, its whole shape) alone, so that ranks that hold
    different slices of it hold parts of the same model.
    """
    for weight in weights:
        for piece in weight.ways[0]:
            piece.target.copy_(_noise(piece, seed)[piece.take])


def _noise(piece: Piece, seed: int) -> Tensor:
    if len(piece.shape) == 1 and not piece.name.endswith(".bias"):
        return torch.ones(piece.shape)
    digest = hashlib.sha256(f"{seed}:{piece.name}".encode()).digest()
    device = piece.target.device
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
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


def _choose_way(weight: Weight, entries: dict[str, TensorEntry]) -> tuple[Piece, ...]:
    """The first way that the checkpoint has a tensor of; the first of all if it has none."""
    for way in weight.ways:
        if any(piece.name in entries for piece in way):
            return way
    return weight.ways[0]


def _check_names(
    model_path: Path,
    pieces: list[Piece],
    entries: dict[str, TensorEntry],
    is_ignored: Callable[[str], bool],
) -> None:
    wanted = {piece.name for piece in pieces}
    wanted |= {
        name + SCALE_SUFFIX
        for name in wanted
        if name in entries and entries[name].dtype == FLOAT8_DTYPE
    }
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


def _scales_of(
    piece: Piece, entries: dict[str, TensorEntry], blocks: tuple[int, int]
) -> TensorEntry:
    """The factors of a float8 tensor: [.., blocks of rows, blocks of columns], edges included."""
    entry = entries[piece.name + SCALE_SUFFIX]
    if len(piece.shape) < len(blocks):
        raise ConfigError(f"{entry.path}: tensor {piece.name} of float8 must have two dimensions")
    *outer, rows, columns = piece.shape
    expected = (*outer, -(-rows // blocks[0]), -(-columns // blocks[1]))
    if entry.shape != expected or entry.dtype not in FLOAT_DTYPES:
        raise ConfigError(
            f"{entry.path}: tensor {entry.name} is {entry.dtype} {list(entry.shape)}: must be "
            f"{list(expected)} of {', '.join(FLOAT_DTYPES)}, one for each {blocks[0]} x {blocks[1]}"
        )
    return entry


def _read_scales(scaled: dict[str, TensorEntry]) -> dict[str, Tensor]:
    """fp32 factors by the name of the tensor they belong to. Every file is opened once: a large
    model has tens of thousands of experts."""
    scales: dict[str, Tensor] = {}
    for path in sorted({entry.path for entry in scaled.values()}):
        try:
            with safe_open(path, framework="pt") as file:
                for name, entry in scaled.items():
                    if entry.path == path:
                        scales[name] = file.get_tensor(entry.name).float()
        except (OSError, SafetensorError) as exc:
            raise ConfigError(f"{path}: can't be read: {exc}") from exc
    return scales


def _copy_file(
    path: Path,
    pieces: list[Piece],
    entries: dict[str, TensorEntry],
    scales: dict[str, Tensor],
    blocks: tuple[int, int] | None,
) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            for piece in pieces:
                part: Tensor = file.get_slice(entries[piece.name].name)[piece.take]
                if blocks is not None and piece.name in scales:
                    part = scale_blocks(part, scales[piece.name], piece.shape, piece.take, blocks)
                piece.target.copy_(part)
    except (OSError, SafetensorError) as exc:
        raise ConfigError(f"{path}: can't be read: {exc}") from exc
