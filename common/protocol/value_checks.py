"""Checks of one value that came from elsewhere, in words that name it and what is allowed.

Knows nothing of messages.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from common.errors import ProtocolError
from common.request_bounds import NumberBounds

FEW_COUNT = 200  # below, arrays cost more than they save

Check = Callable[[str, object], None]
"""Of a value, with its name for errors. Raises: ProtocolError."""


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raises: ProtocolError if `value` is not an integer in low..high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ProtocolError(f"{name}={value!r}: must be in {low}..{high}")


def check_number(name: str, value: object, bounds: NumberBounds) -> None:
    assert isinstance(value, float | int), f"{name} is decoded as a number"
    if not bounds.admits(value):
        raise ProtocolError(f"{name}={value}: must be a finite number in {bounds}")


def check_ints(name: str, values: object, low: int, high: int, count_max: int) -> None:
    """Integers, which may be a million: there is no Python loop, and one pass over the objects."""
    assert isinstance(values, list | tuple), f"{name} is decoded as a list or a tuple"
    check_count(name, len(values), count_max)
    if not values:
        return
    smallest, largest = _extremes(values)
    check_int(f"smallest of {name}", smallest, low, high)
    check_int(f"largest of {name}", largest, low, high)


def _extremes(values: list[int] | tuple[int, ...]) -> tuple[int, int]:
    if len(values) < FEW_COUNT:
        return min(values), max(values)
    try:
        found = np.frombuffer(array("I", values), dtype=np.uint32)
    except OverflowError:  # one is negative or takes more than 32 bits
        return min(values), max(values)
    return int(found.min()), int(found.max())


def check_count(name: str, count: int, count_max: int) -> None:
    if count > count_max:
        raise ProtocolError(f"{name}: {count} entries; at most {count_max} are allowed")


def check_text(name: str, value: object, length_max: int) -> None:
    assert isinstance(value, str), f"{name} is decoded as a string"
    if len(value) > length_max:
        raise ProtocolError(f"{name}: {len(value)} characters; at most {length_max} are allowed")


def check_blob(name: str, value: bytes, nbytes_max: int) -> None:
    if len(value) > nbytes_max:
        raise ProtocolError(f"{name}: {len(value)} bytes; at most {nbytes_max} are allowed")


# ---- checks of the fields of a table -------------------------------------------------------------


def int_in(low: int, high: int) -> Check:
    return lambda name, value: check_int(name, value, low, high)


def ints_in(low: int, high: int, count_max: int) -> Check:
    return lambda name, value: check_ints(name, value, low, high, count_max)


def number_in(bounds: NumberBounds) -> Check:
    return lambda name, value: check_number(name, value, bounds)
