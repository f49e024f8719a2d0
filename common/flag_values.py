"""From the text of a flag to its value: one function per kind of setting.

Each returns the value or raises `ValueError("must be ...")`; who asks names the flag.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from common.config_keys import API_KEY_RULE, is_api_key

Value = str | int | float | bool | tuple[str, ...] | None
SERVER_NAME_LENGTH_MAX = 64  # half of what peers take: it stands in log lines and labels


def integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text) or not low <= int(text) <= high:
            raise ValueError(f"must be an integer in {low}..{high}")
        return int(text)

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ValueError(f"must be a number in {low:g}..{high:g}")
        return value

    return parse


def choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text

    return parse


def text(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise ValueError("must be printable text")
    return value


def host(value: str) -> str:
    if not value or not re.fullmatch(r"[A-Za-z0-9._:%-]+", value):
        raise ValueError("must be a host name or an IP address, without scheme, port or brackets")
    return value


def name(value: str) -> str:
    if not value or len(value) > SERVER_NAME_LENGTH_MAX or not value.isprintable():
        raise ValueError(f"must be 1 to {SERVER_NAME_LENGTH_MAX} printable characters")
    return value


def hosts(value: str) -> tuple[str, ...]:
    return tuple(host(part.strip()) for part in value.split(","))


def origins(value: str) -> tuple[str, ...]:
    """Origins as browsers write them, a JSON list as vLLM takes it included; `*` for all."""
    parts = tuple(part.strip(" \"'") for part in value.strip("[] ").split(","))
    for part in parts:
        if part != "*" and not re.fullmatch(r"https?://[A-Za-z0-9._:\[\]-]+", part):
            raise ValueError("must be origins like https://chat.example.org, or *")
    return parts


def address(value: str) -> str:
    """A "host:port", with an IPv6 host in brackets."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", value)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ValueError("must be host:port with a port in 1..65535")
    return value


def server_url(value: str) -> str:
    """http://host:port of a server's HTTP API, https alike; "host:port" is http."""
    rule = "must be a URL such as http://host:30001, without user and path"
    parts = urlsplit(value if "://" in value else f"http://{value}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError as exc:  # no number, or no address in brackets
        raise ValueError(rule) from exc
    has_more = parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc
    is_spelled = re.fullmatch(r"[!-~]+", value) is not None
    if parts.scheme not in ("http", "https") or not host or has_more or not is_spelled or port == 0:
        raise ValueError(rule)
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{port or (443 if parts.scheme == 'https' else 80)}"


def drain_targets(value: str) -> tuple[str, ...]:
    """URLs; empty for `auto`."""
    if value == "auto":
        return ()
    return tuple(dict.fromkeys(server_url(part.strip()) for part in value.split(",")))


def trace_endpoint(value: str) -> str:
    """The whole URL of an OTLP collector; /v1/traces is where they listen for spans."""
    parts = urlsplit(value if "://" in value else f"http://{value}")
    try:
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_usable = is_usable and parts.port != 0 and value.isprintable()
    except ValueError:  # from `port`, if it is no number
        is_usable = False
    if not is_usable or " " in value:
        raise ValueError("must be an http:// or https:// URL, or host:port (OTLP over HTTP)")
    return parts._replace(path=parts.path.rstrip("/") or "/v1/traces").geturl()


def switch(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError("must be true or false")
    return value == "true"


def page_size(value: str) -> int:
    size = int(value) if re.fullmatch(r"[0-9]{1,4}", value) else 0
    if not (1 <= size <= 256 and size.bit_count() == 1):
        raise ValueError("must be a power of two in 1..256")
    return size


def ucx_origin(value: str) -> str:
    if value not in ("auto", "wheel", "system") and not Path(value).is_dir():
        raise ValueError("must be auto, wheel, system or an existing directory that holds libucp")
    return value


INTERFACES, RDMA_DEVICES = Path("/sys/class/net"), Path("/sys/class/infiniband")


def net_devices(value: str) -> str:
    """Devices of this machine as UCX names them: interfaces, and RDMA devices with a port."""
    known = {path.name for path in INTERFACES.glob("*")}
    known |= {f"{path.parent.parent.name}:{path.name}" for path in RDMA_DEVICES.glob("*/ports/*")}
    if value != "all" and not known.issuperset(value.split(",")):
        raise ValueError(f"must be all, or some of {','.join(sorted(known))}")
    return value


def port_range(value: str) -> str:
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", value)
    ports = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= ports[0] <= ports[1] <= 65535:
        raise ValueError("must be FIRST-LAST, two ports in 1..65535")
    return value


port = integer(1, 65535)
DTYPES = ("auto", "float32", "bfloat16", "float16")
OR_DTYPES = ", ".join(DTYPES)
_FP8_SPELLINGS = ("fp8_e4m3", "float8_e4m3fn")


def cache_dtype(value: str) -> str:
    if value in _FP8_SPELLINGS:
        return "float8_e4m3fn"
    return choice(*DTYPES, *_FP8_SPELLINGS)(value)


TOOL_CALL_PARSERS = ("hermes", "llama3")


def tool_call_parser(value: str) -> str:
    """vLLM calls the second one llama3_json."""
    return choice(*TOOL_CALL_PARSERS)(value.removesuffix("_json"))


def api_keys(value: str) -> tuple[str, ...]:
    keys = tuple(value.split(","))
    if not all(map(is_api_key, keys)):
        raise ValueError(f"{API_KEY_RULE}, or several of them, comma separated")
    return keys
