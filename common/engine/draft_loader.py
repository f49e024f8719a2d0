"""From settings and checkpoints to the draft of a model. Knows nothing of pools or steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.engine.checkpoint.files import read_tensor_entries
from common.engine.checkpoint.weights import fill_with_noise, load_weights
from common.engine.config.draft import DraftConfig
from common.engine.config.model import ModelConfig, check_parallel
from common.engine.models.causal_lm import CausalLm
from common.engine.models.draft import ModelEnds, NextnDraft, read_nextn
from common.engine.models.eagle3 import HEAD_NAME, Eagle3Draft, rename_eagle3
from common.engine.models.eagle3_config import read_eagle3
from common.engine.models.registry import FAMILIES
from common.errors import ConfigError
from common.speculative import SpeculativeAlgorithm


def read_draft(
    config: ModelConfig, algorithm: SpeculativeAlgorithm, draft_path: str = ""
) -> DraftConfig | None:
    """The draft of a model; None for an algorithm without one.

    config: as served. draft_path: of a checkpoint of its own.
    Raises: ConfigError if a checkpoint has none, or if one does not fit or is not implemented.
    """
    if algorithm is SpeculativeAlgorithm.NEXTN:
        return read_nextn(FAMILIES[config.architecture].nextn, config)
    if algorithm is SpeculativeAlgorithm.EAGLE3:
        return read_eagle3(config, Path(draft_path))
    return None


def add_draft(model: CausalLm, config: DraftConfig, *, has_head: bool) -> None:
    """Build a model's draft behind its last stage. has_head: whether the draft's checkpoint has a
    head of its own."""
    context = model.context
    check_parallel(config.model, context.parallel.tp_size, 1)
    if not context.parallel.is_last_stage:
        return
    assert model.embedding is not None and model.head is not None
    ends = ModelEnds(model.embedding, model.head, model.rotate)
    if config.algorithm is SpeculativeAlgorithm.EAGLE3:
        if context.parallel.pp_size > 1:
            raise ConfigError(
                f"pp_size={context.parallel.pp_size}: must be 1 with an EAGLE3 draft, which reads "
                "what several layers make"
            )
        is_short = config.vocab_size < model.config.vocab_size
        model.draft = Eagle3Draft(context, config, ends, has_head=has_head or is_short)
        return
    family = FAMILIES[config.model.architecture]
    (layer,) = config.layer_ids
    assert family.nextn is not None
    model.draft = NextnDraft(
        context,
        config,
        ends,
        family.build_layer(context, config.model, layer),
        family.nextn.names(layer),
        family.nextn.norm,
    )


def nextn_renaming(
    config: DraftConfig | None, rename: Callable[[str], str | None]
) -> Callable[[str], str | None]:
    """A checkpoint's tensor names to those that layers ask for, with those of a draft inside it.

    rename: the same without a draft.
    """
    if config is None or config.algorithm is not SpeculativeAlgorithm.NEXTN:
        return rename
    nextn = FAMILIES[config.model.architecture].nextn
    assert nextn is not None
    (layer,), own = config.layer_ids, nextn.rename
    return rename if own is None else lambda name: own(layer, name) or rename(name)


def has_own_head(draft_path: str) -> bool:
    """Whether a draft's checkpoint has a head.

    Raises: ConfigError if its files can't be read.
    """
    return f"{HEAD_NAME}.weight" in read_tensor_entries(Path(draft_path))


def fill_eagle3(model: CausalLm, draft_path: str, *, load_format: str, seed: int) -> None:
    """Fill a head's tensors from its own checkpoint.

    Raises: ConfigError naming what is wrong with it.
    """
    draft = model.draft
    if not isinstance(draft, Eagle3Draft):
        return
    if load_format == "dummy":
        fill_with_noise(draft.weights(), seed=seed)
        return
    (layer,), config = draft.config.layer_ids, draft.config
    load_weights(
        Path(draft_path),
        draft.weights(),
        is_ignored=lambda name: name == f"{HEAD_NAME}.weight" or name == "d2t",
        rename=lambda name: rename_eagle3(layer, name),
        weight_format=config.model.weight_format,
    )
    if draft.token_max >= config.model.vocab_size:
        raise ConfigError(
            f"{draft_path}: d2t names token {draft.token_max}: must be in "
            f"0..{config.model.vocab_size - 1}"
        )
