"""Conversions between element types of a cache, and the type on the wire for each pair.

Pure; `common/engine/cache/cast.py` converts the numbers. Only the narrower of two types travels, so
narrowing comes before sending and widening after.
"""

from __future__ import annotations

from common.layout.component import DTYPE_NBYTES, CacheComponent

# Unordered pairs. float8_e4m3fn is stored with scale 1.0: values beyond 448 are cut to it.
CONVERTIBLE = frozenset(
    frozenset(pair)
    for pair in (
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("float32", "float8_e4m3fn"),
        ("bfloat16", "float8_e4m3fn"),
    )
)


def wire_dtype(source: str, target: str) -> str | None:
    """The type in which elements travel; None if the two can't be converted into each other."""
    if source == target:
        return source
    if frozenset((source, target)) not in CONVERTIBLE:
        return None
    return min(source, target, key=lambda dtype: DTYPE_NBYTES[dtype])


def why_not_convertible(source: CacheComponent, target: CacheComponent) -> str | None:
    """The reason why one component can't be converted into the other; None if it can.

    Both sides' units must hold the same elements: only the size of an element may differ.
    """
    if wire_dtype(source.dtype, target.dtype) is None:
        return f"{source.dtype} and {target.dtype} can't be converted into each other"
    if source.dtype == target.dtype:
        same = source.segments == target.segments
        return None if same else "its segments differ"
    shapes = [
        [(s.name, s.unit_count, divmod(s.unit_nbytes, DTYPE_NBYTES[c.dtype])) for s in c.segments]
        for c in (source, target)
    ]
    if any(rest for shape in shapes for _, _, (_, rest) in shape):
        return "a unit is no whole number of elements"
    return None if shapes[0] == shapes[1] else "its units hold different numbers of elements"
