"""The outcome of a request and of a run, as they were noted. Knows nothing of what they come to."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.serve.workload import Ask


@dataclass(slots=True)
class Outcome:
    """The outcome of one request. Times in seconds from the beginning of the run.

    began_s: when its turn came here; due_s if this process was not late. sent_s: when it was sent,
        later than that only if --max-concurrency held it back.
    arrivals: (time, tokens so far) of every event that brought some.
    prompt_count, output_count: tokens. cached_count: of the prompt's tokens those that the server
        had already; None if it does not say.
    output_ids, text: the answer, kept in a session only.
    error_kind: "" if all went well, else a short word for a table; error: the text of the answer.
    """

    ask: Ask
    due_s: float
    began_s: float = 0.0
    sent_s: float = 0.0
    ended_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    prompt_count: int = 0
    output_count: int = 0
    cached_count: int | None = None
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    error_kind: str = ""
    error: str = ""

    @property
    def is_good(self) -> bool:
        return not self.error_kind


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that was noted. lags_s: how late this process came to look, once in 10 ms.

    unsent_count: later turns of sessions of which one failed.
    """

    outcomes: list[Outcome]
    duration_s: float
    lags_s: list[float]
    unsent_count: int = 0
