"""`python -m common.layout.reference`: the content of each kind of cache, as a Markdown document.

It prints `docs/CACHES.md`: the functions of `families.py`, asked for sizes as models have
them. Knows nothing of which model has which.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

from common.layout import families
from common.layout.component import CacheComponent, Live, LiveKind, Shard

Kind = Callable[..., tuple[CacheComponent, ...]]

DTYPE = "bfloat16"
TOKEN_COUNT = 4096
LAYERS = tuple(range(24))
EVERY_FOURTH = LAYERS[3::4]
OTHERS = tuple(layer for layer in LAYERS if layer not in EVERY_FOURTH)
LATENT: dict[str, object] = {"latent_dim": 512, "rope_dim": 64}

# Every kind once, with sizes of 24 layers.
EXAMPLES: dict[Kind, dict[str, object]] = {
    families.gqa_components: {"layer_count": 24, "kv_head_count": 8, "head_dim": 128},
    families.windowed_gqa_components: {
        "windows": (1024, 1024, 1024, 0) * 6,
        "kv_head_count": 8,
        "head_dim": 128,
    },
    families.mixed_gqa_components: {
        "shapes": [families.CachedHeads(512, 8, 256)] * 20
        + [families.CachedHeads(0, 2, 512)] * 2
        + [None] * 2,
    },
    families.mla_components: {"layer_count": 24, "is_interleaved": True} | LATENT,
    families.hybrid_mla_components: {"layers": EVERY_FOURTH, "is_rotated": False} | LATENT,
    families.sparse_mla_components: {
        "layer_count": 24,
        "is_interleaved": True,
        "index_layers": LAYERS,
        "index_dim": 128,
        "is_index_interleaved": False,
    }
    | LATENT,
    families.compressed_components: {
        "layer_count": 24,
        "window": 128,
        "head_dim": 512,
        "index_dim": 128,
        "sparse_layers": LAYERS[2::2],
        "sparse_ratio": 4,
        "heavy_layers": LAYERS[3::2],
        "heavy_ratio": 128,
    },
    families.gated_delta_components: {
        "layers": OTHERS,
        "key_heads": (16, 128),
        "value_heads": (32, 128),
        "kernel_size": 4,
        "conv_dtype": DTYPE,
        "state_dtype": "float32",
    },
    families.mamba_components: {
        "layers": OTHERS,
        "heads": (64, 64),
        "groups": (8, 128),
        "kernel_size": 4,
        "conv_dtype": DTYPE,
    },
    families.lightning_components: {"layers": OTHERS, "head_count": 32, "head_dim": 128},
}
HEAD = f"""\
# Caches

Printed by `python -m common.layout.reference` from `common/layout/families.py`; a test compares.

A model's cache is a list of components. Two servers agree if their lists are the same: names,
layers, live rule, how it is cut, order and units; element types may differ where a transfer may be
staged. What differs is named when they connect (see [layouts.md](layouts.md)).

- **lives**: which items a request needs to go on. *full*: one per token. *window W*: those of the
  last W - 1 tokens. *block r*: one for every r tokens that are complete. *tail r*: those of the
  tokens after the last complete block, and some before them. *slot*: one, the state after all of
  them.
- **cut**: *split*: tensor parallel ranks share the units. *whole*: every rank has all of it.
- **units**: count x bytes, of one item in one layer. A unit is never cut.
- **order**: what the bytes mean beyond their type. Different orders are refused.
- **bytes**: of a request of {TOKEN_COUNT} tokens, all layers and all units together.

Examples have 24 layers and caches of {DTYPE}. A model may have several kinds.
"""


def reference() -> str:
    """The whole document."""
    return "\n".join([HEAD, *(_section(kind, sizes) for kind, sizes in EXAMPLES.items())])


def _section(kind: Kind, sizes: dict[str, object]) -> str:
    is_typed = "dtype" in inspect.signature(kind).parameters
    components = kind(**sizes, **({"dtype": DTYPE} if is_typed else {}))
    title = kind.__name__.removesuffix("_components")
    lines = [f"## {title}", "", inspect.cleandoc(kind.__doc__ or ""), ""]
    lines += ["| component | layers | lives | cut | units | type | order | bytes |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    lines += [_row(component) for component in components]
    return "\n".join([*lines, ""])


def _row(component: CacheComponent) -> str:
    units = ", ".join(f"{s.name} {s.unit_count} x {s.unit_nbytes}" for s in component.segments)
    cut = "split" if component.shard is Shard.SPLIT else "whole"
    item_nbytes = sum(segment.unit_count * segment.unit_nbytes for segment in component.segments)
    nbytes = item_nbytes * len(component.layers) * len(component.live.items(TOKEN_COUNT))
    cells = (
        f"`{component.name}`",
        str(len(component.layers)),
        _lives(component.live),
        cut,
        units,
        component.dtype,
        component.order or "-",
        f"{nbytes:,}",
    )
    return f"| {' | '.join(cells)} |"


def _lives(live: Live) -> str:
    if live.kind in (LiveKind.FULL, LiveKind.SLOT):
        return str(live.kind)
    back = f", {live.back} before" if live.back else ""
    return f"{live.kind} {live.size}{back}"


def main() -> int:
    sys.stdout.write(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main())
