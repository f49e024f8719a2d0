"""How many requests and checkpoints of prefixes get slots, tails and windows of their own.

A checkpoint is what a sequence needs to go on behind a prefix, and can't share with the sequence
that computed it: copies of its slot, its tails and its windows, and of pages that are not full yet.
The latter come out of the pages of all tokens. Knows nothing of memory or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.config import DEFAULT_MAX_RUNNING_REQUESTS, Role, ServerConfig
from common.layout.cache_layout import PageGroup, RankLayout
from common.layout.component import LiveKind

STATE_FRACTION_MAX = 0.5
"""Share of a pool that slots and tails take by default. Too few slots bound the requests, too many
bound their tokens. With half, at most half of the pool is wasted for any requests."""

CHECKPOINT_FRACTION_MAX = 0.25
"""Share of a pool that checkpoints take by default: half of the share of slots and tails, and the
same where windows are large."""


@dataclass(frozen=True, slots=True)
class Shares:
    """request_count: requests that find a slot and tails at a time. checkpoint_max: checkpoints
    beside them. why_none: the reason if there can't be any; "" if there can.
    """

    request_count: int
    checkpoint_max: int
    why_none: str = ""


def share_out(layout: RankLayout, config: ServerConfig, budget: int) -> Shares:
    """As many as the settings ask for, else as many as shares of `budget` bytes hold.

    Ranks may differ; the server runs the least count of all ranks.
    """
    why_none = _why_none(config)
    if why_none or config.max_checkpoints is not None:
        count = 0 if why_none else config.max_checkpoints or 0
        left = budget - count * checkpoint_nbytes(layout)
        asked = config.max_running_requests
        return Shares(asked or max(1, _request_room(layout, config, left)), count, why_none)
    if config.max_running_requests is not None:
        request_count = config.max_running_requests
        # And the scratch page.
        left = budget - (request_count + 1) * state_nbytes(layout, config)
        count = _checkpoint_room(layout, left, request_count)
    else:
        room = _request_room(layout, config, budget, 2 * DEFAULT_MAX_RUNNING_REQUESTS)
        count = _checkpoint_room(layout, budget, room // 2)
        request_count = max(1, min(DEFAULT_MAX_RUNNING_REQUESTS, room - count))
    return Shares(request_count, count, "" if count else "no memory for one")


def state_nbytes(layout: RankLayout, config: ServerConfig) -> int:
    """Bytes of a request's slots and tails, which do not depend on its token count, and of the
    spare slots behind its proposals."""
    return _own_state_nbytes(layout) + config.verified_max * sum(
        group.page_nbytes for group in layout.groups if group.group.live.kind is LiveKind.SLOT
    )


def _own_state_nbytes(layout: RankLayout) -> int:
    return sum(group.page_nbytes for group in layout.groups if not group.group.live.is_paged)


def checkpoint_nbytes(layout: RankLayout) -> int:
    """Bytes of a checkpoint, its pages that are not full aside."""
    windows = (
        window_page_max(group.group) * group.page_nbytes
        for group in layout.groups
        if group.group.live.kind is LiveKind.WINDOW
    )
    return _own_state_nbytes(layout) + sum(windows)


def window_page_max(group: PageGroup) -> int:
    """Pages of a window. One that starts inside a page touches one page more."""
    return -(-group.live.size // group.page_items) + 1


def _why_none(config: ServerConfig) -> str:
    if config.disable_radix_cache:
        return "--disable-radix-cache"
    if config.max_checkpoints == 0:
        return "--max-checkpoints 0"
    computes_prompts = (
        config.role is Role.PREFILL or not config.prefill or config.local_prefill != "off"
    )
    is_used = computes_prompts or config.return_cache != "off" or config.enable_role_switch
    # What is transferred brings its slot, tails and windows along.
    if config.max_checkpoints is None and not is_used:
        return "no prompt is computed here, and no cache returned: --local-prefill off"
    return ""


def _request_room(
    layout: RankLayout,
    config: ServerConfig,
    budget: int,
    count_max: int = DEFAULT_MAX_RUNNING_REQUESTS,
) -> int:
    """Slots and tails that their share of the budget holds, `count_max` at most."""
    nbytes = state_nbytes(layout, config)
    if nbytes == 0:
        return count_max
    room = int(budget * STATE_FRACTION_MAX) // nbytes - 1  # and the scratch page
    return max(0, min(count_max, room))


def _checkpoint_room(layout: RankLayout, budget: int, count_max: int) -> int:
    """Checkpoints that their share of the budget holds, `count_max` at most."""
    nbytes = checkpoint_nbytes(layout)
    if nbytes == 0:
        return count_max
    return max(0, min(count_max, int(budget * CHECKPOINT_FRACTION_MAX) // nbytes))
