"""Whether quarantined pages keep a server from ever doing anything again.

No timer frees a quarantined page, because its writer may still reach it. So where the writer never
says a word and can't be proved gone, the only way out is a new process with a new pool.
"""

from __future__ import annotations

from dataclasses import dataclass

# How long nothing can be admitted although nothing runs: then health checks say so, and then the
# server ends itself. Writers that live answer an Abort in milliseconds.
STARVED_TROUBLE_S = 5.0
STARVED_END_S = 30.0


@dataclass(slots=True)
class Starvation:
    since: float | None = None

    def look(self, now: float, *, is_starved: bool, is_over: bool) -> float:
        """Seconds for which this has lasted: since somebody did not fit, until pages come back or
        somebody runs. That nobody waits any more, because all were sent away, does not end it."""
        if is_over:
            self.since = None
        elif is_starved and self.since is None:
            self.since = now
        return 0.0 if self.since is None else now - self.since
