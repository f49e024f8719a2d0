"""The headers of a request, decoded once: several checks and readers look at them. And one that
answers have.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Scope

SCOPE_KEY = "baton.headers"
WARNINGS = "warnings"


class GivenHeaders:
    """By name, in lower case."""

    def __init__(self, scope: Scope) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            self._values.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: str = "") -> str:
        """The first of that name."""
        values = self._values.get(name)
        return values[0] if values else default

    def all(self, name: str) -> Sequence[str]:
        return self._values.get(name, ())


def headers_of(scope: Scope) -> GivenHeaders:
    known: GivenHeaders | None = scope.get(SCOPE_KEY)
    if known is None:
        known = scope[SCOPE_KEY] = GivenHeaders(scope)
    return known


def warned(response: Response, warnings: Sequence[str]) -> Response:
    """The response with what its client should know in a header; what is no ASCII is escaped."""
    if warnings:
        text = ", ".join(warnings).encode("ascii", "backslashreplace").decode()
        response.headers[WARNINGS] = "".join(one if one.isprintable() else "?" for one in text)
    return response


def has_body(scope: Scope) -> bool:
    """Whether a body comes with a request, of any length."""
    headers = headers_of(scope)
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
