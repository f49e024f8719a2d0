"""The buckets of all histograms.

The upper buckets are SGLang's, so that quantiles of both can be compared; the lower ones are added,
because all requests of a small model on a fast machine would land in the first bucket. vLLM's names
have the same buckets: its dashboards sum by `le`, for any bounds.
"""

from __future__ import annotations

_LONG = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
TTFT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, *_LONG)
E2E = (0.005, 0.01, 0.02, 0.05, *_LONG, 600, 1200, 1800, 2400)
INTER_TOKEN = (
    *(0.0002, 0.0005, 0.001),
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
STAGE = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
TOKEN_COUNT = tuple(2**power for power in range(21))
TRANSFER_MS = (0.1, 0.25, 0.5, 1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000)
TRANSFER_MB = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 50, 100, 500, 1000, 5000, 10000)
TRANSFER_SPEED = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 25, 50, 100, 200, 400)
