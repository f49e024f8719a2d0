"""`python -m common.metrics.reference`: every metric of both servers as a Markdown table.

`deploy/METRICS.md` is what it prints.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from common.metrics.definitions import Kind, Metric, View
from common.metrics.recorded import LATENCIES, REQUESTS, TRANSFERS
from common.metrics.seen import COUNTERS, GAUGES, NAMED_COUNTERS, QUEUES
from common.metrics.server import GONE_PEER_KEPT_S, OTHER_PEERS, PEER_COUNT_MAX

SECTIONS = {
    "Latencies and lengths": LATENCIES,
    "Requests and tokens": REQUESTS,
    "Transfers": TRANSFERS,
    "Queues": QUEUES,
    "Counters of the scheduler": (*COUNTERS, *NAMED_COUNTERS),
    "State of the moment": GAUGES,
}
HEAD = f"""\
# Metrics

Printed by `python -m common.metrics.reference` from the table in `common/metrics`; a test compares.

Every metric has the labels `model_name` and `engine_type` (`prefill`, `decode`, or `unified` for a
server that computes prompts itself); vLLM's names have `engine="0"` besides. `--metrics-names` says
whether `sglang:` names are shown (the default), `vllm:` ones, or `both`; `baton:` ones always are.
Names in one row are views of one measurement, never counted twice. A `peer` is a prefill server's
address, or the id of a decode server's process; metrics know {PEER_COUNT_MAX} of them at a time,
the rest is `{OTHER_PEERS}`. One that is gone is shown for {GONE_PEER_KEPT_S / 60:.0f} minutes more,
and stays in sums over all peers. The waiting time of clients is measured on the decode server
alone.
"""


def reference() -> str:
    """The whole document."""
    parts = [HEAD]
    for title, metrics in SECTIONS.items():
        parts.append(f"## {title}\n\n{_table(metrics)}\n")
    return "\n".join(parts)


def _table(metrics: Iterable[Metric]) -> str:
    rows = ["| name | type | on | meaning |", "|---|---|---|---|"]
    for metric in metrics:
        names = "<br>".join(_shown(view, metric) for view in metric.views)
        rows.append(f"| {names} | {metric.kind} | {metric.side} | {metric.text} |")
    return "\n".join(rows)


def _shown(view: View, metric: Metric) -> str:
    labels = f"{{{', '.join(view.labels)}}}" if view.labels else ""
    name = f"`{view.name}{'_total' if metric.kind is Kind.COUNTER else ''}{labels}`"
    return name if view.only is None else f"{name} ({view.only[0]}: {view.only[1]})"


def main() -> int:
    sys.stdout.write(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main())
