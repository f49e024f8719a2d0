"""A flush forgets what nobody reads, and nothing while requests are open."""

from __future__ import annotations

from common.layout.cache_layout import ServerLayout
from common.layout.families import gqa_components
from common.protocol.frontend import FlushCache, FlushDone
from common.request import SamplingParams
from common.scheduling.flush import answer_flush
from common.scheduling.sequence import PageAccount


def test_cached_prefixes_go_only_when_no_request_is_open() -> None:
    components = gqa_components(layer_count=1, kv_head_count=1, head_dim=2, dtype="float32")
    layout = ServerLayout(components, 1, ((0, 1),), page_size=4)
    account = PageAccount(layout.groups, [8], has_prefix_cache=True)
    sequence = account.open(1, list(range(12)), 12, SamplingParams(max_new_tokens=1, seed=0))
    assert sequence is not None
    sequence.computed_count = 12
    account.remember(sequence)
    account.close(sequence)
    (before,) = account.states(layout)
    assert (before.cached, before.free) == (3, 8)

    refused = answer_flush(FlushCache(7), account, request_count=2)
    assert refused == FlushDone(7, False, "2 requests are running")
    assert account.states(layout) == [before]

    assert answer_flush(FlushCache(8), account, request_count=0) == FlushDone(8, True, "")
    (after,) = account.states(layout)
    assert (after.cached, after.free) == (0, 8)
