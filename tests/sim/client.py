"""One request as its client sees it, and what it must be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.layout.component import FULL, Live
from common.prefix_digests import DIGEST_NBYTES
from tests.sim.oracle import next_token

EOS = 7
DIGEST_TOKENS = 4
BUDGET_S = 20.0


@dataclass
class Client:
    """submitted_at: when its scheduler got to see it. room: that it shares with its other half,
    where both are asked at once. failed_at: when a server said that it has, though it may have
    ended before the client heard; could_tell: whether all servers were connected then.
    role: of the servers that can do it. token_max: what its server allows a prompt and its output
    together. seed: of its prefix digests. asked_count: how often its cache was asked for.
    sample_seed: of its sampling; samples of one prompt are clients of their own.
    is_moved: another server has gone on with it, or the same one after a crash;
    is_waiting_for_server: until that is back."""

    request_id: int
    prompt: list[int]
    max_new_tokens: int
    node: str
    output: list[int] = field(default_factory=list)
    finals: list[str] = field(default_factory=list)
    submitted_at: float = 0.0
    answered_at: float = 0.0
    budget_s: float = BUDGET_S
    is_cancelled: bool = False
    is_orphan: bool = False
    failure: str = ""
    room: int | None = None
    failed_at: float = 0.0
    could_tell: bool = False
    cached_count: int = 0
    retraction_count: int = 0
    asked_count: int = 0
    seed: bytes = bytes(DIGEST_NBYTES)
    sample_seed: int = 0
    is_moved: bool = False
    is_waiting_for_server: bool = False
    role: str = "decode"
    token_max: int = 10**9

    def expected(self, lives: Sequence[Live] = (FULL,), count: int = 10**9) -> list[int]:
        """The first `count` tokens of the answer."""
        tokens = list(self.prompt)
        for _ in range(min(self.max_new_tokens, count)):
            tokens.append(next_token(tokens, lives, self.sample_seed))
            if tokens[-1] == EOS or len(tokens) >= self.token_max:
                break
        return tokens[len(self.prompt) :]


def can_follow(client: Client) -> bool:
    """Whether a request may go on at another server, or at its own after a crash. A router takes
    the end of one half for the end of both; and a number is used at a server once."""
    return client.room is None and not (client.finals or client.is_cancelled or client.is_moved)
