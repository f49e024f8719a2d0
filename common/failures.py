"""How an accepted request can end other than well: every kind of error that clients may be told.

A request that was accepted ends exactly once: with its output, or with one of these, before its
deadline and what a message takes. `kind` is the `code` of OpenAI errors, `err_type` in SGLang's
finish_reason, and the label of `baton:failed_requests_total`. README.md shows the same table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FailureKind:
    """statuses: HTTP statuses it may have. meaning: what happened, for operators."""

    statuses: tuple[int, ...]
    meaning: str


FAILURES: dict[str, FailureKind] = {
    "bad_request": FailureKind((400,), "the request can't be served as asked"),
    "bad_reservation": FailureKind((400,), "the two servers disagree about the request's pages"),
    "prompt_mismatch": FailureKind((400,), "a router sent the two servers different prompts"),
    "aborted": FailureKind((499,), "its client aborted it or went away"),
    "other_half_aborted": FailureKind((500,), "a router's request to the other server ended"),
    "rendezvous_timeout": FailureKind((500,), "a router's request to the other server never came"),
    "bad_logits": FailureKind((500,), "the model computed something that is no number"),
    "transfer_failed": FailureKind((500,), "the cache could not be handed over"),
    "transfer_corrupted": FailureKind((500,), "the cache that arrived is not what was sent"),
    "peer_lost": FailureKind((500, 503), "the other server went away during the hand-over"),
    "scheduler_lost": FailureKind((500,), "this server's scheduler ended or does not answer"),
    "queue_full": FailureKind((503,), "more requests wait than --max-queued-requests"),
    "no_prefill_server": FailureKind((503,), "no prefill server could be used for 10 s"),
    "stopping": FailureKind((503,), "the server stops; another one may be tried"),
    "timed_out": FailureKind((504,), "its timeout, or --request-timeout, is over"),
}
