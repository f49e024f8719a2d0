"""Which web pages may use a server: by the rules, over HTTP, and tried by a page in a browser."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from common.errors import ConfigError
from common.frontend.apis import openai_api, sglang_api
from common.protocol.frontend import FlushCache
from decode_server.config import parse_args
from tests.frontend.browser import CHROMIUM, DESK, WHY_NOT, chromium, open_tab
from tests.frontend.frontend_rig import BASE_PARTS, Rig, run_with_rig, write_model
from tests.frontend.page_rig import serve_page

PARTS = (sglang_api.build_router, openai_api.build_router)
PROMPT = """'{"prompt": "abc"}'"""
# What a browser sends for any page without asking the server first: path and options of `fetch`.
ATTEMPTS = (
    ("/abort_request", "method: 'POST', body: JSON.stringify({abort_all: true})"),
    (
        "/v1/completions",
        f"method: 'POST', headers: {{'Content-Type': 'text/plain'}}, body: {PROMPT}",
    ),
    ("/v1/completions", f"method: 'POST', body: new Blob([{PROMPT}])"),
    ("/flush_cache", "method: 'POST'"),
    ("/flush_cache", "method: 'GET'"),
)
FOREIGN = {"Origin": "https://elsewhere.example"}


def status_of(tmp_path: Path, headers: dict[str, str], **changes: object) -> int:
    """Of a POST that changes the state of the server."""
    found: list[int] = []

    async def story(rig: Rig) -> None:
        found.append((await rig.http.post("/flush_cache", headers=headers)).status_code)
        flushes = [m for m in rig.scheduler.seen if isinstance(m, FlushCache)]
        assert len(flushes) == (found == [200]), "what was refused must not be done"

    run_with_rig(tmp_path, story, **changes)
    return found[0]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        (FOREIGN, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:3000"}, 403),
        ({"Origin": "http://[bad"}, 403),
        ({"Origin": "http://localhost"}, 200),
        ({"Origin": "http://LOCALHOST"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:3000"}, 403),
        # A proxy may have changed the Host: the browser itself says that the page is its own.
        ({"Sec-Fetch-Site": "same-origin", **FOREIGN}, 200),
        # No browser attaches a bearer key by itself.
        ({"Authorization": "Bearer sk-mine", **FOREIGN}, 200),
        ({"Authorization": "Basic dTpw", **FOREIGN}, 403),
    ],
)
def test_only_a_page_s_own_server_or_a_key_opens_it_to_a_page(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    assert status_of(tmp_path, headers) == status


@pytest.mark.parametrize(
    ("host", "listen", "allowed", "status"),
    [
        ("localhost:30001", "127.0.0.1", (), 200),
        ("baton.localhost", "127.0.0.1", (), 200),
        ("127.0.0.1:30001", "127.0.0.1", (), 200),
        ("[::1]:30001", "::1", (), 200),
        ("10.0.0.7:30001", "127.0.0.1", (), 200),
        ("rebound.example:30001", "127.0.0.1", (), 421),
        ("rebound.example", "localhost", (), 421),
        ("localhost.rebound.example", "127.0.0.1", (), 421),
        ("LLM.example", "127.0.0.1", ("llm.example",), 200),
        ("rebound.example", "0.0.0.0", (), 200),
        ("rebound.example", "0.0.0.0", ("llm.example",), 421),
    ],
)
def test_a_name_that_is_not_this_server_s_is_refused_where_it_can_be_known(
    tmp_path: Path, host: str, listen: str, allowed: tuple[str, ...], status: int
) -> None:
    found = status_of(tmp_path, {"Host": host}, host=listen, allowed_hosts=allowed)
    assert found == status


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/vnd.baton+JSON", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
    ],
)
def test_a_body_must_be_json_by_its_type(tmp_path: Path, kind: str, status: int) -> None:
    async def story(rig: Rig) -> None:
        reply = await rig.http.post(
            "/abort_request", content=b'{"rid": "a"}', headers={"Content-Type": kind}
        )
        assert reply.status_code == status
        assert status == 200 or "application/json" in reply.json()["error"]["message"]

    run_with_rig(tmp_path, story)


def test_nothing_changes_by_a_get(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for path in ("/flush_cache", "/abort_request", "/generate", "/v1/completions"):
            assert (await rig.http.get(path)).status_code == 405, path

    run_with_rig(tmp_path, story, parts=(*BASE_PARTS, *PARTS))


def test_an_allowed_origin_is_told_so_and_served(tmp_path: Path) -> None:
    chat, other = "https://chat.example", "https://other.example"
    asks = {"Access-Control-Request-Method": "POST"}

    async def story(rig: Rig) -> None:
        for origin, status in ((chat, 200), (other, 400)):
            asked = await rig.http.options("/flush_cache", headers={"Origin": origin, **asks})
            assert asked.status_code == status
        headers = {"Origin": chat, "Sec-Fetch-Site": "cross-site"}
        unkeyed = await rig.http.post("/flush_cache", headers=headers)
        assert unkeyed.status_code == 401  # what a page may not read, it can not show a user
        assert unkeyed.headers["access-control-allow-origin"] == chat
        headers["Authorization"] = "Bearer sk-1"
        assert (await rig.http.post("/flush_cache", headers=headers)).status_code == 200

    run_with_rig(tmp_path, story, allowed_origins=(chat,), api_keys=("sk-1",))


@pytest.mark.parametrize(
    ("flag", "value", "found"),
    [
        ("--allowed-hosts", "a.example, b.example", ("a.example", "b.example")),
        ("--allowed-origins", "*", ("*",)),
        ("--allowed-origins", '["https://a.example:8443"]', ("https://a.example:8443",)),
        ("--allowed-hosts", "http://a.example", None),
        ("--allowed-origins", "a.example", None),
        ("--allowed-origins", "https://a.example/chat", None),
    ],
)
def test_flags_take_lists_of_names(
    tmp_path: Path, flag: str, value: str, found: tuple[str, ...] | None
) -> None:
    argv = ["--model-path", str(write_model(tmp_path)), "--prefill", "none", flag, value]
    if found is None:
        with pytest.raises(ConfigError, match=f"{flag} .*must be"):
            parse_args(argv)
        return
    config = parse_args(argv)
    assert found in (config.allowed_hosts, config.allowed_origins)


@contextmanager
def other_site() -> Iterator[str]:
    """A page of another origin: an empty one, from a web server of its own."""

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<title>elsewhere</title>")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        # Another site than 127.0.0.1 to a browser, not only another port of it.
        yield f"http://localhost:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)
def test_a_page_from_elsewhere_changes_nothing_in_a_browser(tmp_path: Path) -> None:
    with chromium() as browser, other_site() as site, serve_page(tmp_path) as served:
        with open_tab(browser, site, DESK, "light") as tab:
            seen_count = len(served.scheduler.seen)
            url = json.dumps(served.url)
            for path, options in ATTEMPTS:
                attempt = f"fetch({url} + '{path}', {{mode: 'no-cors', {options}}})"
                # An opaque answer is all that a page may see; that it came is awaited.
                assert tab.evaluate(f"{attempt}.then(reply => reply.type)") == "opaque", attempt
            image = (
                "new Promise(done => { const image = new Image(); image.onerror = done;"
                f"image.src = {url} + '/flush_cache'; }}).then(() => 'refused')"
            )
            assert tab.evaluate(image) == "refused"
            kinds = {type(message).__name__ for message in served.scheduler.seen[seen_count:]}
            assert kinds <= {"GetState"}
        # The same from the server's own page is served.
        with open_tab(browser, f"{served.url}/", DESK, "light") as tab:
            own = tab.evaluate(
                "fetch('/flush_cache', {method: 'POST'}).then(reply => reply.status)"
            )
            assert own == 200
        assert httpx.get(f"{served.url}/health").status_code == 200
