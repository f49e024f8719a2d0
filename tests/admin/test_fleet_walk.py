"""`baton-admin fleet` finds every server from any of them, and no server can do it harm."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from subprocess import PIPE

import pytest

from common.admin import commands, walk
from common.admin.__main__ import main
from common.admin.calls import ANSWER_NBYTES_MAX, Caller
from common.config_keys import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE
from common.failures import STOPPING
from common.frontend.http.client import parse_url
from tests.admin.scripted_servers import ScriptedServer, serving, silent_listener

KEY, ADMIN_KEY = "the-key", "the-admin-key"
Row = dict[str, object]


@dataclass
class Shown:
    """What one call of the program came to."""

    code: int
    out: str
    err: str

    @property
    def servers(self) -> list[Row]:
        return json.loads(self.out)["servers"]

    @property
    def links(self) -> list[Row]:
        return json.loads(self.out)["links"]

    def states(self) -> dict[str, str]:
        """By URL."""
        return {str(row["url"]): str(row["state"]) for row in self.servers}


Run = Callable[..., Shown]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in (API_KEY_VARIABLE, ADMIN_API_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)

    def run(*argv: str) -> Shown:
        code = main(argv)
        return Shown(code, *capsys.readouterr())

    return run


def fleet(run: Run, *argv: str) -> Shown:
    return run("fleet", "--json", *argv)


# ---- who is found --------------------------------------------------------------------------------


def test_servers_that_name_each_other_in_a_loop_are_all_found_and_asked_once(run: Run) -> None:
    with serving("a", "b", "c") as servers:
        for one, other in zip(servers, [*servers[1:], servers[0]], strict=True):
            one.knows(other)
        for count, start in enumerate(servers, 1):
            shown = fleet(run, start.url)
            assert shown.code == 0 and shown.err == ""
            assert {row["name"] for row in shown.servers} == {"a", "b", "c"}
            assert shown.servers[0]["name"] == start.name
            links = {(row["from"], row["to"]) for row in shown.links}
            assert links == {("a", "b"), ("b", "c"), ("c", "a")}
            assert [server.reads for server in servers] == [count] * 3


def test_a_server_with_two_addresses_is_shown_once(run: Run) -> None:
    with serving("a", "b") as (a, b):
        a.knows(b)
        b.knows(a)
        other_url = f"http://127.0.0.2:{b.port}"
        shown = fleet(run, a.url, other_url)
        assert shown.code == 0
        assert [(row["name"], row["url"]) for row in shown.servers] == [
            ("a", a.url),
            ("b", other_url),
        ]
        assert fleet(run, b.url, other_url).servers[0]["also_urls"] == [other_url]


def test_an_address_that_is_of_no_use_here_costs_nothing_if_its_server_has_answered(
    run: Run,
) -> None:
    with serving("a", "b") as (a, b):
        a.knows(b)
        b.knows(a)
        b.said["peers"][0]["http_address"] = "127.0.0.1:1"  # type: ignore[index]
        shown = fleet(run, b.url, a.url)
        assert shown.states() == {a.url: "ready", b.url: "ready"}


def test_a_fleet_that_never_ends_is_cut_off(run: Run) -> None:
    class Endless(ScriptedServer):
        """Names the next address of the loopback network."""

        def document(self, host: str) -> Row:
            last = int(host.partition(":")[0].rpartition(".")[2])
            address = f"127.0.0.{last + 1}:{self.port}"
            return {**self.said, "incarnation": host, "peers": [{"http_address": address}]}

    with serving("endless", kind=Endless) as (server,):
        shown = fleet(run, server.url)
        assert shown.code == 1 and json.loads(shown.out)["is_complete"] is False
        assert len(shown.servers) == server.reads == walk.ROUND_COUNT_MAX


def test_a_server_that_makes_up_many_peers_is_cut_off(run: Run) -> None:
    with serving("liar") as (server,):
        count = walk.SERVER_COUNT_MAX
        server.said["peers"] = [{"http_address": f"127.0.0.1:{port}"} for port in range(1, count)]
        server.said["peers"] += [{"http_address": f"127.0.0.2:{port}"} for port in range(1, 3)]  # type: ignore[operator]
        shown = run("fleet", server.url)
        assert shown.code == 1 and "More servers were named than are asked." in shown.out
        assert shown.out.count("unreachable") == count - 1


# ---- servers that do not answer as they should ---------------------------------------------------


def test_a_server_that_hangs_costs_a_line(run: Run) -> None:
    with serving("a") as (a,), silent_listener() as silent:
        a.said["peers"] = [{"http_address": silent.removeprefix("http://"), "state": "connected"}]
        shown = fleet(run, a.url, "--timeout", "0.2")
        assert shown.code == 0, "it was only found"
        assert shown.states() == {a.url: "ready", silent: "unreachable"}
        assert shown.servers[1]["detail"] in ("no answer within 0.2 s", "nothing came for 0.2 s")
        assert fleet(run, a.url, silent, "--timeout", "0.2").code == 1, "it was asked for"


def test_a_server_that_is_gone_is_called_as_its_peers_call_it(run: Run) -> None:
    with serving("a") as (a,):
        a.said["peers"] = [{"http_address": "127.0.0.1:1", "name": "gone", "state": "lost"}]
        row = fleet(run, a.url).servers[1]
        assert (row["name"], row["state"]) == ("gone", "unreachable")
        assert str(row["detail"]).startswith("can't be reached: ")


HEAD = b"HTTP/1.1 200 OK\r\n"


def sent(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


GARBAGE = {
    "no HTTP": b"\x00\xff SSH-2.0\r\n\r\n",
    "nothing": b"\r\n",
    "no JSON": sent(b"abc"),
    "no UTF-8": sent(b'"\xff\xfe"'),
    "a list": sent(b"[]"),
    "other types": sent(b'{"version": 1, "role": "decode", "status": 1}'),
    "a page": sent(b"<html></html>"),
    "half of it": HEAD + b'Content-Length: 1000\r\n\r\n{"version"',
    "deep": sent(b"[" * 20000),
    "endless head": HEAD + b"X: y\r\n" * 100_000,
    "endless body": HEAD + b"\r\n" + b" " * (ANSWER_NBYTES_MAX + 1),
    "huge numbers": sent(
        b'{"version": "", "role": "decode", "status": "", "tp_size": 1%b}' % (b"0" * 5000)
    ),
    "an error": b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_costs_a_line(run: Run, what: str) -> None:
    with serving("a", "b") as (a, b):
        a.knows(b)
        b.raw = GARBAGE[what]
        shown = fleet(run, a.url)
        assert shown.code == 0 and shown.err == ""
        states = shown.states()
        assert states[a.url] == "ready"
        assert states.get(b.url) in ("unreachable", "unknown"), states
        assert run("fleet", b.url).code == 1


@pytest.mark.parametrize(
    "address",
    ["no address", "http://", "[::1", "a..b:1", f"{'x' * 64}.test:1", "host:99999", "user@host:1"],
)
def test_an_impossible_address_of_a_peer_costs_a_line_at_most(run: Run, address: str) -> None:
    with serving("a") as (a,):
        a.said["peers"] = [{"http_address": address, "name": "odd", "state": "connected"}]
        shown = fleet(run, a.url)
        assert shown.code == 0 and shown.states()[a.url] == "ready"
        assert {row["state"] for row in shown.servers[1:]} <= {"unreachable"}
        assert [row["to"] for row in shown.links] == ["odd"]


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_what_servers_say_can_not_move_the_cursor(run: Run, flags: tuple[str, ...]) -> None:
    with serving("a") as (a,):
        evil = "\x1b[2Jready\r\n\x9b31m‮"
        a.said |= {"name": evil, "status": evil, "version": evil, "role": evil}
        a.said["peers"] = [{"name": evil, "state": evil, "transports": [evil], "detail": evil}]
        shown = run("fleet", a.url, *flags)
        assert shown.code == 0
        assert all(char.isprintable() or char == "\n" for char in shown.out)
        assert len(shown.out.splitlines()) == 5 or flags


def test_a_clock_that_jumped_is_shown_as_no_time_at_all(run: Run) -> None:
    with serving("a", "b") as (a, b):
        a.said["uptime_s"], b.said["uptime_s"] = -5.0, 1e300
        out = run("fleet", a.url, b.url).out
        assert " 0m0s\n" in out and " 11574d1h\n" in out


# ---- what is shown -------------------------------------------------------------------------------


def test_the_tables_say_how_servers_and_links_are(run: Run) -> None:
    with serving("front", "p") as (front, p):
        front.knows(p)
        front.said["peers"][0]["transfer_mode"] = ["staged (0.02 us per put)", "direct"]  # type: ignore[index]
        front.said["prefix_cache"] = {
            "token_count": 320,
            "host_token_count": 9,
            "host_token_max": 99,
        }
        p.said |= {"role": "prefill", "disaggregation_mode": "prefill", "status": STOPPING}
        out = run("fleet", front.url).out
        lines = [" ".join(line.split()) for line in out.splitlines()]
        assert lines[0] == (
            "NAME URL ROLE STATE VERSION PROTOCOL RUN WAIT POOL TPxPP PAGE PREFIXES HOST TIER "
            "UPTIME"
        )
        assert lines[1] == f"front {front.url} decode ready 0.1.0 7 4 2 40% 2x1 16 320 9/99 2h5m"
        assert lines[2].startswith(f"p {p.url} prefill draining ")
        assert lines[4] == "FROM TO STATE PROTOCOL TRANSPORTS MODE IN FLIGHT BREAKER"
        assert lines[5] == "front p connected 7 shm staged,direct 1 closed"


@pytest.mark.parametrize(
    ("said", "role", "state"),
    [
        ({}, "decode", "ready"),
        ({"disaggregation_mode": "null"}, "unified", "ready"),
        ({"standby": True, "status": "on standby"}, "standby", "not ready"),
        ({"status": STOPPING}, "decode", "draining"),
    ],
)
def test_roles_and_states_have_words(run: Run, said: Row, role: str, state: str) -> None:
    with serving("a") as (a,):
        a.said |= said
        (row,) = fleet(run, a.url).servers
        assert (row["role"], row["state"]) == (role, state)


def test_a_release_that_says_less_has_gaps(run: Run) -> None:
    with serving("a", "b") as (a, b):
        a.said = {"version": "0.0.1", "role": "decode", "status": "ready"}
        out = run("fleet", a.url, b.url).out
        assert out.splitlines()[1].split()[:9] == (
            f"{a.address} {a.url} decode ready 0.0.1 - - - 0x0".split()
        )


# ---- keys ----------------------------------------------------------------------------------------


def test_a_server_that_wants_a_key_says_so_in_its_line(run: Run) -> None:
    with serving("a", "b") as (a, b):
        a.knows(b)
        b.key = KEY
        rows = fleet(run, a.url).servers
        assert (rows[1]["state"], rows[1]["detail"]) == ("unknown", "wants a key")
        rows = fleet(run, a.url, "--api-key", "another").servers
        assert rows[1]["detail"] == "does not take the key that was shown"
        assert fleet(run, a.url, "--api-key", KEY).states()[b.url] == "ready"


def test_the_admin_key_is_shown_to_nobody_that_was_not_named(run: Run) -> None:
    with serving("a", "b") as (a, b):
        a.knows(b)
        for flags, to_named, to_found in (
            ((), "", ""),
            (("--api-key", KEY, "--admin-api-key", ADMIN_KEY), KEY, KEY),
            (("--admin-api-key", ADMIN_KEY), ADMIN_KEY, ""),
        ):
            fleet(run, a.url, *flags)
            assert (a.shown[-1][1], b.shown[-1][1]) == (to_named, to_found)


def test_a_key_is_not_sent_in_the_clear_to_what_a_server_behind_tls_names() -> None:
    front, found = parse_url("https://front.example"), parse_url("http://10.0.0.1:30000")
    assert Caller([front], KEY, "", 1.0).reading_key(found) == ""
    assert Caller([front, parse_url("http://b:1")], KEY, "", 1.0).reading_key(found) == KEY
    assert Caller([front], KEY, "", 1.0).reading_key(parse_url("https://b.example")) == KEY


def test_no_key_is_printed(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    monkeypatch.setenv(ADMIN_API_KEY_VARIABLE, ADMIN_KEY)
    with serving("a") as (a,):
        a.key, a.admin_key = "another", "yet-another"
        a.replies["/drain"] = (400, {"error": {"message": "no"}})
        for argv in (
            ("fleet", a.url),
            ("drain", a.url),
            ("peers", a.url),
            ("fleet", a.url, "--json"),
        ):
            shown = run(*argv, "--api-key-file", str(file))
            assert shown.code == 1
            assert KEY not in shown.out + shown.err and ADMIN_KEY not in shown.out + shown.err
        assert {key for _, key in a.shown} == {KEY, ADMIN_KEY}
        a.admin_key = ADMIN_KEY
        a.replies["/drain"] = (400, {"error": {"message": f"{ADMIN_KEY} may not"}})
        shown = run("drain", a.url)
        assert shown.code == 1 and shown.err == f"baton-admin: {a.url}: KEY may not\n"


# ---- --watch -------------------------------------------------------------------------------------


def test_a_watch_goes_on_showing_a_server_that_nobody_names_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[list[tuple[object, object]]] = []

    async def story(a: ScriptedServer, b: ScriptedServer) -> None:
        enough = asyncio.Event()

        def say(text: str) -> None:
            rows = json.loads(text)["servers"]
            looks.append([(row["name"], row["state"]) for row in rows])
            if len(looks) == 1:
                a.said["peers"] = []
                b.raw = b"\r\n"
            if len(looks) == 3:
                enough.set()

        monkeypatch.setattr(commands, "say", say)
        caller = Caller([parse_url(a.url)], "", "", 5.0)
        watch = asyncio.create_task(commands.show_fleet(caller, is_json=True, watch_s=0.01))
        await enough.wait()
        watch.cancel()

    with serving("a", "b") as (a, b):
        a.knows(b)
        asyncio.run(story(a, b))
        assert looks[0] == [("a", "ready"), ("b", "ready")]
        assert looks[2] == [("a", "ready"), (b.address, "unreachable")]


@pytest.mark.slow
def test_a_watch_ends_in_peace_by_the_keyboard_and_with_its_reader() -> None:
    with serving("a") as (a,):
        command = [sys.executable, "-m", "common.admin", "fleet", a.url, "--watch", "0.1"]
        for end, code in (("keyboard", 0), ("reader", 1)):
            # A shell's background job hands on that the keyboard is ignored.
            heard = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
            with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, preexec_fn=heard) as watch:
                assert watch.stdout is not None and watch.stderr is not None
                assert watch.stdout.readline().startswith(b"NAME")
                if end == "keyboard":
                    watch.send_signal(signal.SIGINT)
                else:
                    watch.stdout.close()
                assert watch.stderr.read() == b"" and watch.wait() == code
