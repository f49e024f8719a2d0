"""How an accepted request can end other than well: every kind of error that clients may be told.

A request that was accepted ends exactly once: with its output, or with one of these, before its
deadline and what a message takes. `kind` is the `code` of OpenAI errors, `err_type` in SGLang's
finish_reason, and the label of `baton:failed_requests_total`. `docs/troubleshooting.md` says what
to do about each.
"""

from __future__ import annotations

ABORTED = "aborted"
"""Counted apart: its client wanted it."""

# The HTTP statuses that each kind may have.
FAILURES: dict[str, tuple[int, ...]] = {
    "bad_request": (400,),
    "bad_reservation": (400,),
    "prompt_mismatch": (400,),
    "too_large": (400,),
    "no_token": (400,),
    "not_held": (409,),
    ABORTED: (499,),
    "other_half_aborted": (500,),
    "rendezvous_timeout": (500,),
    "bad_logits": (500,),
    "unfit_token": (500,),
    "transfer_failed": (500,),
    "transfer_corrupted": (500,),
    "peer_lost": (500, 503),
    "scheduler_lost": (500,),
    "output_lost": (500,),
    "queue_full": (503,),
    "overloaded": (503,),
    "no_prefill_server": (503,),
    "stopping": (503,),
    "timed_out": (504,),
    "hold_expired": (504,),
}
