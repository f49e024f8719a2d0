"""Messages between a scheduler and its workers about weights that are to take the place of others.
Values only.
"""

from __future__ import annotations

import msgspec

from common.weights import ServedWeights


class LoadWeights(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Load other weights beside those that compute; answered by WeightsLoaded. They take their
    place with the `Release` that names them."""

    weights: ServedWeights


class DropWeights(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Weights that were loaded, or are being loaded, are not wanted."""


class WeightsLoaded(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A LoadWeights has ended on a rank. error: why nothing was loaded, "" if all was."""

    rank: int
    load_id: str
    error: str = ""
