"""A draft as every part of the engine reads it: the layers behind a model's own that guess tokens.

Knows nothing of files, tensors or devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.config.model import ModelConfig
from common.layout.parallel import split_layers
from common.speculative import SpeculativeAlgorithm


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Layers that guess tokens ahead of a model.

    model: the sizes of its layers, as of a model
    that has them behind its own. layer_ids: global ids, behind those of the model.
    tapped: what it reads of each token: the input of the model's layers of these ids; the number of
    its layers stands for what leaves the last one, one more for what the last norm makes of that.
    vocab_size: tokens that it can guess.
    """

    algorithm: SpeculativeAlgorithm
    model: ModelConfig
    layer_ids: tuple[int, ...]
    tapped: tuple[int, ...]
    vocab_size: int


def split_stages(
    config: ModelConfig, stage_count: int, draft: DraftConfig | None
) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of the layers of pipeline stages; the last one has the draft's, too.

    Raises: LayoutError if a stage would stay empty.
    """
    stages = split_layers(config.layer_count, stage_count)
    if draft is None:
        return stages
    first, end = stages[-1]
    return (*stages[:-1], (first, end + len(draft.layer_ids)))
