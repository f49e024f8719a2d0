"""Fields that a config has gained since servers of its first release were built.

A server of a release without the field means its default. So a fingerprint names such a field only
where it is something else: then the older server can't compute the model as this one does.
"""

from __future__ import annotations

from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ADDED = {"is_added": True}
"""Metadata of such a field: `name: type = field(default=..., metadata=ADDED)`."""


def named_fields(config: DataclassInstance) -> list[Field[Any]]:
    """Those of a dataclass that a fingerprint names."""
    return [
        one
        for one in fields(config)
        if not one.metadata.get("is_added") or getattr(config, one.name) != one.default
    ]
