"""What a worker says of itself when it is ready, beside its messages. Values only."""

from __future__ import annotations

import msgspec


class PassTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds: prompt_token_s per token of a prompt, decode_s of a step that decodes one sequence;
    0 if it was not measured."""

    prompt_token_s: float = 0.0
    decode_s: float = 0.0


class PeerWriter(msgspec.Struct, frozen=True, array_like=True):
    """A peer incarnation that could write into memory of a rank. host_ids, pids: of its ranks."""

    incarnation: str
    host_ids: list[str] = []
    pids: list[int] = []
