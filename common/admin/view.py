"""A fleet as one JSON document, and documents as tables of aligned text.

Knows nothing of how the servers were asked. Every text may come from anything that speaks HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.admin.answers import Peer, Peers, ServerAnswer
from common.admin.calls import harmless
from common.admin.walk import Fleet, Server

CELL_LENGTH_MAX = 48
DETAIL_LENGTH_MAX = 100
NOTHING = "-"
DAY_S, HOUR_S, MINUTE_S = 86400, 3600, 60
UPTIME_S_MAX = 1e9

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Column:
    """field: of a row. length_max: in characters."""

    title: str
    field: str
    length_max: int = CELL_LENGTH_MAX


SERVER_COLUMNS = (
    Column("NAME", "name"),
    Column("URL", "url"),
    Column("ROLE", "role"),
    Column("STATE", "state"),
    Column("VERSION", "version"),
    Column("PROTOCOL", "protocols"),
    Column("RUN", "running_count"),
    Column("WAIT", "waiting_count"),
    Column("POOL", "pool_usage"),
    Column("TPxPP", "tp_size"),
    Column("PAGE", "page_size"),
    Column("PREFIXES", "prefix_token_count"),
    Column("HOST TIER", "host_token_count"),
    Column("UPTIME", "uptime_s"),
    Column("DETAIL", "detail", DETAIL_LENGTH_MAX),
)
LINK_COLUMNS = (
    Column("FROM", "from"),
    Column("TO", "to"),
    Column("STATE", "state"),
    Column("PROTOCOL", "protocol"),
    Column("TRANSPORTS", "transports"),
    Column("MODE", "transfer_mode"),
    Column("IN FLIGHT", "in_flight_count"),
    Column("BREAKER", "breaker"),
    Column("DETAIL", "detail", DETAIL_LENGTH_MAX),
)
PEER_COLUMNS = (
    Column("ADDRESS", "address"),
    Column("NAME", "name"),
    Column("STATE", "state"),
    Column("SOURCES", "sources"),
    Column("HTTP", "http_address"),
    Column("DETAIL", "detail", DETAIL_LENGTH_MAX),
)


def fleet_document(fleet: Fleet) -> dict[str, object]:
    """is_complete: False if more servers were named than are asked."""
    return {
        "is_complete": fleet.is_complete,
        "servers": [_server_row(server) for server in fleet.servers],
        "links": [_link_row(fleet, server, peer) for server, peer in fleet.links()],
    }


def fleet_text(fleet: Fleet) -> str:
    servers = [_server_row(server) for server in fleet.servers]
    links = [_link_row(fleet, server, peer) for server, peer in fleet.links()]
    parts = [table(SERVER_COLUMNS, servers)]
    if links:
        parts.append(table(LINK_COLUMNS, links))
    if not fleet.is_complete:
        parts.append("More servers were named than are asked.\n")
    return "\n".join(parts)


def peers_document(peers: Peers) -> dict[str, object]:
    return {"peers": [_peer_row(peer) for peer in peers.peers], "problems": peers.problems}


def peers_text(peers: Peers) -> str:
    text = table(PEER_COLUMNS, [_peer_row(peer) for peer in peers.peers])
    problems = [harmless(f"{source}: {problem}") for source, problem in peers.problems.items()]
    return "\n".join([text, *problems, ""]) if problems else text


def table(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """Columns of which no row has anything are left out, but for the first."""
    cells = [[_cell(row, column) for column in columns] for row in rows]
    shown = [
        index for index in range(len(columns)) if not index or any(line[index] for line in cells)
    ]
    lines = [[columns[index].title for index in shown]]
    lines += [[line[index] or NOTHING for index in shown] for line in cells]
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    padded = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "".join(f"{line}\n" for line in padded)


def _cell(row: Row, column: Column) -> str:
    """ "" for nothing."""
    text = harmless(_text(row, column.field))
    return text if len(text) <= column.length_max else f"{text[: column.length_max - 3]}..."


def _text(row: Row, field: str) -> str:
    match field, row[field]:
        case _, None:
            return ""
        case "pool_usage", float(share):
            return f"{share:.0%}"
        case "uptime_s", float(seconds):
            return _uptime(seconds)
        case "tp_size", int(count):
            return f"{count}x{row['pp_size']}"
        case "host_token_count", int(count):
            return f"{count}/{row['host_token_max']}"
        case "transfer_mode", list(modes):  # what they were measured at follows in brackets
            return ",".join(str(mode).partition(" (")[0] for mode in modes)
        case _, list(values):
            return ",".join(map(str, values))
        case _, value:
            return str(value)


def _uptime(seconds: float) -> str:
    """The two largest units. Wall clocks may jump, and with them what servers say."""
    whole = int(min(max(seconds, 0.0), UPTIME_S_MAX))
    if whole >= DAY_S:
        return f"{whole // DAY_S}d{whole % DAY_S // HOUR_S}h"
    if whole >= HOUR_S:
        return f"{whole // HOUR_S}h{whole % HOUR_S // MINUTE_S}m"
    return f"{whole // MINUTE_S}m{whole % MINUTE_S}s"


def _server_row(server: Server) -> Row:
    """Numbers are None where a server did not say them."""
    row: Row = {
        "name": server.name,
        "url": str(server.url),
        "also_urls": list(map(str, server.also_urls)),
        "role": None,
        "state": server.state,
        "detail": server.detail,
    }
    return row | _said(server.said or ServerAnswer("", "", ""), is_there=server.said is not None)


def _said(said: ServerAnswer, *, is_there: bool) -> Row:
    cache = said.prefix_cache
    told: Row = {
        "role": said.kind,
        "model": said.served_model_name,
        "incarnation": said.incarnation,
        "version": said.version,
        "protocols": sorted({peer.version for peer in said.peers if peer.version}),
        "running_count": said.queue("running"),
        "waiting_count": said.queue("waiting"),
        "queues": said.internal_states[0].queues if said.internal_states else {},
        "pool_usage": said.pool_usage,
        "tp_size": said.tp_size,
        "pp_size": said.pp_size,
        "page_size": said.page_size,
        "prefix_token_count": cache.token_count if cache else None,
        "host_token_count": cache.host_token_count if cache and cache.host_token_max else None,
        "host_token_max": cache.host_token_max if cache else None,
        "uptime_s": said.uptime_s,
    }
    return told if is_there else dict.fromkeys(told)


def _link_row(fleet: Fleet, server: Server, peer: Peer) -> Row:
    return {
        "from": server.name,
        "to": fleet.name_of(peer),
        "state": peer.state,
        "protocol": peer.version or None,
        "transports": peer.transports,
        "transfer_mode": peer.transfer_mode,
        "in_flight_count": peer.in_flight_count,
        "breaker": peer.breaker,
        "address": peer.address,
        "incarnation": peer.incarnation,
        "detail": peer.detail,
    }


def _peer_row(peer: Peer) -> Row:
    lapsed = "its name server names it no more" if peer.is_lapsed else ""
    return {
        "address": peer.address,
        "name": peer.label if peer.name else "",
        "state": peer.state,
        "sources": peer.sources,
        "http_address": peer.http_address,
        "in_flight_count": peer.in_flight_count,
        "is_lapsed": peer.is_lapsed,
        "detail": "; ".join(filter(None, (peer.detail, lapsed))),
    }
