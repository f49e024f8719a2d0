"""Where addresses of prefill servers come from: what names, files and operators say, and when."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from common.frontend.peers import sources
from common.frontend.peers.sources import FileReader, LookUpFailed, look_up, parse_file
from common.frontend.peers.wanted import STATE_AGE_MAX_S, WANTED_COUNT_MAX, WantedPeers
from common.prefill_entries import DnsName, PeerFile, fixed_addresses, read_entry
from tests.frontend.frontend_rig import Rig, run_with_rig

DNS, FILE = "dns:prefill:8998", "file:/etc/peers"
A, B, C = "10.0.0.1:8998", "10.0.0.2:8998", "10.0.0.3:8998"


# ---- entries -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("10.0.0.1:8998", "10.0.0.1:8998"),
        ("[::1]:08998", "[::1]:8998"),
        ("dns:8998", "dns:8998"),
        ("file:8998", "file:8998"),
        ("dns:prefill.ns.svc:8998", DnsName("prefill.ns.svc", 8998)),
        ("dns:prefill.:1", DnsName("prefill.", 1)),
        ("file:/etc/peers", PeerFile("/etc/peers")),
        ("file:peers", PeerFile("peers")),
    ],
)
def test_what_an_entry_means(text: str, meaning: object) -> None:
    assert read_entry(text) == meaning


@pytest.mark.parametrize(
    "text",
    ["", "a", "dns:", "dns:a", "dns:a:0", "dns:a:65536", "dns:a b:1", "dns::1", "file:", "a:0"],
)
def test_an_entry_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"host:port .*, dns:NAME:PORT or file:PATH"):
        read_entry(text)


def test_only_addresses_of_the_settings_are_fixed() -> None:
    assert fixed_addresses([A, DNS, FILE, B]) == [A, B]


# ---- what is wanted ------------------------------------------------------------------------------


def told(wanted: WantedPeers) -> dict[str, bool]:
    return {peer.address: peer.is_dialled for peer in wanted.message().peers}


def test_an_address_is_wanted_as_long_as_one_source_names_it() -> None:
    wanted = WantedPeers([A], [FILE])
    assert wanted.set_named(FILE, [A, B], 0.0, is_strict=True)
    assert not wanted.set_named(FILE, [B, A], 1.0, is_strict=True)
    assert wanted.sources_of(A) == ["flag", FILE]
    assert wanted.set_named(FILE, [], 2.0, is_strict=True)
    assert told(wanted) == {A: True}


def test_what_a_name_server_does_not_name_any_more_is_not_dialled_and_not_let_go() -> None:
    wanted = WantedPeers([], [DNS])
    wanted.set_named(DNS, [A, B], 0.0, is_strict=False)
    wanted.set_named(DNS, [B], 1.0, is_strict=False)
    assert told(wanted) == {B: True, A: False}
    assert wanted.lapsed_of(A) == DNS and A in wanted.allowed
    wanted.forget_lapsed({A, B}, 1.0 + 2 * STATE_AGE_MAX_S)
    assert A in told(wanted), "its connection stands"
    wanted.forget_lapsed({B}, 1.5)
    assert A in told(wanted), "that state may be of before"
    wanted.forget_lapsed({B}, 1.0 + 2 * STATE_AGE_MAX_S)
    assert told(wanted) == {B: True}
    wanted.set_named(DNS, [A], 20.0, is_strict=False)
    assert told(wanted) == {A: True, B: False}


def test_a_file_decides_where_a_name_server_would_not() -> None:
    wanted = WantedPeers([], [DNS, FILE])
    wanted.set_named(DNS, [A], 0.0, is_strict=False)
    wanted.set_named(FILE, [A], 0.0, is_strict=True)
    wanted.set_named(DNS, [], 1.0, is_strict=False)
    assert told(wanted) == {A: True}
    wanted.set_named(FILE, [], 2.0, is_strict=True)
    assert told(wanted) == {}


def test_what_an_operator_removes_stays_away_until_it_is_named_anew() -> None:
    wanted = WantedPeers([A], [DNS])
    wanted.set_named(DNS, [B], 0.0, is_strict=False)
    assert wanted.remove(A) and wanted.remove(B) and not wanted.remove(B) and not wanted.remove(C)
    assert told(wanted) == {} and wanted.removed == [A, B] and wanted.allowed == frozenset()
    wanted.set_named(DNS, [B, C], 1.0, is_strict=False)
    assert told(wanted) == {C: True}, "it is named as before"
    wanted.set_named(DNS, [C], 2.0, is_strict=False)
    assert told(wanted) == {C: True}, "what was removed does not live on"
    wanted.set_named(DNS, [B, C], 3.0, is_strict=False)
    assert told(wanted) == {B: True, C: True}
    assert wanted.add(A) and told(wanted) == {A: True, B: True, C: True}


def test_what_an_operator_adds_is_wanted_whoever_else_names_it() -> None:
    wanted = WantedPeers([], [DNS])
    assert wanted.add(A) and wanted.add(A)
    wanted.set_named(DNS, [A], 0.0, is_strict=False)
    wanted.set_named(DNS, [], 1.0, is_strict=False)
    assert told(wanted) == {A: True}
    assert wanted.remove(A) and told(wanted) == {}
    wanted.set_named(DNS, [A], 2.0, is_strict=False)
    wanted.set_named(DNS, [], 3.0, is_strict=False)
    assert wanted.remove(A) and told(wanted) == {}, "a lapsed one can be removed as well"


def test_there_is_a_bound_on_what_is_wanted() -> None:
    many = [f"10.0.{index // 250}.{index % 250}:1" for index in range(WANTED_COUNT_MAX + 3)]
    wanted = WantedPeers([A], [FILE])
    wanted.set_named(FILE, many, 0.0, is_strict=True)
    assert len(wanted.addresses) == WANTED_COUNT_MAX and wanted.dropped_count == 4
    assert not wanted.add(B) and wanted.add(A)


# ---- files and names -----------------------------------------------------------------------------


def test_a_file_has_an_address_in_a_line() -> None:
    text = b"# ours\n10.0.0.1:8998  # the first\n\n [::1]:8999\nprefill-2:8998\r\n10.0.0.1:8998"
    assert parse_file(text) == ["10.0.0.1:8998", "[::1]:8999", "prefill-2:8998"]
    assert parse_file(b"") == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"10.0.0.1:8998\n10.0.0.2\n", "line 2: address '10.0.0.2': must be host:port"),
        (b"a:1 b:2", "line 1: .* port '2'|line 1"),
        (b"10.0.0.1:0", "line 1: .* 1..65535"),
        (b"\xff\xfe", "must be ASCII text"),
        (b"#" * (sources.FILE_NBYTES_MAX + 1), "has more than 1048576 bytes"),
    ],
)
def test_a_file_with_a_line_that_is_no_address_says_nothing(content: bytes, words: str) -> None:
    with pytest.raises(LookUpFailed, match=words):
        parse_file(content)


def test_a_change_counts_once_it_was_read_twice(tmp_path: Path) -> None:
    path = tmp_path / "peers"
    reader = FileReader(str(path))
    with pytest.raises(LookUpFailed, match="can't be read: No such file"):
        reader.read()
    path.write_text(f"{A}\n")
    assert reader.read() == [A]
    path.write_text(f"{A}\n{B[:6]}")  # written in part
    assert reader.read() is None
    path.write_text(f"{A}\n{B}\n")
    assert reader.read() is None
    assert reader.read() == [A, B] == reader.read()


def test_a_file_that_is_replaced_by_a_link_is_read_anew(tmp_path: Path) -> None:
    """As a mounted ConfigMap is: `..data` is renamed over, and the file is a link through it."""
    for name, address in (("old", A), ("new", B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "peers").write_text(address)
    (tmp_path / "..data").symlink_to("old")
    (tmp_path / "peers").symlink_to("..data/peers")
    reader = FileReader(str(tmp_path / "peers"))
    assert reader.read() == [A]
    (tmp_path / "..next").symlink_to("new")
    os.rename(tmp_path / "..next", tmp_path / "..data")
    assert (reader.read(), reader.read()) == (None, [B])


def test_a_name_of_this_machine_is_looked_up() -> None:
    assert "127.0.0.1:8998" in look_up(DnsName("localhost", 8998))
    assert look_up(DnsName("10.1.2.3", 1)) == ["10.1.2.3:1"]


def answer(*found: str, error: int = 0) -> Callable[..., object]:
    def getaddrinfo(name: str, port: int, type: int) -> list[tuple[object, ...]]:
        if error:
            raise socket.gaierror(error, "as it is")
        return [(0, type, 6, "", (host, port)) for host in found]

    return getaddrinfo


def test_addresses_of_both_kinds_and_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    name = DnsName("prefill", 8998)
    monkeypatch.setattr(
        socket, "getaddrinfo", answer("10.0.0.2", "fd00::1", "10.0.0.1", "10.0.0.2")
    )
    assert look_up(name) == ["10.0.0.1:8998", "10.0.0.2:8998", "[fd00::1]:8998"]
    monkeypatch.setattr(socket, "getaddrinfo", answer(error=socket.EAI_NONAME))
    assert look_up(name) == [], "that is an answer"
    monkeypatch.setattr(socket, "getaddrinfo", answer(error=socket.EAI_AGAIN))
    with pytest.raises(LookUpFailed, match="can't be looked up: as it is"):
        look_up(name)


def test_a_name_that_no_name_server_takes_is_a_failure_and_no_crash() -> None:
    with pytest.raises(LookUpFailed):
        look_up(DnsName("a" * 70 + ".example", 1))


# ---- what the scheduler is told ------------------------------------------------------------------


def run(directory: Path, story: Callable[[Rig], Awaitable[None]], *prefill: str) -> None:
    run_with_rig(directory, story, prefill=prefill)


def test_a_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "peers"

    async def story(rig: Rig) -> None:
        await rig.until(lambda s: s.wanted == {C: True})
        assert rig.context.peers.problems == {
            f"file:{path}": "can't be read: No such file or directory"
        }
        path.write_text(f"{A}\n{B}\n")
        await rig.until(lambda s: s.wanted == {C: True, A: True, B: True})
        assert rig.context.peers.problems == {}
        path.write_text("nonsense\n")
        while not rig.context.peers.problems:
            await asyncio.sleep(0)
        assert rig.scheduler.wanted == {C: True, A: True, B: True}
        path.write_text(f"{B}\n")
        await rig.until(lambda s: s.wanted == {C: True, B: True})

    run(tmp_path, story, C, f"file:{path}")


def test_a_name_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "DNS_INTERVAL_S", 0.01)
    answers = {"now": answer("10.0.0.1")}
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda name, *args, **more: (
            answers["now"](name, *args, **more) if name == "prefill" else real(name, *args, **more)
        ),
    )

    async def story(rig: Rig) -> None:
        await rig.until(lambda s: s.wanted == {A: True})
        answers["now"] = answer("10.0.0.2", "10.0.0.1")
        await rig.until(lambda s: s.wanted == {A: True, B: True})
        answers["now"] = answer(error=socket.EAI_AGAIN)
        while not rig.context.peers.problems:
            await asyncio.sleep(0)
        assert rig.scheduler.wanted == {A: True, B: True}
        answers["now"] = answer("10.0.0.2")
        await rig.until(lambda s: s.wanted == {A: False, B: True})
        answers["now"] = answer(error=socket.EAI_NONAME)
        await rig.until(lambda s: s.wanted == {A: False, B: False})
        assert rig.context.peers.problems == {DNS: "names no prefill server at the moment"}

    with caplog.at_level(logging.WARNING):
        run(tmp_path, story, DNS)
    lines = [record.message for record in caplog.records if record.message.startswith("dns:")]
    assert lines == [
        f"{DNS}: can't be looked up: as it is",
        f"{DNS}: names no prefill server at the moment",
    ]


def test_a_scheduler_that_starts_anew_is_told_again(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await rig.until(lambda s: s.wanted == {A: True})
        rig.scheduler.seen.clear()
        rig.scheduler.send(rig.scheduler.info)
        await rig.until(lambda s: s.wanted == {A: True})

    run(tmp_path, story, A)


def test_a_server_that_is_alone_tells_nothing(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        await rig.context.peers.run()
        assert rig.scheduler.wanted == {}

    run(tmp_path, story)
