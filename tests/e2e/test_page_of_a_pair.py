"""The pages of a real pair in a browser: nothing complains, a prompt streams and shows where its
time went, and a prefill server that was killed is said to be gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from demo.facts import make_question
from tests.e2e.fleet import Fleet, Node
from tests.frontend.browser import CHROMIUM, WHY_NOT, Browser, Tab, chromium, open_tab

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.soak,
    pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT),
]


@dataclass
class Pair:
    prefill: Node
    decode: Node
    browser: Browser


@pytest.fixture(scope="module")
def pair(fleet: Fleet) -> Iterator[Pair]:
    prefill = fleet.prefill()
    decode = fleet.decode([prefill])
    with chromium() as browser:
        fleet.wait_ready()
        yield Pair(prefill, decode, browser)


def wait_text(tab: Tab, selector: str, text: str) -> None:
    tab.wait(f"{text!r} in {selector}", lambda tab: text in tab.text(selector))


def test_a_prompt_streams_and_both_pages_show_where_its_time_went(pair: Pair) -> None:
    question = make_question(11, 6)
    with (
        open_tab(pair.browser, pair.prefill.url) as there,
        open_tab(pair.browser, pair.decode.url) as here,
    ):
        wait_text(here, "#ready", "ready")
        assert here.evaluate("document.querySelectorAll('#picture .link.good').length") == 1
        here.evaluate("document.getElementById('prompt').focus()")
        here.type(question.chat)
        here.press("Enter", control=True)

        wait_text(here, "#own-facts", "transferred")
        assert here.text("#answer").strip() == question.answer.strip()
        (told,) = pair.decode.get("/requests").json()["requests"]
        assert told["rid"].startswith("page-")
        spans = pair.decode.get(f"/requests/{told['rid']}/timeline").json()["spans"]
        rows = here.evaluate("document.querySelectorAll('#own .number').length")
        assert rows == len(spans) >= 4
        for tab in (here, there):
            wait_text(tab, "#requests", f"{told['prompt_tokens']} in")
            assert tab.complaints() == []


def test_a_killed_prefill_server_is_shown_as_lost(pair: Pair) -> None:
    with (
        open_tab(pair.browser, pair.prefill.url) as there,
        open_tab(pair.browser, pair.decode.url) as here,
    ):
        for tab in (here, there):
            wait_text(tab, "#ready", "ready")
        pair.prefill.kill()

        wait_text(there, "#gone", "No answer")
        wait_text(here, "#troubles", f"{pair.prefill.bootstrap}: not connected: ")
        wait_text(here, "#ready", "no prefill server can be used")
        assert here.evaluate("document.querySelectorAll('#picture .link.bad').length") == 1
        assert here.complaints() == []
