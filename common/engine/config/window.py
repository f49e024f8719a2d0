"""Which layers see a window of the past only, in every spelling of config.json.

Checked and in one spelling, as the readers of `models`, which call it. Knows nothing of caches.
"""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never

from common.engine.config.json_fields import JsonFields


class WindowStyle(StrEnum):
    """How an architecture spells a sliding window."""

    NONE = "none"
    ALL_LAYERS = "all layers"  # `sliding_window`, 4096 if absent
    UPPER_LAYERS = "upper layers"  # if `use_sliding_window`, on the layers `layer_types` marks
    SWITCHED = "switched"  # if `use_sliding_window`, on all layers
    PATTERN = "pattern"  # on the layers `layer_types` marks, or all but every n-th


def window_layers(
    fields: JsonFields, style: WindowStyle, layer_count: int, *, period_default: int = 0
) -> tuple[int, ...]:
    """Global ids of the layers that have a window, however wide.

    period_default: n of `WindowStyle.PATTERN`.
    Raises: ConfigError naming the value that can't be.
    """
    everyone = tuple(range(layer_count))
    match style:
        case WindowStyle.NONE:
            return ()
        case WindowStyle.ALL_LAYERS:
            is_absent = "sliding_window" not in fields.values
            return everyone if is_absent or fields.has("sliding_window") else ()
        case WindowStyle.SWITCHED:
            return everyone if fields.flag("use_sliding_window", False) else ()
        case WindowStyle.UPPER_LAYERS:
            if not fields.flag("use_sliding_window", False):
                return ()
            first = fields.integer("max_window_layers", 28, minimum=0)
            return _marked_layers(fields, layer_count) or (
                () if fields.has("layer_types") else everyone[first:]
            )
        case WindowStyle.PATTERN:
            if fields.has("layer_types"):
                return _marked_layers(fields, layer_count)
            period = fields.integer("sliding_window_pattern", period_default)
            return tuple(layer for layer in everyone if (layer + 1) % period)
        case _:
            assert_never(style)


def _marked_layers(fields: JsonFields, layer_count: int) -> tuple[int, ...]:
    kinds = fields.texts("layer_types")
    if kinds and len(kinds) != layer_count:
        raise fields.error("layer_types", f"one for each of {layer_count} layers")
    if set(kinds) - {"sliding_attention", "full_attention"}:
        raise fields.error("layer_types", '"sliding_attention" or "full_attention" each')
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def read_windows(
    fields: JsonFields,
    marked: tuple[int, ...],
    layer_count: int,
    context_length: int,
    *,
    width_default: int = 4096,
) -> tuple[int, ...]:
    """Window of every layer; one as long as the context is none."""
    if not marked:
        return (0,) * layer_count
    width = fields.integer("sliding_window", width_default)
    width = 0 if width >= context_length else width
    return tuple(width if layer in marked else 0 for layer in range(layer_count))
