"""Addresses as people write them."""

from __future__ import annotations

import pytest

from common.channel.address import Address, make_address, parse_address
from common.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:8998", "127.0.0.1", 8998),
        ("prefill-0.example.org:1", "prefill-0.example.org", 1),
        ("localhost:65535", "localhost", 65535),
        ("[::1]:8998", "::1", 8998),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
        ("gpu_node:80", "gpu_node", 80),
    ],
)
def test_an_address_is_read_and_written_back(text: str, host: str, port: int) -> None:
    address = parse_address(text)

    assert address == Address(host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must be host:port"),
        ("host", "must be host:port"),
        ("host:", "port '' must be in 1..65535"),
        ("host:port", "port 'port' must be in 1..65535"),
        ("host:0", "must be in 1..65535"),
        ("host:65536", "port 65536: must be in 0..65535"),
        ("host:-1", "port '-1'"),
        ("host:1e3", "port '1e3'"),
        ("host:٣", "must be in 1..65535"),
        ("host:123456", "must be in 1..65535"),
        (":80", "host ''"),
        ("::1:80", "must stand in brackets"),
        ("[::1]", "must be \\[IPv6 address\\]:port"),
        ("[127.0.0.1]:80", "only an IPv6 address stands in brackets"),
        ("[::g]:80", "neither an IP address nor a name"),
        ("300.1.1.1:80", "neither an IP address nor a name"),
        ("1.2.3:80", "neither an IP address nor a name"),
        ("a b:80", "must be an IP address or a DNS name"),
        ("*:80", "must be an IP address or a DNS name"),
        ("http//x:80", "must be an IP address or a DNS name"),
        ("x;ipc///tmp/x:80", "must be an IP address or a DNS name"),
        (f"{'x' * 254}:80", "1..253 characters"),
    ],
)
def test_a_bad_address_is_refused_with_the_reason(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_address(text)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=f"port {port}: must be in"):
        make_address("127.0.0.1", port)
