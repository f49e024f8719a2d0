"""The page in a browser, before a scripted scheduler: how it looks, what it says, what it asks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from common.config import Role
from common.protocol.frontend import (
    Failed,
    PageGroupState,
    PeerState,
    PrefixCacheState,
    Submit,
    Tokens,
)
from common.request import CachedTokens, TransferTrace
from tests.frontend.browser import (
    CHROMIUM,
    DESK,
    PHONE,
    WHY_NOT,
    Browser,
    Tab,
    chromium,
    open_tab,
)
from tests.frontend.page_rig import Served, serve_page
from tests.frontend.scripted_scheduler import (
    PAGES,
    PEER,
    Answer,
    ScriptedScheduler,
    ToldFrontend,
    trace_of,
)
from tests.frontend.test_timelines import named

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT),
]

KEY = "sk-of-the-page"
STATES = PageGroupState("slot", False, 1, 0, 9_000_000, 64, 20, 40, 4, 4)

# Every text that is seen, with the contrast to what lies behind it where that is below 4.5.
FAINT_TEXTS = """
(() => {
  const shine = color => {
    const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map(Number).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = node => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (!/rgba\\(.*, 0\\)/.test(color)) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const contrast = (one, other) => {
    const [low, high] = [shine(one), shine(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || !parent.checkVisibility()) continue;
    const style = getComputedStyle(parent);
    const isDrawn = parent instanceof SVGElement;
    const box = isDrawn ? parent.closest("svg").querySelector(".box") : null;
    const ground = isDrawn ? getComputedStyle(box).fill : behind(parent);
    const value = contrast(isDrawn ? style.fill : style.color, ground);
    seen += 1;
    if (value < 4.5) found.push([node.data.trim(), value]);
  }
  const hint = getComputedStyle(document.getElementById("prompt"), "::placeholder").color;
  if (contrast(hint, behind(document.getElementById("prompt"))) < 4.5) found.push("placeholder");
  return { seen, found };
})()
"""
NOBODY = "no prefill server could be reached"
# What happens when one comes back to the tab, until the server has answered.
LOOK_AGAIN = "document.dispatchEvent(new Event('visibilitychange')), fetch('/state').then(() => 0)"
# What can be reached by keyboard has a name that is read out.
NAMELESS = """
[...document.querySelectorAll("button, input, textarea, a, [role=img], [role=region]")]
  .filter(node => node.checkVisibility())
  .filter(node => !(node.getAttribute("aria-label") || node.labels?.length
    || node.getAttribute("aria-labelledby") || node.textContent.trim()))
  .map(node => node.outerHTML)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_page(tmp_path_factory.mktemp("page"), in_trouble) as served:
        yield served


def in_trouble(scheduler: ScriptedScheduler) -> None:
    """Peers of every health and several layouts, two page groups, pages in every state."""
    scheduler.answer = named
    pairs = [(source, target) for source in range(4) for target in range(2)]
    scheduler.peers = [
        msgspec.structs.replace(
            PEER, tp_size=4, page_size=64, rank_pairs=pairs, in_flight_count=2, breaker="closed"
        ),
        PeerState("10.1.22.33:8998", "def", "connected", "no answer in 2 s", ["tcp"], 1, 2, 16,
                  breaker="open", is_self_test_failing=True, name="blue (10.1.22.33:8998)",
                  http_address="blue.example:30000"),
        PeerState("prefill-7.some.long.name.example:8998", "ghi", "connecting",
                  "silent for 0.8 s"),
        PeerState("[::1]:9", "", "refused", "layout: 32 layers here, 24 there"),
    ]  # fmt: skip
    scheduler.page_groups = [PAGES, STATES]


def wait_text(tab: Tab, selector: str, text: str) -> None:
    tab.wait(f"{text!r} in {selector}", lambda tab: text in tab.text(selector))


def generate(tab: Tab, prompt: str) -> None:
    tab.wait("the prompt box", lambda tab: tab.text("#go") != "")
    tab.evaluate("document.getElementById('prompt').focus()")
    tab.type(prompt)
    tab.press("Enter", control=True)


def test_everything_fits_and_can_be_read(browser: Browser, served: Served) -> None:
    with open_tab(browser, served.url) as tab:
        wait_text(tab, "#ready", "ready")
        generate(tab, "abc")
        wait_text(tab, "#own", "decode")
        wait_text(tab, "#requests", "out")
        tab.click("#requests summary")
        for scheme, ground in (("light", "rgb(244, 246, 248)"), ("dark", "rgb(14, 18, 23)")):
            for size in (DESK, PHONE):
                tab.look(size, scheme)
                assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == ground
                checked = tab.evaluate(FAINT_TEXTS)
                assert isinstance(checked, dict)
                assert checked["found"] == [] and int(checked["seen"]) > 80
                fits = "[document.documentElement.scrollWidth <= innerWidth, innerWidth]"
                assert tab.evaluate(fits) == [True, size[0]]
                assert tab.evaluate(NAMELESS) == []
        assert tab.complaints() == []


def test_peers_are_drawn_and_told_of(browser: Browser, served: Served) -> None:
    with open_tab(browser, served.url) as tab:
        wait_text(tab, "#ready", "ready")
        count = "document.querySelectorAll('#picture {}').length"
        assert tab.evaluate(count.format(".rank")) == 4 + 2 + 1, "ranks of known layouts, and ours"
        assert tab.evaluate(count.format(".link.moving")) == 8, "one for each pair of ranks"
        assert tab.evaluate(count.format(".link.warn")) == 1
        assert tab.evaluate(count.format(".link.bad")) == 2
        troubles = tab.text("#troubles")
        assert "blue (10.1.22.33:8998): connected, left alone (breaker open)" in troubles
        assert "example:8998: not connected: silent for 0.8 s" in troubles
        assert "[::1]:9: refused: layout: 32 layers here, 24 there" in troubles
        assert "2 transfers under way" in str(
            tab.evaluate("document.querySelector('#picture svg').getAttribute('aria-label')")
        )
        assert "50 in use · 20 prefix cache · 6 in quarantine · 180 free" in tab.text("#pages")
        assert "4 in quarantine" in tab.text("#pages .group:nth-child(2)")


def test_a_prompt_shows_its_tokens_and_its_own_timeline(browser: Browser, served: Served) -> None:
    with open_tab(browser, served.url) as tab:
        tab.evaluate("document.getElementById('count').value = '7'")
        generate(tab, "abc")
        wait_text(tab, "#own-facts", "transferred")
        assert tab.text("#answer") != ""
        assert tab.text("#figures").startswith("7 tokens, the first after")
        # The scripted stages of 1, 2, 4, 8, 16 ms and 6 steps of 10 ms.
        rows = tab.text("#own").split("\n")
        assert rows == [
            "wait for pages", "1.0 ms", "queue", "2.0 ms", "prefill", "4.0 ms",
            "transfer", "8.0 ms", "first token", "16.0 ms", "decode", "60.0 ms",
        ]  # fmt: skip
        assert tab.text("#own-facts").startswith(
            "10.0 MB transferred by 127.0.0.1:8998, 500 kB of it"
        )
        wait_text(tab, "#requests", "7 out")


def test_a_prompt_can_be_stopped_and_a_failure_is_told_in_words(
    browser: Browser, served: Served
) -> None:
    with open_tab(browser, served.url) as tab:
        served.scheduler.holds = True
        generate(tab, "abc")
        tab.wait("a request", lambda tab: len(served.scheduler.held) == 1)
        tab.press("Escape")
        wait_text(tab, "#figures", "Stopped.")
        served.scheduler.wait_for(lambda scheduler: scheduler.held == {})
        served.scheduler.holds = False

        served.scheduler.answer = fail
        tab.click("#go")
        wait_text(tab, "#figures", "Refused: no prefill server could be reached")
        served.scheduler.answer = named
        assert tab.evaluate("document.getElementById('go').disabled") is False


def test_failures_are_found_and_drawn_as_what_they_are(browser: Browser, served: Served) -> None:
    with open_tab(browser, served.url) as tab:
        served.scheduler.answer = fail_traced
        generate(tab, "abc")
        wait_text(tab, "#figures", "Refused: no prefill server could be reached")
        served.scheduler.answer = named
        served.post()
        wait_text(tab, "#requests", "3 out")
        assert "with 127.0.0.1:8998" in tab.text("#requests summary"), (
            "the newest row names its peer"
        )
        tab.click("#failed-only")
        tab.wait("the others to go", lambda tab: "3 out" not in tab.text("#requests"))
        assert "no prefill server" in tab.text("#requests")
        drawn = "row.querySelector('.place i').className"
        found = f"[...document.querySelectorAll('.request')].map(row => {drawn})"
        assert "no_prefill_server" in tab.evaluate(found)  # type: ignore[operator]
        tab.click("#failed-only")
        wait_text(tab, "#requests", "3 out")


def test_a_peer_leads_to_its_own_page_and_one_in_trouble_is_in_the_headline(
    browser: Browser, served: Served
) -> None:
    with open_tab(browser, served.url) as tab:
        wait_text(tab, "#ready", "ready, 3 of 4 peers in trouble")
        links = "[...document.querySelectorAll('#links a')].map(a => [a.textContent, a.href])"
        assert tab.evaluate(links) == [["blue (10.1.22.33:8998)", "http://blue.example:30000/"]]


def fail_traced(submit: Submit) -> list[ToldFrontend]:
    trace = trace_of(submit, 0, status="no_prefill_server")
    lost = msgspec.structs.replace(trace, peer="", transfer=TransferTrace(), reserve_s=0.01)
    return [Failed(submit.request_id, 503, "no_prefill_server", NOBODY, lost)]


def fail(submit: Submit) -> list[ToldFrontend]:
    return [
        Failed(submit.request_id, 503, "no_prefill_server", "no prefill server could be reached")
    ]


def test_an_opened_request_stays_open_while_others_come(browser: Browser, served: Served) -> None:
    with open_tab(browser, served.url) as tab:
        generate(tab, "abc")
        wait_text(tab, "#requests", "out")
        tab.evaluate("document.querySelector('#requests summary').focus()")
        tab.press("Enter")
        count = int(str(tab.evaluate("document.querySelectorAll('.request').length")))
        served.post()
        tab.wait("another", lambda tab: tab.evaluate("document.querySelectorAll('.request').length")
                 != count)  # fmt: skip
        assert tab.evaluate("document.querySelector('.request').open") is False
        opened = "document.querySelector('.request[open] summary')"
        assert tab.evaluate(f"{opened} === document.activeElement") is True
        assert "10.0 MB transferred at 1.00 GB/s" in tab.text(".request[open]")


def answer_cached(cached: CachedTokens, peer: str) -> Answer:
    """Answers whose prompts were cached so; peer: who was asked for them."""

    def answer(submit: Submit) -> list[ToldFrontend]:
        messages = named(submit)
        last = messages[-1]
        assert isinstance(last, Tokens) and last.trace is not None
        trace = msgspec.structs.replace(
            last.trace, cached=cached, peer=peer, prompt_token_count=100
        )
        return [*messages[:-1], msgspec.structs.replace(last, trace=trace)]

    return answer


# What was cached, who was asked, what the row says and what the opened one says.
CACHED_WHERE = [
    (CachedTokens(16, 48), "p:1", "48 % cached",
     "of 100 prompt tokens 48 cached here and not sent, 16 cached on the prefill server, "
     "84 computed there"),
    (CachedTokens(0, 96), "", "96 % cached",
     "96 of 100 prompt tokens cached here, 4 computed here"),
    (CachedTokens(), "p:1", "", "100 prompt tokens computed by the prefill server"),
    (CachedTokens(), "", "", "100 prompt tokens computed here"),
]  # fmt: skip


@pytest.mark.parametrize(("cached", "peer", "row", "facts"), CACHED_WHERE)
def test_a_request_shows_what_was_cached_and_who_computed_the_rest(
    browser: Browser, tmp_path: Path, cached: CachedTokens, peer: str, row: str, facts: str
) -> None:
    with serve_page(tmp_path) as served, open_tab(browser, served.url) as tab:
        served.scheduler.answer = answer_cached(cached, peer)
        generate(tab, "abc")
        wait_text(tab, "#own-facts", f"The prompt: {facts}.")
        wait_text(tab, "#requests", "out")
        shown = tab.text("#requests summary")
        assert ("cached" in shown) == bool(row) and row in shown
        tab.evaluate("document.querySelector('#requests details').open = true")
        assert facts in tab.text(".request[open] .facts")
        bars = "[...document.querySelectorAll('.request > .bar i')].map(i => i.style.width)"
        widths = {48: ["48%", "52%"], 96: ["96%", "4%"], 0: []}
        assert tab.evaluate(bars) == widths[cached.count]
        assert tab.complaints() == []


def test_the_prefix_cache_is_told_of_or_why_there_is_none(browser: Browser, tmp_path: Path) -> None:
    with serve_page(tmp_path) as served, open_tab(browser, served.url) as tab:
        wait_text(tab, "#prefix-cache", "Prefix cache: 960 tokens, 2 of 8 checkpoints.")
        reason = "switched off by --disable-radix-cache"
        served.scheduler.prefix_cache = PrefixCacheState(reason=reason)
        wait_text(tab, "#prefix-cache", f"No prefix is kept: {reason}.")


def test_a_prefill_server_shows_its_side_and_no_prompt_box(
    browser: Browser, tmp_path: Path
) -> None:
    prefill = serve_page(tmp_path, role=Role.PREFILL, prefill=())
    with prefill as served, open_tab(browser, served.url) as tab:
        wait_text(tab, "#about", "Baton prefill server")
        assert tab.text("#form") == "" and "decode server" in tab.text("#elsewhere")
        own = "Number(document.querySelector('#picture .own').getAttribute('x'))"
        other = "Number(document.querySelector('#picture .box:not(.own)').getAttribute('x'))"
        assert tab.evaluate(f"{own} < {other}") is True, "bytes go from left to right"
        assert tab.complaints() == []


def test_a_server_that_is_gone_is_said_to_be_and_comes_back(
    browser: Browser, tmp_path: Path
) -> None:
    with ExitStack() as tabs:
        with serve_page(tmp_path) as served:
            tab = tabs.enter_context(open_tab(browser, served.url))
            wait_text(tab, "#ready", "ready")
            assert tab.text("#gone") == ""
        wait_text(tab, "#gone", "No answer: the server is not there. What you see is")
        assert tab.text("#ready") == "no answer"
        with serve_page(tmp_path, port=int(served.url.rpartition(":")[2])):
            wait_text(tab, "#ready", "ready")
            assert tab.text("#gone") == ""


def test_a_key_is_asked_for_and_kept_in_this_tab_only(browser: Browser, tmp_path: Path) -> None:
    with serve_page(tmp_path, api_keys=(KEY,)) as served, open_tab(browser, served.url) as tab:
        wait_text(tab, "#key-dialog", "asks for an API key")
        tab.press("Escape")
        tab.evaluate(LOOK_AGAIN)
        assert tab.text("#key-dialog") == "", "it is not asked for again and again"
        tab.click("#give")
        assert tab.evaluate("document.activeElement.id") == "key"
        tab.type("sk-wrong")
        tab.press("Enter")
        wait_text(tab, "#key-problem", "not valid here")
        tab.type(KEY)
        tab.press("Enter")
        wait_text(tab, "#ready", "ready")
        generate(tab, "abc")
        wait_text(tab, "#figures", "tokens")
        assert tab.evaluate("JSON.stringify(sessionStorage)") == json.dumps(
            {"baton-api-key": KEY}, separators=(",", ":")
        )
        assert tab.evaluate("localStorage.length + document.cookie.length") == 0
        tab.click("#forget")
        wait_text(tab, "#key-dialog", "asks for an API key")
        assert tab.evaluate("sessionStorage.length") == 0
