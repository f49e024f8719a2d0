"""`baton-admin drain`, `switch` and `peers`: what is asked, what is said, and exit codes."""

from __future__ import annotations

import json

import pytest

from common.admin import commands
from common.admin.__main__ import main
from tests.admin.scripted_servers import ScriptedServer, serving

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def quick_and_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATON_API_KEY", "BATON_ADMIN_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(commands, "POLL_INTERVAL_S", 0.01)


def test_drain_says_how_many_requests_are_open_and_names_where_they_may_go(capsys: Capture) -> None:
    with serving("a") as (a,):
        a.replies["/drain"] = (200, {"success": True, "open_requests": 1})
        assert main(["drain", a.url]) == 0
        assert capsys.readouterr().out == f"{a.url} drains: 1 open request\n"
        assert main(["drain", a.url, "--to", "b:30001,https://c"]) == 0
        to = {"to": ["http://b:30001", "https://c:443"]}
        assert a.changes == [("POST", "/drain", None), ("POST", "/drain", to)]


def test_a_refusal_is_shown_in_the_servers_words(capsys: Capture) -> None:
    with serving("a") as (a,):
        a.replies["/drain"] = (400, {"error": {"message": "to: the server drains \x1balready"}})
        assert main(["drain", a.url, "--to", "b:1"]) == 1
        expected = f"baton-admin: {a.url}: to: the server drains ?already\n"
        assert capsys.readouterr().err == expected
        a.replies["/drain"] = (500, "oh")
        assert main(["drain", a.url]) == 1
        assert capsys.readouterr().err.endswith("answered 500 to POST /drain\n")
        a.replies["/drain"] = (200, {"success": True})
        assert main(["drain", a.url]) == 1, "a server of something else"
        assert "the answer is not understood" in capsys.readouterr().err


def test_an_unreachable_server_is_one_line(capsys: Capture) -> None:
    for argv in (["drain", "127.0.0.1:1"], ["switch", "127.0.0.1:1", "prefill"], ["peers", "a..b"]):
        assert main(argv) == 1
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1 and "can't be reached" in shown.err


class Switching(ScriptedServer):
    """Has its new role when it was looked at a few times, and does not answer in between."""

    def document(self, host: str) -> dict[str, object]:
        self.raw = b"\r\n" if self.reads in (2, 3) else b""
        if self.reads >= 4:
            self.said |= {"role": "prefill", "status": "no decode server is known"}
        return self.said


def test_switch_waits_for_the_server_in_its_role(capsys: Capture) -> None:
    with serving("a", kind=Switching) as (a,):
        a.replies["/switch_role"] = (200, {"is_done": False, "open_requests": 2})
        assert main(["switch", a.url, "prefill"]) == 0
        assert a.changes == [("POST", "/switch_role", {"role": "prefill"})] and a.reads == 4
        last = capsys.readouterr().out.splitlines()[-1]
        now = f"{a.url} is a prefill server now"
        assert last == f"{now}, not ready: no decode server is known"


def test_switch_ends_when_it_waited_long_enough(capsys: Capture) -> None:
    with serving("a") as (a,):
        a.replies["/switch_role"] = (200, {"is_done": False, "open_requests": 0})
        assert main(["switch", a.url, "prefill", "--wait", "0"]) == 0 and a.reads == 0
        assert main(["switch", a.url, "prefill", "--wait", "0.1"]) == 1
        seen = "is not a prefill server after 0.1 s: it is a decode server, ready"
        assert seen in capsys.readouterr().err
        a.said |= {"role": "prefill", "standby": True}
        assert main(["switch", a.url, "prefill", "--wait", "0.1"]) == 1, "on standby still"
        a.replies["/switch_role"] = (200, {"is_done": True, "open_requests": 0})
        assert main(["switch", a.url, "prefill"]) == 0
        assert capsys.readouterr().out.endswith("is a prefill server already\n")


def test_peers_are_shown_added_and_removed(capsys: Capture) -> None:
    with serving("a") as (a,):
        a.said["peers"] = [
            {"address": "p:8998", "state": "connected", "sources": ["flag"], "is_lapsed": True}
        ]
        assert main(["peers", a.url]) == 0
        shown = [line.split() for line in capsys.readouterr().out.splitlines()]
        lapsed = "its name server names it no more"
        assert shown == [
            ["ADDRESS", "STATE", "SOURCES", "DETAIL"],
            ["p:8998", "connected", "flag", *lapsed.split()],
        ]
        assert main(["peers", a.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["peers"][0]["address"] == "p:8998"
        a.replies["/peers"] = (200, {"sources": ["admin"]})
        assert main(["peers", a.url, "--add", "[::1]:9"]) == 0
        assert main(["peers", a.url, "--remove", "[::1]:9"]) == 0
        assert a.changes == [
            ("POST", "/peers", {"address": "[::1]:9"}),
            ("DELETE", "/peers?address=%5B%3A%3A1%5D%3A9", None),
        ]
        a.replies["/peers"] = (404, {"error": {"message": "address 'x:1': is none"}})
        assert main(["peers", a.url, "--remove", "x:1"]) == 1


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "COMMAND"),
        (["fleet"], "URL"),
        (["flee", "a:1"], "invalid choice"),
        (["fleet", "ftp://a"], "'ftp://a': must be a URL such as"),
        (["fleet", "a:1", "--watch", "0"], "'0': must be a number in 0.1..86400"),
        (["fleet", "a:1", "--timeout", "nan"], "'nan': must be a number"),
        (["fleet", "a:1", "--jso"], "unknown argument '--jso'"),
        (["drain", "a:1", "--to", "b:1,"], "'b:1,': must be a URL"),
        (["switch", "a:1", "router"], "invalid choice: 'router'"),
        (["switch", "a:1"], "required: role"),
        (["peers", "a:1", "--add", "b"], "'b': must be host:port"),
        (["peers", "a:1", "--add", "b:1", "--remove", "b:1"], "not allowed with"),
        (["drain", "a:1", "--api-key", "se cret"], "(not shown): must be 1..512 printable"),
        (["drain", "a:1", "--apikey=secret"], "unknown argument '--apikey'"),
        (["drain", "a:1", "--api-key-file", "/nowhere"], "/nowhere: can't be read"),
    ],
)
def test_bad_arguments_are_named_in_one_line(
    argv: list[str], problem: str, capsys: Capture
) -> None:
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and problem in shown.err
    assert "secret" not in shown.err and "se cret" not in shown.err


def test_help_names_the_commands(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"    {name} " in shown for name in ("fleet", "drain", "switch", "peers"))
