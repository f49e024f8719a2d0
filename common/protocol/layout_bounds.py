"""Bounds on a peer's cache layout, so that its geometry can be computed."""

from __future__ import annotations

from common.errors import ProtocolError
from common.layout.cache_layout import ServerLayout
from common.layout.component import DTYPE_NBYTES, CacheComponent, LiveKind
from common.protocol.bounds import GROUP_COUNT_MAX, NAME_LENGTH_MAX, RANK_COUNT_MAX
from common.protocol.value_checks import check_count, check_int, check_text
from common.request_bounds import INT32_MAX

COMPONENT_COUNT_MAX = GROUP_COUNT_MAX  # each may have a live rule of its own
SEGMENT_COUNT_MAX = 16
LAYER_COUNT_MAX = 1024
UNIT_COUNT_MAX = 1 << 16  # one unit per channel of a state-space model
UNIT_NBYTES_MAX = 1 << 24
LIVE_SIZE_MAX = 1 << 24
ELEMENT_NBYTES_MAX = max(DTYPE_NBYTES.values())
PAGE_NBYTES_MAX = 1 << 32  # with a page id below 2**31, every offset stays within int64


def check_layout_bounds(layout: ServerLayout) -> None:
    """Bounds that keep a consistent layout's geometry small enough to compute with.

    Raises: ProtocolError. `ServerLayout.check` asks whether the values fit together.
    """
    check_count("layout.components", len(layout.components), COMPONENT_COUNT_MAX)
    check_count("layout.stages", len(layout.stages), RANK_COUNT_MAX)
    if not layout.components or not layout.stages:
        raise ProtocolError("layout: needs at least one component and one stage")
    check_int("layout.tp_size", layout.tp_size, 1, RANK_COUNT_MAX)
    check_int("layout ranks", layout.tp_size * len(layout.stages), 1, RANK_COUNT_MAX)
    for first, end in layout.stages:
        check_int("layout.stages", first, 0, LAYER_COUNT_MAX)
        check_int("layout.stages", end, 0, LAYER_COUNT_MAX)
    check_int("layout.page_size", layout.page_size, 1, INT32_MAX)
    check_int("layout.layer_group_count", layout.layer_group_count, 1, LAYER_COUNT_MAX)
    page_nbytes = sum(_component_page_nbytes(layout, c) for c in layout.components)
    if page_nbytes > PAGE_NBYTES_MAX:
        raise ProtocolError(
            f"layout: pages of {page_nbytes} bytes: at most {PAGE_NBYTES_MAX} are allowed"
        )


def _component_page_nbytes(layout: ServerLayout, component: CacheComponent) -> int:
    """Check one component; returns its bytes of a page over all ranks."""
    name = f"layout component {component.name[:NAME_LENGTH_MAX]!r}"
    for text in (component.name, component.dtype, component.order):
        check_text(name, text, NAME_LENGTH_MAX)
    check_count(f"{name}: layers", len(component.layers), LAYER_COUNT_MAX)
    check_count(f"{name}: segments", len(component.segments), SEGMENT_COUNT_MAX)
    size_min = 0 if component.live.kind in (LiveKind.FULL, LiveKind.SLOT) else 1
    check_int(f"{name}: live.size", component.live.size, size_min, LIVE_SIZE_MAX)
    check_int(f"{name}: live.back", component.live.back, 0, LIVE_SIZE_MAX)
    total = 0
    for segment in component.segments:
        check_text(f"{name}: segment", segment.name, NAME_LENGTH_MAX)
        check_int(f"{name}: unit_count", segment.unit_count, 1, UNIT_COUNT_MAX)
        check_int(f"{name}: unit_nbytes", segment.unit_nbytes, 1, UNIT_NBYTES_MAX)
        # A unit may be padded up to the largest element that a page group has.
        nbytes = segment.unit_nbytes * layout.page_items(component.live) + ELEMENT_NBYTES_MAX - 1
        total += segment.unit_count * nbytes
    return total * len(component.layers)
