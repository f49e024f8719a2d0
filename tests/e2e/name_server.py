"""A name server for tests: UDP on port 53 of a loopback address, with answers that tests change."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import Self

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

TTL_S = 0
KINDS = {dns.rdatatype.A: ".", dns.rdatatype.AAAA: ":"}


class NameServer:
    """answers: name with its last dot -> addresses of both kinds. A name that is not there does not
    exist; one without an address of a kind has none. asked: (name, kind) of every question."""

    def __init__(self, host: str) -> None:
        """Raises: OSError if the port can't be had."""
        self.answers: dict[str, list[str]] = {}
        self.is_failing = False
        self.asked: list[tuple[str, str]] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((host, 53))
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                payload, client = self._socket.recvfrom(4096)
                self._socket.sendto(self._answer(payload), client)
            except OSError:
                return  # closed

    def _answer(self, payload: bytes) -> bytes:
        query = dns.message.from_wire(payload)
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        (question,) = query.question
        name, kind = question.name.to_text(), question.rdtype
        self.asked.append((name, dns.rdatatype.to_text(kind)))
        addresses = self.answers.get(name)
        if self.is_failing:
            response.set_rcode(dns.rcode.SERVFAIL)
        elif addresses is None:
            response.set_rcode(dns.rcode.NXDOMAIN)
        else:
            found = [one for one in addresses if KINDS.get(kind, "none") in one]
            if found:
                response.answer = [dns.rrset.from_text(name, TTL_S, "IN", kind, *found)]
        return response.to_wire()
