"""The place where the halves of a request meet, as a body names it, checked.

A router sends one body to both servers, which read it alike: `bootstrap_room` and its kin. A proxy
in vLLM's manner asks the prefill server first. That server holds the computed cache and answers its
name in `kv_transfer_params`, which the proxy sends to the decode server next. Knows nothing of
prompts.
"""

from __future__ import annotations

import secrets
from typing import Annotated

from msgspec import Meta

from common.errors import RequestError
from common.frontend.bodies.body import Body, fields_of, path, read, refusal
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.bodies.sample import Limits
from common.request import Bootstrap
from common.request_bounds import ROOM_MAX

PORT_MAX = 65535
KEY = "kv_transfer_params"
ROOM_DIGITS_MAX = 19
FORBIDDEN = 403


class Meeting(Body, frozen=True):
    """Where one sample meets the other server."""

    bootstrap_host: str = ""
    bootstrap_port: Annotated[int, Meta(ge=1, le=PORT_MAX)] | None = None
    bootstrap_room: Annotated[int, Meta(ge=0, le=ROOM_MAX)] | None = None


class TransferWish(Body, frozen=True):
    """Which server is asked first, in the names of vLLM's `kv_transfer_params`."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False


class TransferAddress(Body, frozen=True):
    """The answer of a prefill server, which the proxy sends to the decode server."""

    remote_engine_id: str | None = None
    remote_request_id: Annotated[str, Meta(max_length=ROOM_DIGITS_MAX)] | None = None
    remote_host: str | None = None
    remote_port: Annotated[int, Meta(ge=1, le=PORT_MAX)] | None = None


def limits_of(body: JsonObject, limits: Limits) -> Limits:
    """What a body is checked against: on a prefill server it may be one for decode servers.

    Raises: RequestError 503 if none of them is connected.
    """
    plain, params = limits.plain, body.get(KEY)
    room = body.get("bootstrap_room")
    rooms = room if isinstance(room, list) else [room]
    wishes = (
        [params.get(name) for name in fields_of(TransferWish)] if isinstance(params, dict) else []
    )
    if plain is None or any(wishes) or any(one is not None for one in rooms):
        return limits
    if not plain.request_token_max:
        text = "a request without bootstrap_room: no decode server is connected to answer it"
        raise RequestError(text, status=503)
    return plain


def read_bootstraps(
    body: JsonObject, params: JsonObject, prompt_count: int, n: int, limits: Limits
) -> list[Bootstrap | None]:
    """Where each sample meets the other server. params: the body's `kv_transfer_params`.

    The samples of a prompt meet in one room. A single room of several prompts stands for room,
    room + 1, ...; a list has one per prompt, or one per sample.
    Raises: RequestError; also on a prefill server if there is no room.
    """
    count = prompt_count * n
    held = _read_held(body, params, prompt_count, n, limits)
    if held is not None:
        return held
    places = spread(Meeting, body, prompt_count, n)
    room = body.get("bootstrap_room")
    if room is None or (isinstance(room, list) and all(item is None for item in room)):
        if limits.is_prefill:
            raise RequestError(
                "bootstrap_room: a prefill server answers only requests that come through a "
                "router with a room; send this one to the decode server",
                field="bootstrap_room",
            )
        if any(place.get("bootstrap_host") is not None for place in places):
            raise refusal("bootstrap_room", room, "given, since bootstrap_host is")
        return [None] * count
    steps = _room_steps(room, prompt_count, n)
    found: list[Bootstrap | None] = []
    for place, step in zip(places, steps, strict=True):
        meeting = read(Meeting, place)
        if meeting.bootstrap_room is None:
            raise refusal("bootstrap_room", room, f"a room for each of {count} samples")
        number = meeting.bootstrap_room + step
        if number > ROOM_MAX:
            raise refusal("bootstrap_room", room, f"at most {ROOM_MAX - step} for {count} samples")
        host = meeting.bootstrap_host or limits.default_host
        if not host:
            raise refusal(
                "bootstrap_host", place.get("bootstrap_host"), "the prefill server's host"
            )
        port = limits.default_port if meeting.bootstrap_port is None else meeting.bootstrap_port
        if limits.dial_rules is not None:
            host = limits.dial_rules.check(host, port).bracketed_host
        found.append(Bootstrap(host=host, port=port, room=number))
    if isinstance(room, list):
        of_prompt = {place.room: index // n for index, place in enumerate(found) if place}
        if any(place and of_prompt[place.room] != i // n for i, place in enumerate(found)):
            raise refusal("bootstrap_room", room, "different rooms for different prompts")
    return found


def transfer_params(place: Bootstrap | None, limits: Limits) -> JsonObject | None:
    """Parameters for a decode server about samples that are held here, in vLLM's names; None if no
    sample is held. place: of the first one. Proxies pass them on unread, some through floats, so
    the room is a text. No pages are named, since the prefill server writes and is not read from."""
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


def _read_held(
    body: JsonObject, params: JsonObject, prompt_count: int, n: int, limits: Limits
) -> list[Bootstrap | None] | None:
    """Places of samples whose prompt is computed before a decode server asks; None of others.

    Raises: RequestError.
    """
    if not params:
        return None
    count = prompt_count * n
    wish, given = read(TransferWish, params, KEY), read(TransferAddress, params, KEY)
    if not wish.do_remote_decode and not wish.do_remote_prefill:
        return None
    if wish.do_remote_decode and not limits.is_prefill:
        raise refusal(path(KEY, "do_remote_decode"), True, "false: this is a decode server")
    if wish.do_remote_prefill and limits.is_prefill:
        raise refusal(path(KEY, "do_remote_prefill"), True, "false: this is a prefill server")
    if body.get("bootstrap_room") is not None:
        raise refusal("bootstrap_room", body["bootstrap_room"], f"absent, since {KEY} is given")
    if wish.do_remote_decode:
        host, port, engine = limits.named_host, limits.default_port, limits.engine
        room = secrets.randbelow(ROOM_MAX - count)
    else:
        host, port, engine = _read_address(given, limits)
        room = _read_room(given.remote_request_id or "", count)
    steps = _room_steps(room, prompt_count, n)
    return [Bootstrap(host, port, room + step, engine) for step in steps]


def _read_address(given: TransferAddress, limits: Limits) -> tuple[str, int, str]:
    """The prefill server that holds something: host, port, incarnation. The host is "" where it may
    not be dialled: it is found by its incarnation alone then, if it is connected."""
    engine, host = given.remote_engine_id, given.remote_host or ""
    if not engine:
        name = path(KEY, "remote_engine_id")
        raise refusal(name, engine, "what the prefill server has answered")
    port = given.remote_port or limits.default_port or PORT_MAX
    if host and limits.dial_rules is not None:
        try:
            host = limits.dial_rules.check(host, port).bracketed_host
        except RequestError as error:
            if error.status != FORBIDDEN:
                name = path(KEY, "remote_host")
                raise refusal(name, host, "the prefill server's host") from error
            host = ""
    return host, port, engine


def _read_room(text: str, count: int) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > ROOM_MAX - count:
        name = path(KEY, "remote_request_id")
        raise refusal(name, text, "what the prefill server has answered")
    return int(text)


def spread(kind: type[Body], body: JsonObject, prompt_count: int, n: int = 1) -> list[JsonObject]:
    """The given fields of `kind` for each of `n` samples of each prompt. A field has one value for
    all of them, or a list with one per sample or per prompt. Raises: RequestError if it has
    another."""
    count = prompt_count * n
    samples: list[JsonObject] = [{} for _ in range(count)]
    for key in fields_of(kind):
        if key not in body:
            continue
        value = body[key]
        values = value if isinstance(value, list) else [value] * count
        if len(values) == prompt_count:
            values = [item for item in values for _ in range(n)]
        if len(values) != count:
            raise refusal(key, value, f"one value, or a list of {count}, one per sample")
        for sample, item in zip(samples, values, strict=True):
            sample[key] = item
    return samples


def _room_steps(room: JsonValue, prompt_count: int, n: int) -> list[int]:
    """The number that is added to each sample's room."""
    if isinstance(room, list):
        return [0] * (prompt_count * n)
    return [prompt for prompt in range(prompt_count) for _ in range(n)]
