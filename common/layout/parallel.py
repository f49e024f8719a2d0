"""How layers are cut over pipeline stages and units over tensor parallel ranks. Pure arithmetic."""

from __future__ import annotations

from common.errors import LayoutError
from common.layout.component import Segment, Shard


def split_layers(layer_count: int, stage_count: int) -> tuple[tuple[int, int], ...]:
    """Half-open global layer ranges of `stage_count` pipeline stages; earlier stages take the rest.

    Raises: LayoutError if a stage would stay empty.
    """
    if not 1 <= stage_count <= layer_count:
        raise LayoutError(f"pp_size={stage_count}: must be in 1..{layer_count}, the layer count")
    base, extra = divmod(layer_count, stage_count)
    stages: list[tuple[int, int]] = []
    first = 0
    for stage in range(stage_count):
        end = first + base + (1 if stage < extra else 0)
        stages.append((first, end))
        first = end
    return tuple(stages)


def check_units(segment: Segment, shard: Shard, tp_size: int) -> None:
    """Raises: LayoutError if the segment's units can't be spread over `tp_size` ranks."""
    if shard is Shard.REPLICATE:
        return
    if segment.unit_count % tp_size != 0 and tp_size % segment.unit_count != 0:
        raise LayoutError(
            f"tp_size={tp_size}: {segment.unit_count} units of {segment.name!r} can neither be "
            f"divided over the ranks nor replicated on them; one must divide the other"
        )


def units_of_rank(unit_count: int, shard: Shard, tp_size: int, tp_rank: int) -> range:
    """Global ids of the units that a rank holds.

    units:   0 1 2 3 4 5 6 7        tp 2: [0 1 2 3][4 5 6 7]
    units:   0 1                    tp 4: [0][0][1][1]         consecutive ranks hold a replica
    """
    if shard is Shard.REPLICATE:
        return range(unit_count)
    if unit_count % tp_size == 0:
        per_rank = unit_count // tp_size
        return range(tp_rank * per_rank, (tp_rank + 1) * per_rank)
    unit = tp_rank * unit_count // tp_size
    return range(unit, unit + 1)


def ranks_of_unit(unit: int, unit_count: int, shard: Shard, tp_size: int) -> range:
    """Tensor parallel ranks that hold a global unit: the inverse of `units_of_rank`."""
    if shard is Shard.REPLICATE:
        return range(tp_size)
    if unit_count % tp_size == 0:
        rank = unit // (unit_count // tp_size)
        return range(rank, rank + 1)
    replicas = tp_size // unit_count
    return range(unit * replicas, (unit + 1) * replicas)
