"""Functions of rows of logits [R, vocabulary], which are vectorised in numpy and not in torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def is_finite(logits: Tensor) -> Tensor:
    """bool[R]: whether all of a row is."""
    if logits.is_cpu:  # 1 row of 1280: 3 us against 19
        return torch.from_numpy(np.isfinite(logits.numpy()).all(axis=-1))
    low, high = logits.amin(dim=-1), logits.amax(dim=-1)
    return torch.isfinite(low) & torch.isfinite(high)


def largest(logits: Tensor) -> Tensor:
    """int64[R]: the first largest of each row."""
    if logits.is_cpu:  # 16 rows of 1280: 3 us against 48
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)
