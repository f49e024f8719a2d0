"""Where the halves of a request meet: what a body says of it, checked.

A router sends one body to both servers, which read it alike: `bootstrap_room` and its kin. A proxy
in vLLM's manner asks the prefill server first; that holds what it has computed and says under which
name: `kv_transfer_params`, which the decode server is sent next. Knows nothing of prompts.
"""

from __future__ import annotations

import secrets

from common.errors import RequestError
from common.frontend.bodies.fields import Fields, JsonValue
from common.frontend.bodies.sample import Limits
from common.request import Bootstrap
from common.request_bounds import ROOM_MAX

PORT_MAX = 65535
KEY = "kv_transfer_params"
ROOM_DIGITS_MAX = 19
FORBIDDEN = 403


def read_bootstraps(
    fields: Fields, prompt_count: int, n: int, limits: Limits
) -> list[Bootstrap | None]:
    """Where each sample meets the other server.

    A single room of several samples stands for room, room + 1, ...; a list has one per sample, or
    one per prompt, and then those of a prompt's samples count up from it.
    Raises: RequestError; also on a prefill server if there is no room.
    """
    count = prompt_count * n
    held = _read_held(fields, count, limits)
    if held is not None:
        return held
    rooms = _spread_over_samples(fields, "bootstrap_room", prompt_count, n)
    hosts = _spread_over_samples(fields, "bootstrap_host", prompt_count, n)
    ports = _spread_over_samples(fields, "bootstrap_port", prompt_count, n)
    room = fields.get("bootstrap_room")
    if room is None or (isinstance(room, list) and all(item is None for item in room)):
        if limits.is_prefill:
            raise RequestError(
                "bootstrap_room: a prefill server answers only requests that come through a "
                "router with a room; send this one to the decode server",
                field="bootstrap_room",
            )
        if any(host is not None for host in hosts):
            raise fields.error("bootstrap_room", "given, since bootstrap_host is")
        return [None] * count
    steps = _room_steps(room, prompt_count, n)
    found: list[Bootstrap | None] = []
    for i in range(count):
        one = Fields({"bootstrap_room": rooms[i], "bootstrap_host": hosts[i]})
        one.values["bootstrap_port"] = ports[i]
        number = one.optional_integer("bootstrap_room", 0, ROOM_MAX)
        if number is None:
            raise fields.error("bootstrap_room", f"a room for each of {count} samples")
        number += steps[i]
        if number > ROOM_MAX:
            most = ROOM_MAX - steps[i]
            raise fields.error("bootstrap_room", f"at most {most} for {count} samples")
        host = one.text("bootstrap_host", "") or limits.default_host
        if not host:
            raise one.error("bootstrap_host", "the prefill server's host")
        port = one.integer("bootstrap_port", limits.default_port, 1, PORT_MAX)
        if limits.dial_rules is not None:
            host = limits.dial_rules.check(host, port).bracketed_host
        found.append(Bootstrap(host=host, port=port, room=number))
    if isinstance(room, list) and len({place.room for place in found if place}) != count:
        raise fields.error("bootstrap_room", "different rooms")
    return found


def transfer_params(
    bootstraps: list[Bootstrap | None], limits: Limits
) -> dict[str, JsonValue] | None:
    """What a decode server is to be told of samples that are held here, in the names of vLLM's own
    parameters; None if none are. Proxies pass it on unread, some through floats: so the room is
    told as text. No pages are named, since they are written to and not read from."""
    place = bootstraps[0]
    if not limits.is_prefill or place is None or not place.engine:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": place.engine,
        "remote_request_id": str(place.room),
        "remote_host": place.host,
        "remote_port": place.port,
        "remote_block_ids": [],
    }


def _read_held(fields: Fields, count: int, limits: Limits) -> list[Bootstrap | None] | None:
    """Places of samples whose prompt is computed before a decode server asks; None of others.

    Raises: RequestError.
    """
    given = Fields.of(fields.get(KEY), KEY)
    is_first = given.boolean("do_remote_decode", False)
    is_second = given.boolean("do_remote_prefill", False)
    if not is_first and not is_second:
        return None
    if is_first and not limits.is_prefill:
        raise given.error("do_remote_decode", "false: this is a decode server")
    if is_second and limits.is_prefill:
        raise given.error("do_remote_prefill", "false: this is a prefill server")
    if fields.has("bootstrap_room"):
        raise fields.error("bootstrap_room", f"absent, since {KEY} is given")
    if is_first:
        host, port, engine = limits.named_host, limits.default_port, limits.engine
        room = secrets.randbelow(ROOM_MAX - count)
    else:
        host, port, engine = _read_address(given, limits)
        room = _read_room(given, count)
    return [Bootstrap(host, port, room + i, engine) for i in range(count)]


def _read_address(given: Fields, limits: Limits) -> tuple[str, int, str]:
    """The prefill server that holds something: host, port, incarnation. The host is "" where it may
    not be dialled: it is found by its incarnation alone then, if it is connected."""
    engine = given.text("remote_engine_id", "")
    if not engine:
        raise given.error("remote_engine_id", "what the prefill server has answered")
    host = given.text("remote_host", "")
    port = given.integer("remote_port", limits.default_port or PORT_MAX, 1, PORT_MAX)
    if host and limits.dial_rules is not None:
        try:
            host = limits.dial_rules.check(host, port).bracketed_host
        except RequestError as error:
            if error.status != FORBIDDEN:
                raise given.error("remote_host", "the prefill server's host") from error
            host = ""
    return host, port, engine


def _read_room(given: Fields, count: int) -> int:
    text = given.text("remote_request_id", "")
    is_number = text.isascii() and text.isdecimal() and len(text) <= ROOM_DIGITS_MAX
    if not is_number or int(text) > ROOM_MAX - count:
        raise given.error("remote_request_id", "what the prefill server has answered")
    return int(text)


def spread(fields: Fields, key: str, count: int) -> list[JsonValue]:
    """One value per sample of a field that may be one value for all."""
    value = fields.get(key)
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise fields.error(key, f"one value, or a list of {count}, one per sample")
    return value


def _spread_over_samples(fields: Fields, key: str, prompt_count: int, n: int) -> list[JsonValue]:
    """As `spread`; a list with one value per prompt counts for all samples of a prompt."""
    value = fields.get(key)
    if isinstance(value, list) and len(value) == prompt_count:
        return [item for item in value for _ in range(n)]
    return spread(fields, key, prompt_count * n)


def _room_steps(room: JsonValue, prompt_count: int, n: int) -> list[int]:
    """What is added to each sample's room."""
    if not isinstance(room, list):
        return list(range(prompt_count * n))
    if len(room) == prompt_count:
        return list(range(n)) * prompt_count
    return [0] * (prompt_count * n)
