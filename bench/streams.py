"""Streams of our own against UCX's tcp: the same random runs between two processes, in turns.

Encrypted ones are beside them with the processor time that a gigabyte takes on each side; the side
that takes more decides what one core can do.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from bench.report import NotRun, Row, at_least, row_of_medians
from bench.transfers import RUN_KIB, SAMPLE_COUNT, Contenders, Pair, Samples, plan_random_runs

# What a stream has to reach of UCX's tcp, by KiB of a run.
UCX_TCP_RATIO_MIN = {4: 2.5, 16: 1.3, 64: 0.9, 256: 0.9}
ENCRYPTED_GBPS_PER_CORE_MIN = 1.2


def run() -> list[Row | NotRun]:
    pairs = {tls: Pair(tls) for tls in ("tcp", "stream", "stream-tls")}
    gbps: dict[str, Samples] = defaultdict(lambda: defaultdict(list))
    cpu: dict[str, list[float]] = defaultdict(list)
    rng = np.random.default_rng(3)
    with Contenders("tcp") as contenders:
        for _ in range(SAMPLE_COUNT):
            for kib in RUN_KIB:
                name = f"stream_{kib}KiB"
                warmup, plan = (plan_random_runs(rng, kib << 10) for _ in range(2))
                for tls, pair in pairs.items():
                    pair.sample(warmup)
                    before = pair.cpu_seconds()
                    gbps[tls][name].append(pair.sample(plan))
                    spent = [a - b for a, b in zip(pair.cpu_seconds(), before, strict=True)]
                    cpu[f"{tls} {name}"].append(max(spent) / plan.total_nbytes * 1e9)
                contenders.sample(name, plan, warmup)
    for pair in pairs.values():
        pair.close()
    rows = [row for kib in RUN_KIB for row in rows_of(kib, gbps, cpu)]
    # The section `transfer` reports contenders that are not installed.
    return [*rows, *(row for row in contenders.results(gbps["stream"]) if isinstance(row, Row))]


def rows_of(kib: int, gbps: dict[str, Samples], cpu: dict[str, list[float]]) -> list[Row]:
    """Of one length of runs. cpu: seconds per GB of the side that took more."""
    name, size = f"stream_{kib}KiB", f"{kib}KiB"
    ours, ucx, encrypted = (gbps[tls][name] for tls in ("stream", "tcp", "stream-tls"))
    plain_cpu, tls_cpu = cpu[f"stream {name}"], cpu[f"stream-tls {name}"]
    per_core = [1 / seconds for seconds in tls_cpu]
    core_target = at_least(ENCRYPTED_GBPS_PER_CORE_MIN)
    return [
        row_of_medians(name, "GB/s", ours, "UCX tcp", ucx, at_least(UCX_TCP_RATIO_MIN[kib])),
        row_of_medians(f"stream_tls_{size}", "GB/s", encrypted, "unencrypted", ours),
        row_of_medians(f"stream_cpu_{size}", "CPU s/GB", plain_cpu),
        row_of_medians(f"stream_tls_cpu_{size}", "CPU s/GB", tls_cpu),
        row_of_medians(f"stream_tls_per_core_{size}", "GB/s", per_core, target=core_target),
    ]
