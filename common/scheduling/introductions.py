"""How a server introduces itself at the handshake, from its facts. Knows nothing of links."""

from __future__ import annotations

from common.protocol.peer import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Hello, Welcome
from common.scheduling.facts import ServerFacts


def hello_of(facts: ServerFacts) -> Hello:
    """A decode server's first word."""
    return Hello(
        version_min=PROTOCOL_VERSION_MIN,
        version_max=PROTOCOL_VERSION,
        role="decode",
        incarnation=facts.incarnation,
        fingerprint=facts.fingerprint,
        layout=facts.layout_bytes,
        transfer_mode=facts.transfer_mode,
        host_ids=list(facts.host_ids),
        pids=list(facts.pids),
        verify=facts.verify,
        name=facts.name,
        http_address=facts.http_address,
    )


def welcome_of(facts: ServerFacts, request_token_max: int, credit_count: int) -> Welcome:
    """A prefill server's answer. request_token_max: the longest prompt that it takes. credit_count:
    requests that it takes from this peer from now on."""
    return Welcome(
        version=PROTOCOL_VERSION,
        incarnation=facts.incarnation,
        fingerprint=facts.fingerprint,
        layout=facts.layout_bytes,
        request_token_max=request_token_max,
        host_ids=list(facts.host_ids),
        pids=list(facts.pids),
        transfer_mode=facts.transfer_mode,
        verify=facts.verify,
        name=facts.name,
        http_address=facts.http_address,
        credits=credit_count,
    )
