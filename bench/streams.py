"""Streams of our own against UCX's tcp: the same random runs between two processes, in turns.

Encrypted ones are beside them with the processor time that a gigabyte takes on each side; the side
that takes more decides what one core can do.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from bench.handover import RUN_KIB, SAMPLE_COUNT, Pair, Samples, plan_random_runs
from bench.report import NotRun, Row, at_least, row_of_medians

# What a stream has to reach of UCX's tcp, by KiB of a run.
UCX_TCP_RATIO_MIN = {4: 2.5, 16: 1.3, 64: 0.9, 256: 0.9}
ENCRYPTED_GBPS_PER_CORE_MIN = 1.2


def run() -> list[Row | NotRun]:
    pairs = {tls: Pair(tls) for tls in ("tcp", "stream", "stream-tls")}
    gbps: dict[str, Samples] = defaultdict(lambda: defaultdict(list))
    cpu: dict[str, list[float]] = defaultdict(list)
    rng = np.random.default_rng(3)
    for _ in range(SAMPLE_COUNT):
        for kib in RUN_KIB:
            warmup, plan = (plan_random_runs(rng, kib << 10) for _ in range(2))
            for tls, pair in pairs.items():
                pair.sample(warmup)
                before = pair.cpu_seconds()
                gbps[tls][f"{kib}KiB"].append(pair.sample(plan))
                spent = [a - b for a, b in zip(pair.cpu_seconds(), before, strict=True)]
                cpu[f"{tls}_{kib}KiB"].append(max(spent) / plan.total_nbytes * 1e9)
    for pair in pairs.values():
        pair.close()
    rows: list[Row | NotRun] = []
    for kib in RUN_KIB:
        size = f"{kib}KiB"
        ours, ucx, encrypted = (gbps[tls][size] for tls in ("stream", "tcp", "stream-tls"))
        target = at_least(UCX_TCP_RATIO_MIN[kib])
        rows += [
            row_of_medians(f"stream_{size}", "GB/s", ours, "UCX tcp", ucx, target),
            row_of_medians(f"stream_tls_{size}", "GB/s", encrypted, "unencrypted", ours),
            row_of_medians(f"stream_cpu_{size}", "CPU s/GB", cpu[f"stream_{size}"]),
            row_of_medians(f"stream_tls_cpu_{size}", "CPU s/GB", cpu[f"stream-tls_{size}"]),
            row_of_medians(
                f"stream_tls_per_core_{size}",
                "GB/s",
                [1 / seconds for seconds in cpu[f"stream-tls_{size}"]],
                target=at_least(ENCRYPTED_GBPS_PER_CORE_MIN),
            ),
        ]
    return rows
