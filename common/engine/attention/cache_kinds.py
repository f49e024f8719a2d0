"""Which kind of attention a layer is of, by its cache and what is done to its scores."""

from __future__ import annotations

from collections.abc import Collection

from common.engine.attention.attention import KEY
from common.engine.attention.kinds import AttentionKind
from common.engine.attention.scores import ScoreRule
from common.engine.cache.kv_pool import KvPool, Plane


def kind_of(keys: Plane, pool: KvPool, head_count: int, rule: ScoreRule) -> AttentionKind:
    """Of a layer with these keys and so many query heads."""
    return AttentionKind(
        head_count=head_count,
        kv_head_count=keys.geometry.unit_count,
        head_dim=keys.view.shape[-1],
        window=pool.groups[keys.geometry.group].live.size,
        scale=rule.scale,
        softcap=rule.softcap,
        has_sinks=rule.sinks is not None,
    )


def kinds_of_pool(kinds: Collection[AttentionKind], pool: KvPool) -> dict[AttentionKind, int]:
    """Those that layers of a pool may be of, and their page group."""
    groups = {
        (keys.geometry.unit_count, keys.view.shape[-1], pool.groups[group].live.size): group
        for keys in pool.planes(KEY)
        for group in (keys.geometry.group,)
    }
    return {
        kind: groups[key]
        for kind in kinds
        for key in ((kind.kv_head_count, kind.head_dim, kind.window),)
        if key in groups
    }
