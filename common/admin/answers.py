"""What servers say of themselves and of their peers: the part of /server_info and /peers that is
read. Fields that are not there have defaults, because releases may be mixed.

Knows nothing of HTTP. Texts are as they came: whatever shows them makes them harmless.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from common.errors import BatonError
from common.failures import STOPPING

T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
UNIFIED_MODE = "null"  # SGLang's word for a server that does both halves
STANDBY = "standby"


class NotUnderstood(BatonError):
    """A server answered, but not with what was asked for."""


class Peer(msgspec.Struct, frozen=True):
    """As `PeerState` has it. sources, is_lapsed: in /peers only."""

    address: str = ""
    incarnation: str = ""
    state: str = ""
    detail: str = ""
    name: str = ""
    http_address: str = ""
    version: Count = 0
    transports: list[str] = []
    transfer_mode: list[str] = []
    in_flight_count: Count = 0
    breaker: str = ""
    sources: list[str] = []
    is_lapsed: bool = False

    @property
    def label(self) -> str:
        return self.name or self.address or self.incarnation


class Peers(msgspec.Struct, frozen=True):
    """GET /peers. problems: source of addresses -> why it can't be read."""

    peers: list[Peer]
    problems: dict[str, str] = {}


class PageGroup(msgspec.Struct, frozen=True):
    total: Count = 0
    used: Count = 0
    quarantined: Count = 0


class PrefixCache(msgspec.Struct, frozen=True):
    token_count: Count = 0
    host_token_count: Count = 0
    host_token_max: Count = 0


class InternalState(msgspec.Struct, frozen=True):
    queues: dict[str, Count] = {}


class ServerAnswer(msgspec.Struct, frozen=True):
    """GET /server_info. status: "ready", or why it is not."""

    version: str
    role: str
    status: str
    name: str = ""
    served_model_name: str = ""
    incarnation: str = ""
    disaggregation_mode: str = ""
    standby: bool = False
    is_state_fresh: bool = True
    tp_size: Count = 0
    pp_size: Count = 0
    page_size: Count = 0
    uptime_s: float | None = None
    peers: list[Peer] = []
    page_groups: list[PageGroup] = []
    prefix_cache: PrefixCache | None = None
    internal_states: list[InternalState] = []

    @property
    def kind(self) -> str:
        """prefill, decode, unified or standby."""
        if self.standby:
            return STANDBY
        return "unified" if self.disaggregation_mode == UNIFIED_MODE else self.role

    @property
    def state(self) -> str:
        if self.status == STOPPING:
            return "draining"
        return "ready" if self.status == "ready" else "not ready"

    @property
    def detail(self) -> str:
        """Why it is not ready, and whether what it says is old."""
        reason = self.status if self.state == "not ready" else ""
        old = "" if self.is_state_fresh else "its scheduler does not answer: older numbers"
        return "; ".join(filter(None, (reason, old)))

    @property
    def pool_usage(self) -> float | None:
        """Of the fullest page group, 0 to 1; None if it names none."""
        shares = [(g.used + g.quarantined) / g.total for g in self.page_groups if g.total]
        return max(shares, default=None)

    def queue(self, name: str) -> int | None:
        queues = self.internal_states[0].queues if self.internal_states else {}
        return queues.get(name)


def decode(document: bytes, kind: type[T]) -> T:
    """Raises: NotUnderstood."""
    try:
        return msgspec.json.decode(document, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise NotUnderstood(f"the answer is not understood: {exc}") from exc
