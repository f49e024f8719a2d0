"""What stories must contain, and a table of how often it happened.

Knows the names under which a world counts; whatever is missing here is counted and not shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tests.sim.accidents import ACCIDENTS

SECTIONS: dict[str, tuple[str, ...]] = {
    "stories": (
        *("over posix", "over tcp", "over rc_mlx5", "over cuda_copy,tcp", "over cuda_ipc"),
        *("over cuda_ipc,tcp", "between machines", "by direct", "by staged", "by auto"),
        *("with a window", "with a slot", "with a tail", "with a block", "with a bare stage"),
        "without a way back",
        *("verified off", "verified sample", "verified full", "with page sizes that differ"),
        *("with steps sent ahead", "with one step at a time", "crowded"),
        *("with priorities and keys", "with servers of two releases", "with proposals"),
    ),
    "accidents": tuple(f"accident: {kind}" for kind in dict.fromkeys(ACCIDENTS)),
    "processes": (
        *("crashes", "crashes that leave a worker", "restarts", "drains", "frozen schedulers"),
        *("schedulers crashed", "schedulers that followed"),
        "bytes that were late for their scheduler",
        *("roles switched", "switches that cut requests off", "switches with pages not quiet"),
        *("servers upgraded", "upgrades that cut requests off", "servers that gave themselves up"),
        *("outages", "peers added", "peers removed", "peers kept", "peers let go"),
        *("stopped workers", "stopped frontends", "slow steps", "pools that ran full"),
        *("steps sent ahead", "tokens of who had left"),
        *("proposals accepted", "proposals taken back"),
    ),
    "messages": (
        *("messages lost in a cut", "messages lost with a process", "messages late"),
        *("messages out of order", "messages doubled", "messages met by a successor"),
        *("Abort", "Quiesced", "Withdraw", "Detached", "TransferRequest", "TransferDone"),
        *("TransferFailed", "self-tests"),
    ),
    "pieces of transfers": (
        *("pieces over shared memory", "pieces over a network", "pieces copied by a device"),
        "pieces over a network at a closed door",
        *("pieces through slots", "pieces in slots not expected any more", "pieces damaged"),
        *("connections broken with bytes under way", "data connections broken"),
    ),
    "requests": (
        *("requests", "cancelled requests", "decode: finished", "decode: failed"),
        *("decode: aborted", "decode: timed_out", "decode: retracted"),
        *("decode: verified", "decode: mismatched", "prompts computed by decode servers"),
        *("prefill: finished", "prefill: aborted", "prefill: timed_out"),
        *("requests that moved", "streams that moved", "requests that followed a crash"),
        *("prefill: hold_expired", "decode: holds_lost"),
        *("prefill: transfer_failed", "prefill: stale_messages", "decode: stale_messages"),
    ),
    "prefixes": (
        *("turns of sessions", "pages copied", "states kept inside steps"),
        *("prompts with samples", "samples drawn from one row"),
        *("decode: returns_offered", "decode: returns_sent", "decode: returned_tokens"),
        *("decode: returns_failed", "prefill: returns_kept", "prefill: returns_lost"),
        *("pages saved", "pages loaded", "loads that failed"),
        "returns struck",
        "prefill: waited_for_equal",
        *("decode: transfer_tokens_spared", "decode: local_prefills"),
        *(
            f"{role}: {counted}"
            for role in ("prefill", "decode")
            for counted in (
                *("checkpoints_made", "checkpoints_used", "checkpoints_evicted"),
                *("host_saved_tokens", "host_loaded_tokens"),
                "prefix_evicted_tokens",
            )
        ),
    ),
}
NAMES = tuple(name for names in SECTIONS.values() for name in names)


def table(tallies: Iterable[Counter[str]]) -> list[str]:
    """Lines of a table: in how many stories something happened, and how often in all."""
    times: Counter[str] = Counter()
    stories: Counter[str] = Counter()
    for tally in tallies:
        times.update(tally)
        stories.update(name for name, count in tally.items() if count)
    lines = [f"{'what happened':<44}{'stories':>9}{'times':>10}"]
    for section, names in SECTIONS.items():
        lines.append(f"{section}:")
        lines += [f"  {name:<42}{stories[name]:>9}{times[name]:>10}" for name in names]
    return lines


def missing(tallies: Iterable[Counter[str]]) -> list[str]:
    """What never happened."""
    happened = {name for tally in tallies for name, count in tally.items() if count}
    return [name for name in NAMES if name not in happened]
