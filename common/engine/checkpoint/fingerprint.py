"""Fingerprint of a model: two servers with equal ones can read each other's cache.

Readable keys and values, so that a refusal names the fields that differ. Tensor and pipeline
parallel sizes, page size and the cache's dtype are not in it: they belong to the layout. The same
model in another spelling of config.json or another number of files gives the same fingerprint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from common.engine.checkpoint.files import TensorEntry, read_tensor_entries
from common.engine.config.added import named_fields
from common.engine.config.draft import DraftConfig
from common.engine.config.model import ModelConfig
from common.errors import config_error

# Bytes of a tensor that are hashed: all of a small one, else this many samples of that size,
# the first and the last bytes included. Enough to tell any two trainings apart in some ms per GB;
# an edit of single weights between the samples goes unseen.
SAMPLE_COUNT = 16
SAMPLE_NBYTES = 64
WHOLE_NBYTES_MAX = 4096


def model_fingerprint(
    model_path: str | Path, config: ModelConfig, *, load_format: str = "auto", seed: int = 0
) -> dict[str, str]:
    """config: as served, its dtype resolved.

    Raises: ConfigError if the weights can't be read.
    """
    rope = {
        key: value
        for key, value in dataclasses.asdict(config.rope).items()
        if value != _default(config, key)
    }
    mla = config.mla
    weights = f"dummy, seed {seed}" if load_format == "dummy" else weights_digest(Path(model_path))
    return {
        "architecture": config.architecture,
        "vocab_size": str(config.vocab_size),
        "layers": str(config.layer_count),
        "hidden_size": str(config.hidden_size),
        "heads": f"{config.head_count} query, {config.kv_head_count} kv, dim {config.head_dim}",
        "latent": "" if mla is None else f"rank {mla.latent_dim}, rotated {mla.rope_dim}",
        "rope": ", ".join(f"{key}={value}" for key, value in rope.items()),
        "dtype": config.dtype,
        "eos_token_ids": ",".join(str(token_id) for token_id in sorted(config.eos_token_ids)),
        "config": config_digest(config),
        "weights": weights,
    }


def draft_fingerprint(draft: DraftConfig, draft_path: str, *, load_format: str = "auto") -> str:
    """Two servers with equal ones can read each other's cache of its layers, if their models are
    equal.

    draft_path: of its own checkpoint; "" if it is in the model's.
    Raises: ConfigError if the weights can't be read.
    """
    layers = ", ".join(str(layer) for layer in draft.layer_ids)
    of_layers = f"{draft.algorithm}, layer {layers}, config {config_digest(draft.model)}"
    if not draft_path:
        return of_layers
    weights = "dummy" if load_format == "dummy" else weights_digest(Path(draft_path))
    return f"{of_layers}, weights {weights}"


def config_digest(config: ModelConfig) -> str:
    """sha256 of every value that changes logits, the dtype aside, which has a line of its own."""
    values = _named_values(config)
    assert isinstance(values, dict)
    for name in ("dtype", "eos_token_ids", "context_length"):
        del values[name]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _named_values(value: object) -> object:
    """As `dataclasses.asdict`, without fields that mean what servers without them do."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: _named_values(getattr(value, one.name)) for one in named_fields(value)}
    if isinstance(value, (list, tuple)):
        return [_named_values(one) for one in value]
    if isinstance(value, dict):
        return {key: _named_values(one) for key, one in value.items()}
    return value


def weights_digest(model_path: Path) -> str:
    """sha256 of names, dtypes, shapes and sampled bytes of every tensor."""
    entries = sorted(read_tensor_entries(model_path).values(), key=lambda entry: entry.name)
    digests: dict[str, bytes] = {}
    for path in sorted({entry.path for entry in entries}):
        digests |= _file_digests(path, [entry for entry in entries if entry.path == path])
    total = hashlib.sha256()
    for entry in entries:
        total.update(digests[entry.name])
    return total.hexdigest()[:32]


def _default(config: ModelConfig, key: str) -> object:
    fields = {field.name: field.default for field in dataclasses.fields(config.rope)}
    return fields[key]


def _file_digests(path: Path, entries: list[TensorEntry]) -> dict[str, bytes]:
    digests: dict[str, bytes] = {}
    try:
        with path.open("rb", buffering=0) as file:
            for entry in entries:
                digest = hashlib.sha256(
                    f"{entry.name} {entry.dtype} {entry.shape}\n".encode(),
                )
                for start, nbytes in _samples(entry):
                    file.seek(start)
                    digest.update(file.read(nbytes))
                digests[entry.name] = digest.digest()
    except OSError as exc:
        raise config_error(f"{path}: can't be read: {exc.strerror or exc}", exc) from exc
    return digests


def _samples(entry: TensorEntry) -> list[tuple[int, int]]:
    """(start, nbytes) in the file, evenly spread."""
    nbytes = entry.stop - entry.start
    if nbytes <= WHOLE_NBYTES_MAX:
        return [(entry.start, nbytes)]
    last = nbytes - SAMPLE_NBYTES
    return [
        (entry.start + last * index // (SAMPLE_COUNT - 1), SAMPLE_NBYTES)
        for index in range(SAMPLE_COUNT)
    ]
