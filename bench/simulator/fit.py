"""Costs from samples: lines through what was measured. Knows nothing of what that is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float64]


def fit_costs(factors: Samples, costs_s: Samples) -> list[float]:
    """Least squares of relative errors, no coefficient below zero.

    factors: float[sample][cost]. costs_s: float[sample], above zero. What would be negative is left
    out, the most negative one first: then nothing gets cheaper by being more.
    """
    weights = 1 / np.maximum(costs_s, 1e-9)
    scales = np.maximum(np.abs(factors).max(axis=0), 1e-30)
    system = factors / scales * weights[:, None]
    used = list(range(factors.shape[1]))
    while True:
        found = np.linalg.lstsq(system[:, used], np.ones(len(costs_s)), rcond=None)[0]
        if len(used) == 1 or found.min() >= 0:
            break
        used.pop(int(found.argmin()))
    costs = [0.0] * factors.shape[1]
    for index, value in zip(used, found, strict=True):
        costs[index] = max(0.0, float(value / scales[index]))
    return costs
