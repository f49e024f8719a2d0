"""Prefill servers that are seen, added and removed while this server runs: /peers.

Knows nothing of how they are connected.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from msgspec import structs

from common.channel.address import parse_address
from common.config import Role
from common.errors import ConfigError, RequestError
from common.frontend.bodies.body import Body, read, schema_of
from common.frontend.bodies.fields import JsonObject
from common.frontend.context import FrontendContext
from common.frontend.http.errors import json_response
from common.frontend.peers.wanted import WANTED_COUNT_MAX
from common.frontend.requests.scrape import ask_state
from common.protocol.frontend import PeerState, State

PATH = "/peers"
REQUEST = "request"  # the source of an address that nothing but a request has named


class AddressFields(Body, frozen=True):
    """A prefill server's bootstrap port, as "host:port"."""

    address: str


ADDRESS = schema_of(AddressFields)


def build_router(context: FrontendContext) -> APIRouter:
    router = APIRouter()

    @router.get(PATH)
    async def list_peers() -> Response:
        """Every peer, its state, and who names its address."""
        seen = await ask_state(context)
        return json_response(
            {
                "is_state_fresh": seen.is_fresh,
                "peers": _peers(context, seen.state),
                "problems": context.peers.problems,
            }
        )

    @router.post(PATH)
    async def add_peer(request: Request) -> Response:
        """Connect to the prefill server at `address`; fine if that is done already."""
        _check_dials(context)
        address = await context.bodies.read(request, address_of)
        if not context.peers.add(address):
            raise RequestError(
                f"address {address!r}: {WANTED_COUNT_MAX} prefill servers are wanted already, "
                "which is the most there can be",
                field="address",
            )
        return json_response(_told(context, address))

    @router.delete(PATH)
    async def remove_peer(request: Request) -> Response:
        """Let the prefill server at `address` go, as soon as nothing is under way."""
        _check_dials(context)
        address = address_of({"address": request.query_params.get("address", "")})
        if not context.peers.remove(address):
            raise RequestError(
                f"address {address!r}: is none of this server's prefill servers (GET /peers)",
                field="address",
                status=404,
            )
        return json_response(_told(context, address))

    return router


def address_of(body: JsonObject) -> str:
    """The address in a body, in its one spelling. Raises: RequestError."""
    try:
        return str(parse_address(read(AddressFields, body).address))
    except ConfigError as error:
        raise RequestError(str(error), field="address") from error


def _check_dials(context: FrontendContext) -> None:
    """Raises: RequestError on a server that dials nobody."""
    if context.config.role is Role.PREFILL:
        raise RequestError(
            "a prefill server dials nobody: its decode servers are told of it, "
            "by their --prefill or their /peers"
        )
    if not context.peers.has_peers:
        raise RequestError(
            "this server was started with --prefill none and computes prompts itself: "
            "it can't have prefill servers"
        )


def _told(context: FrontendContext, address: str) -> dict[str, object]:
    return {"success": True, "address": address, "sources": _sources(context, address)}


def _sources(context: FrontendContext, address: str) -> list[str]:
    wanted = context.peers.wanted
    lapsed = wanted.lapsed_of(address)
    return wanted.sources_of(address) or ([lapsed] if lapsed else [])


def _peers(context: FrontendContext, state: State | None) -> list[dict[str, object]]:
    """Those that the scheduler knows, and those that it does not know yet or any more."""
    wanted = context.peers.wanted
    shown = list(state.peers) if state is not None else []
    known = {peer.address for peer in shown}
    new = [one for one in wanted.addresses if one not in known]
    shown += [PeerState(one, "", "connecting", "not dialled yet") for one in new]
    shown += [PeerState(one, "", "removed") for one in wanted.removed if one not in known]
    return [structs.asdict(peer) | _origin(context, peer) for peer in shown]


def _origin(context: FrontendContext, peer: PeerState) -> dict[str, object]:
    """Who names an address; nobody that of a server which has dialled this one."""
    sources = _sources(context, peer.address)
    is_named = context.config.role is Role.DECODE and peer.state != "leaving"
    if not sources and is_named:
        sources = [REQUEST]
    return {"sources": sources, "is_lapsed": bool(context.peers.wanted.lapsed_of(peer.address))}
