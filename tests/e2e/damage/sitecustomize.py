"""Damages caches on the way: imported by every Python process that has this folder on its path.

Only the workers of a server are touched. Before a decode rank digests what it was handed, one bit
of it is turned over, if the number of the job is in the list that DAMAGED_JOBS holds. It is what a
faulty link or memory does, at a moment that no test could meet from outside.
"""

from __future__ import annotations

import os
import sys


def _install(damaged: frozenset[int]) -> None:
    from common.protocol.digests import Digest, Digested
    from common.worker.digester import Digester

    run = Digester.run
    jobs: list[int] = []

    def run_on_damage(self: Digester, job: Digest) -> Digested:
        if not job.is_source:
            if len(jobs) in damaged:
                # The last live item of the last plane, in a page that is not full.
                group = self._layout.groups[0]
                cell, (first_index, page_ids) = group.cells[-1], job.pages[0]
                page, row = divmod(job.token_count - 1, group.group.page_items)
                start = page_ids[page - first_index] * group.page_nbytes + cell.offset
                self._buffers[0][start + row * cell.item_nbytes] ^= 1
            jobs.append(job.transfer_id)
        return run(self, job)

    Digester.run = run_on_damage  # type: ignore[method-assign]


if "common.worker" in sys.orig_argv:
    _install(frozenset(map(int, os.environ["DAMAGED_JOBS"].split(","))))
