"""What a sampler draws in some steps, for comparing two ways of drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from common.engine.sampling.draw import Sampled
from common.engine.sampling.sampler import Sampler
from common.request import SamplingParams


def draws(kinds: Sequence[SamplingParams], logits: Tensor) -> list[Sampled]:
    """logits: [steps, rows, vocabulary], a row for each of `kinds`. The token of a row that failed
    means nothing and is -1 here."""
    drawing = Sampler(logits.shape[2], [2], torch.device("cpu"))
    for slot, of_slot in enumerate(kinds):
        drawing.add(slot, of_slot, torch.tensor([5, 6, 7 + slot]), 2)
    slots = np.arange(len(kinds))
    found = [
        drawing.sample(of_step.clone(), slots, np.full(len(kinds), 3 + step))
        for step, of_step in enumerate(logits)
    ]
    return [
        replace(of_step, token_ids=[-1 if i in of_step.failed else t for i, t in enumerate(ids)])
        for of_step in found
        for ids in (of_step.token_ids,)
    ]
