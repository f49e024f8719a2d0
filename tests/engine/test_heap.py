"""What a pass frees is there for the next one. In a process of its own: the settings stay."""

from __future__ import annotations

import subprocess
import sys

PASSES = """
import resource
import torch
from common.engine.heap import keep_freed_memory

assert keep_freed_memory()
torch.set_num_threads(1)

def compute():
    rows = torch.ones(4096, 512)  # 8 MiB
    for _ in range(4):
        wide = torch.cat((rows, rows, rows), dim=1)
        rows = wide[:, :512] + wide[:, 512:1024]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(5):
    compute()
before = faults()
for _ in range(5):
    compute()
print(faults() - before)
"""
TOUCHED_PAGES = 5 * (2048 + 4 * (6144 + 2048))
"""Of the last five passes, if none of their memory had been there."""


def test_a_pass_computes_in_the_memory_of_the_one_before() -> None:
    """Without the settings it is a fifth and more of the memory that faults."""
    done = subprocess.run(
        [sys.executable, "-c", PASSES], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < TOUCHED_PAGES / 100
