"""What /openapi.json says of answers that are no JSON."""

from __future__ import annotations

from common.frontend.bodies.fields import JsonObject

EVENT_STREAM = "text/event-stream"


def answered_as(content_type: str) -> dict[int | str, JsonObject]:
    """The `responses` of a route whose answer is a text of this type, or a stream of it."""
    return {200: {"content": {content_type: {"schema": {"type": "string"}}}}}
