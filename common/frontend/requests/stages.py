"""What a request went through, one stage after another: the account that timelines and spans share.

All durations are of monotonic clocks, each of the server that measured: a decode server's own
stages of its own, those of the transfer as the prefill server told them. The two clocks are never
compared. A transfer's stages are laid end to end from the moment when it was asked for, and what
that leaves of the time until the first token, messages and waiting between the two servers
included, is `first_token`. So the sum is exact, and where in it a message travelled is not known.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from common.config import Role
from common.request import RequestTrace

NO_SERVER = "no_prefill_server"
TRANSFER_STAGES = ("queue", "prefill", "transfer")


@dataclass(frozen=True, slots=True)
class Stage:
    """start_s: after the request's arrival. clock: of which server."""

    name: str
    start_s: float
    duration_s: float
    clock: Role

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


def stages_of(trace: RequestTrace, role: Role) -> list[Stage]:
    """The stages of one request of a server of that role; they add up to `trace.e2e_s`.

    One that ended for want of a prefill server has waited for that, and not for pages.
    A transfer that went well has all of its stages, also those that took no time. A request that
    failed has no first token; what it did after it was asked for is `unanswered`.
    """
    transfer = trace.transfer
    is_told = role is Role.DECODE and trace.peer != ""
    there = Role.PREFILL if is_told else role
    is_answered = trace.output_token_count > 0
    first = NO_SERVER if trace.status == NO_SERVER and not is_answered else "reserve"
    spans = [
        (first, trace.reserve_s, role),
        ("queue", transfer.queue_s, there),
        ("prefill", transfer.prefill_s, there),
        ("transfer", transfer.transfer_s, there),
        ("first_token" if is_answered else "unanswered", trace.first_token_s, role),
        ("decode", trace.decode_s if is_answered else 0.0, role),
    ]
    is_transferred = is_answered and (is_told or role is Role.PREFILL)
    always = {first, *(TRANSFER_STAGES if is_transferred else ())}
    found: list[Stage] = []
    start_s = 0.0
    for name, duration_s, clock in spans:
        if duration_s > 0 or name in always:
            found.append(Stage(name, start_s, duration_s, clock))
        start_s += duration_s
    return found


def chunks_of(trace: RequestTrace, prefill: Stage) -> list[Stage]:
    """The chunks that a prompt was computed in, inside their stage; none if it was a single one."""
    ends_s = trace.transfer.chunk_ends_s
    if len(ends_s) < 2:
        return []
    starts_s = [0.0, *ends_s[:-1]]
    return [
        Stage(f"chunk {index}", prefill.start_s + start, max(0.0, end - start), prefill.clock)
        for index, (start, end) in enumerate(zip(starts_s, ends_s, strict=True))
    ]


def trace_fields(trace: RequestTrace) -> dict[str, object]:
    """The account itself; every field, zeros included, which messages leave out."""
    return {
        **structs.asdict(trace),
        "origin": structs.asdict(trace.origin),
        "cached": structs.asdict(trace.cached),
        "transfer": structs.asdict(trace.transfer),
        "speculated": structs.asdict(trace.speculated),
    }
