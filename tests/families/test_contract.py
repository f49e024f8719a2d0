"""What a server makes of every family before it serves: a cache declared, laid out and held.

Nothing asks an object what it is: whatever has to be known of a cache is in its components.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.engine.attention.choose import choose_attention
from common.engine.cache.kv_pool import KvPool
from common.engine.checkpoint.fingerprint import model_fingerprint
from common.engine.config.model import check_parallel
from common.engine.distributed import ParallelContext
from common.engine.loader import attention_shape
from common.engine.models.registry import FAMILIES, cache_components, read_model_config
from common.layout.cache_layout import ServerLayout
from common.layout.parallel import split_layers
from common.planner.copies import PairPlan
from common.protocol.codec import decode_layout, encode_layout
from common.worker.pools import page_counts_for
from tests.engine.tiny_checkpoints import CLASSES, RECIPES

COMPOSITE = "ForConditionalGeneration"
TEXT = "ForCausalLM"


def test_every_served_architecture_has_a_checkpoint_in_the_tests() -> None:
    tested = {recipe.architecture for recipe in RECIPES.values()}
    untested = {name for name in FAMILIES if name.replace(COMPOSITE, TEXT) not in tested}
    assert untested == set()
    assert set(CLASSES) <= set(FAMILIES)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", RECIPES)
def test_the_cache_of_every_family_is_laid_out_and_held(
    name: str, tp_size: int, tiny_checkpoint: Callable[[str], Path]
) -> None:
    checkpoint = tiny_checkpoint(name)
    config = read_model_config(checkpoint)
    check_parallel(config, tp_size, 1)
    layout = ServerLayout(
        components=cache_components(config, "auto"),
        tp_size=tp_size,
        stages=split_layers(config.layer_count, 1),
        page_size=16,
    )
    layout.check()
    assert decode_layout(encode_layout(layout)) == layout
    context = ParallelContext(tp_size=tp_size)
    choose_attention(attention_shape(config, context, torch.device("cpu"), page_size=16))
    for rank in layout.ranks:
        pool = KvPool.allocate(rank, page_counts_for(rank, 64, 2, 16), "cpu")
        for component in layout.components:
            for layer in component.layers:
                for segment in component.segments:
                    view = pool.plane(component.name, layer, segment.name).view
                    assert str(view.dtype) == f"torch.{component.dtype}"
        assert any(not PairPlan(rank, other).is_empty for other in layout.ranks)
    assert model_fingerprint(checkpoint, config)["architecture"] == config.architecture
