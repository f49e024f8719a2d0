"""Whether quarantined pages keep a server from ever doing anything again.

No timer frees a quarantined page, because its writer may still reach it. So where the writer never
says a word and can't be proved gone, the only way out is a new process with a new pool.
"""

from __future__ import annotations

from common.scheduling.peers import Outbox
from decode_server.admission import Admission
from decode_server.request import DecodeRequest

# How long nothing can be admitted although nothing runs: then health checks say so, and then the
# server ends itself. Writers that live answer an Abort in milliseconds.
STARVED_TROUBLE_S = 5.0
STARVED_END_S = 30.0


class Starvation:
    """since: when a request did not fit, until pages come back or a request runs. trouble: what
    health checks say of it, "" for nothing. counters: how often it came to that."""

    def __init__(self, admission: Admission, outbox: Outbox) -> None:
        self._admission = admission
        self._outbox = outbox
        self.since: float | None = None
        self.trouble = ""
        self.counters = {"starved": 0.0}

    def update(self, first: DecodeRequest | None, now: float) -> None:
        """Say it, and in the end give up, when pages in quarantine leave no room for anybody.

        first: who is next; None does not end it, for all may have been refused.
        """
        if not self._admission.may_starve:
            self.since = None
        elif self.since is None and self._admission.is_starved(first):
            self.since = now
        starved_s = 0.0 if self.since is None else now - self.since
        text = f"nothing fits beside the pages in quarantine, for {starved_s:.0f} s"
        if starved_s > STARVED_TROUBLE_S and not self.trouble:
            self.counters["starved"] += 1
            self._outbox.report(text, is_warning=True)
        self.trouble = text if starved_s > STARVED_TROUBLE_S else ""
        if starved_s > STARVED_END_S:
            self._outbox.give_up(f"{text}: their writers never said that they are done")
