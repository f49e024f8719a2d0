"""What a server says of itself in a handshake, and whether another one fits it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import TransferMode
from common.errors import ProtocolError
from common.layout.cache_layout import ServerLayout
from common.protocol.codec import decode_layout
from common.protocol.handshake import (
    agree_transfer_mode,
    compare_fingerprints,
    compare_layouts,
    compare_transfer_mode,
    compare_versions,
    negotiate_version,
)
from common.protocol.peer import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Hello, Welcome
from common.scheduling.facts import ServerFacts


@dataclass(frozen=True, slots=True)
class Introduction:
    """role: for operators. sends, receives: whether caches leave this server, and arrive here.

    needs_outbound, needs_inbound: whether a connection that goes the other way only is of no use.
    request_token_max: the longest prompt that it computes for others; 0 if it computes none.
    """

    facts: ServerFacts
    role: str
    sends: bool
    receives: bool
    request_token_max: int = 0
    needs_outbound: bool = True
    needs_inbound: bool = True

    def hello(self) -> Hello:
        """The first message of the server that dials."""
        facts = self.facts
        return Hello(
            version_min=PROTOCOL_VERSION_MIN,
            version_max=PROTOCOL_VERSION,
            role=self.role,
            incarnation=facts.incarnation,
            fingerprint=facts.fingerprint,
            layout=facts.layout_bytes,
            transfer_mode=facts.transfer_mode,
            host_ids=list(facts.host_ids),
            pids=list(facts.pids),
            verify=facts.verify,
            name=facts.name,
            http_address=facts.http_address,
            sends=self.sends,
            receives=self.receives,
            sends_rest=self.sends,
        )

    def welcome(self, credit_count: int | None, version: int) -> Welcome:
        """The answer. credit_count: requests that it takes from this peer from now on. version: of
        the protocol, as both speak it."""
        facts = self.facts
        return Welcome(
            version=version,
            incarnation=facts.incarnation,
            fingerprint=facts.fingerprint,
            layout=facts.layout_bytes,
            request_token_max=self.request_token_max,
            host_ids=list(facts.host_ids),
            pids=list(facts.pids),
            transfer_mode=facts.transfer_mode,
            verify=facts.verify,
            name=facts.name,
            http_address=facts.http_address,
            credits=credit_count,
            role=self.role,
            sends=self.sends,
            receives=self.receives,
            sends_rest=self.sends,
        )

    def compare(self, message: Hello | Welcome) -> tuple[list[str], ServerLayout | None]:
        """Every difference that keeps caches from moving, and the other server's layout if it can
        be read. An empty list: the two fit."""
        facts, differences = self.facts, []
        ours = (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION)
        differences += compare_versions(ours, spoken_versions(message))
        if not ((self.sends and message.receives) or (self.receives and message.sends)):
            differences.append(
                f"role: no cache can move between this {self.role} server and a {message.role} "
                "server: one has to send what the other receives"
            )
        differences += compare_fingerprints(facts.fingerprint, message.fingerprint)
        try:
            layout = decode_layout(message.layout)
        except ProtocolError as error:
            return [*differences, f"layout: {error}"], None
        differences += compare_transfer_mode(facts.transfer_mode, message.transfer_mode)
        differences += compare_layouts(facts.layout, layout, self.agree(message))
        return differences, layout

    def agree(self, message: Hello | Welcome) -> TransferMode:
        """How caches will travel. DIRECT stands for no agreement, which is a difference."""
        agreed = agree_transfer_mode(self.facts.transfer_mode, message.transfer_mode)
        return agreed or TransferMode.DIRECT

    @staticmethod
    def agree_version(message: Hello | Welcome) -> int:
        """Of the protocol, as both speak it; the oldest stands for none, which is a difference."""
        ours = (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION)
        return negotiate_version(ours, spoken_versions(message)) or PROTOCOL_VERSION_MIN


def spoken_versions(message: Hello | Welcome) -> tuple[int, int]:
    """Oldest and newest version of the protocol. Who answers has chosen one."""
    if isinstance(message, Welcome):
        return message.version, message.version
    return message.version_min, message.version_max
