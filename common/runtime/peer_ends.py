"""The two ends of a link between servers: a prefill server listens, a decode server dials.

Each end knows its sockets, and how a link is closed. The role's scheduler process passes one of
`listen` and `dial` to the loop. Decides nothing.
"""

from __future__ import annotations

from common.channel.gate import Gate
from common.channel.handshakes import Break
from common.channel.keys import load_curve
from common.channel.peer import PeerDialer, PeerListener
from common.config import ServerConfig
from common.scheduling.events import LinkBroke


class ListeningEnd:
    """The bootstrap port of a prefill server. Decode servers open and close its links."""

    def __init__(self, links: PeerListener, gate: Gate | None) -> None:
        self.links = links
        self._gate = gate

    def host_of(self, link: str) -> str:
        return self.links.host_of(link)

    def take_breaks(self) -> list[LinkBroke]:
        """None: only a dialler's socket reports a broken connection."""
        return []

    def drop(self, link: str) -> None:
        self.links.drop(link)

    def dial(self, link: str) -> None:
        raise AssertionError(f"link {link}: a listening server does not dial")

    def hang_up(self, link: str) -> None:
        raise AssertionError(f"link {link}: a listening server does not hang up")

    def close(self, linger_ms: int) -> None:
        self.links.close(linger_ms)
        if self._gate is not None:
            self._gate.close(linger_ms)


class DialingEnd:
    """The links of a decode server to its prefill servers."""

    def __init__(self, links: PeerDialer) -> None:
        self.links = links

    def host_of(self, link: str) -> str:
        return ""

    def take_breaks(self) -> list[LinkBroke]:
        breaks = self.links.take_breaks()
        return [LinkBroke(link, is_refused=found is Break.REFUSED) for link, found in breaks]

    def drop(self, link: str) -> None:
        self.links.hang_up(link)

    def dial(self, link: str) -> None:
        """Raises: ConfigError if the link can't be opened."""
        self.links.dial(link)

    def hang_up(self, link: str) -> None:
        self.links.hang_up(link)

    def close(self, linger_ms: int) -> None:
        self.links.close(linger_ms)


def listen(config: ServerConfig) -> ListeningEnd:
    """Raises: ConfigError naming a key file or an address that can't be used."""
    curve = load_curve(config.curve_secret_key_file, config.curve_peer_keys_file)
    gate = Gate(curve) if curve is not None else None
    return ListeningEnd(PeerListener(config.host, config.bootstrap_port, gate), gate)


def dial(config: ServerConfig) -> DialingEnd:
    """Raises: ConfigError naming a key file that can't be used."""
    return DialingEnd(
        PeerDialer(load_curve(config.curve_secret_key_file, config.curve_peer_keys_file))
    )
